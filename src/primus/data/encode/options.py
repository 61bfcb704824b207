"""Options that the tasks have in common which make token files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct

from primus.errors import UsageError

if TYPE_CHECKING:
    from primus.data.encode.job import EncodeJob, PreparedTokens


class EncodeOptions(Struct, frozen=True, kw_only=True):
    """What to tokenize, and how."""

    input: tuple[str, ...] = ()
    """Files (.txt, .jsonl, .csv, .parquet, also compressed, source files), folders, patterns and URLs."""
    tokenizer: str = ""
    """A tokenizer.json, SentencePiece .model or .tiktoken file, a folder, a hub name, or bpe:VOCAB to train one."""
    output: str | None = None
    """Prefix of the files: PREFIX_text_document.bin and .idx, as Megatron-LM names them."""
    json_keys: tuple[str, ...] = ()
    """Fields of a record, or columns, that hold text; each becomes a pair of files; text, or else the only one."""
    append_eod: bool | None = None
    """End each document with the end-of-document token; on unless --output-prefix is given."""
    eod: str | None = None
    """End-of-document token; found in the vocabulary by default."""
    add_special_tokens: bool = False
    """Add what the tokenizer's own template puts around a text, such as a beginning-of-text token."""
    parse_special_tokens: bool = False
    """Turn a special token that a text spells out into its id; by default it stays plain text."""
    text_documents: Literal["file", "paragraph", "line"] = "file"
    """What is a document in a .txt file."""
    max_bad: Annotated[int, Meta(ge=0)] = 0
    """Bad documents (broken JSON, no such field, null, not UTF-8) that may be left out; they are listed in a file."""
    shuffle: bool = False
    """Write the documents in a random order, the same for any number of workers."""
    shuffle_seed: Annotated[int, Meta(ge=0)] | None = None
    """Seed of that order; 0 by default."""
    workers: Annotated[int, Meta(ge=1)] | None = None
    """Processes that tokenize; all cores for a large input by default."""
    executor: Literal["local", "ray"] = "local"
    """Who does the work: processes of this machine, or the Ray cluster that $RAY_ADDRESS names."""
    fast: bool = True
    """Tokenize the fast way where the tokenizer has one; the tokens are the same."""
    overwrite: bool = False
    """Replace other or damaged data at the output."""


def output_prefix(given: str) -> Path:
    """The prefix of the files that an option names.

    Raises:
        UsageError: It names a folder.
    """
    if given.endswith("/"):
        raise UsageError(f"output '{given}' is a folder", f"give a prefix like {given}corpus")
    return Path(given).expanduser()


def make_job(
    options: EncodeOptions,
    output: Path,
    tokenizer: str,
    append_eod: bool = True,
    split_sentences: str | None = None,
    keep_newlines: bool = False,
    **changes: Any,
) -> EncodeJob:
    """The job that the options describe.

    Args:
        options: The options.
        output: Prefix of the files.
        tokenizer: Name of the tokenizer.
        append_eod: What to do where the options do not say it.
        split_sentences: See `primus.data.megatron.manifest.EncodeRecipe`.
        keep_newlines: See `primus.data.megatron.manifest.EncodeRecipe`.
        changes: Fields of the job that are not as in the options.
    """
    from primus.data.encode.job import EncodeJob
    from primus.data.megatron.manifest import EncodeRecipe

    if options.shuffle_seed is not None and not options.shuffle:
        raise UsageError("--shuffle-seed without --shuffle", "give --shuffle too")
    settings: dict[str, Any] = {
        "output": output,
        "tokenizer": tokenizer,
        "inputs": options.input,
        "json_keys": options.json_keys or (_text_column(options.input),),
        "eod": options.eod,
        "recipe": EncodeRecipe(
            append_eod=append_eod if options.append_eod is None else options.append_eod,
            add_special_tokens=options.add_special_tokens,
            parse_special_tokens=options.parse_special_tokens,
            text_documents=options.text_documents,
            max_bad=options.max_bad,
            shuffle_seed=(options.shuffle_seed or 0) if options.shuffle else None,
            split_sentences=split_sentences,
            keep_newlines=keep_newlines,
        ),
        "workers": options.workers,
        "executor": options.executor,
        "fast": options.fast,
        "existing": "replace" if options.overwrite else "check",
    }
    return EncodeJob(**settings | changes)


def _text_column(given: tuple[str, ...]) -> str:
    """Name of the column that holds the text where nobody has named one.

    Raises:
        UsageError: There are several that could be meant, or an input is missing or unknown.
    """
    from primus.data import readers

    return readers.choose_text_column(file for each in given for file in readers.find_files(each))


def check_packages(task: str) -> None:
    """Tell what is missing where only the command line is installed.

    Raises:
        UsageError: A package that every job needs is not there.
    """
    missing = [name for name in ("numpy", "tokenizers", "xxhash") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"{task} needs {' and '.join(missing)}", f"pip install {' '.join(missing)}")


def summarise_prepared(prepared: PreparedTokens) -> dict[str, object]:
    """What to print of token files."""
    manifest = prepared.manifest
    return {
        "prefix": str(prepared.prefix),
        "made": prepared.made,
        "documents": manifest.documents,
        "sequences": manifest.sequences,
        "tokens": manifest.tokens,
        "empty_documents": manifest.empty_documents,
        "bad_documents": manifest.bad_documents,
        "dtype": manifest.dtype,
        "vocab_size": manifest.tokenizer.vocab_size,
        "tokenizer": str(prepared.prefix.parent / manifest.tokenizer.file),
        "fingerprint": manifest.fingerprint,
    }
