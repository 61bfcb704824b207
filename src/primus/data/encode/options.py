"""Options that `data encode` and `data prepare` share."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct

from primus.errors import UsageError

if TYPE_CHECKING:
    from primus.data.encode.job import EncodeJob, PreparedTokens


class EncodeOptions(Struct, frozen=True, kw_only=True):
    """What to tokenize, and how."""

    input: tuple[str, ...] = ()
    """Files (.jsonl, .txt, .csv, .parquet, compressed or not, source code), folders, glob patterns and URLs."""
    tokenizer: str = ""
    """A tokenizer.json, SentencePiece .model or .tiktoken file, a folder, a Hub name, or bpe:VOCAB to train one."""
    output: str | None = None
    """Prefix of the output files: PREFIX_text_document.bin and .idx, as in Megatron-LM."""
    json_keys: tuple[str, ...] = ()
    """Fields or columns that hold text; each becomes a pair of files. Default: "text", or the only text column."""
    append_eod: bool | None = None
    """End each document with the end-of-document token; default: yes, unless --output-prefix is given."""
    eod: str | None = None
    """End-of-document token; by default, found in the vocabulary."""
    add_special_tokens: bool = False
    """Apply the tokenizer's template, which adds tokens such as beginning-of-text."""
    parse_special_tokens: bool = False
    """Encode special tokens that occur in a text as their ids; by default they stay plain text."""
    text_documents: Literal["file", "paragraph", "line"] = "file"
    """What is a document in a .txt file."""
    max_bad: Annotated[int, Meta(ge=0)] = 0
    """Maximum number of bad documents (broken JSON, missing or null text, not UTF-8) to skip and list in a file."""
    shuffle: bool = False
    """Shuffle the documents; the order does not depend on the number of workers."""
    shuffle_seed: Annotated[int, Meta(ge=0)] | None = None
    """Seed of the shuffle; default: 0."""
    workers: Annotated[int, Meta(ge=1)] | None = None
    """Number of processes; by default all cores for a large input."""
    executor: Literal["local", "ray"] = "local"
    """Run on this machine, or on the Ray cluster at $RAY_ADDRESS."""
    fast: bool = True
    """Use the fast tokenizer where it supports the vocabulary; the tokens are the same."""
    overwrite: bool = False
    """Replace other or damaged data at the output."""


def output_prefix(given: str) -> Path:
    """Path of the output prefix that an option gives.

    Raises:
        UsageError: The option gives a folder.
    """
    if given.endswith("/"):
        raise UsageError(f"output '{given}' is a folder", f"give a prefix like {given}corpus")
    return Path(os.path.expanduser(given))


def make_job(options: EncodeOptions, output: Path, tokenizer: str) -> EncodeJob:
    """Create the job that the options describe.

    Args:
        options: The options.
        output: Prefix of the files.
        tokenizer: Name of the tokenizer.
    """
    from primus.data.encode.job import EncodeJob
    from primus.data.megatron.manifest import EncodeRecipe

    if options.shuffle_seed is not None and not options.shuffle:
        raise UsageError("--shuffle-seed without --shuffle", "give --shuffle too")
    return EncodeJob(
        output=output,
        tokenizer=tokenizer,
        inputs=options.input,
        json_keys=options.json_keys or (_find_text_column(options.input),),
        eod=options.eod,
        recipe=EncodeRecipe(
            append_eod=options.append_eod is not False,
            add_special_tokens=options.add_special_tokens,
            parse_special_tokens=options.parse_special_tokens,
            text_documents=options.text_documents,
            max_bad=options.max_bad,
            shuffle_seed=(options.shuffle_seed or 0) if options.shuffle else None,
        ),
        workers=options.workers,
        executor=options.executor,
        fast=options.fast,
        existing="replace" if options.overwrite else "check",
    )


def _find_text_column(given: tuple[str, ...]) -> str:
    """Name of the column that holds the text, if the user has not named one.

    Raises:
        UsageError: Several columns are candidates, or an input is missing or of an unknown kind.
    """
    from primus.data import readers

    return readers.choose_text_column(file for each in given for file in readers.find_files(each))


def check_packages(task: str) -> None:
    """Check that the required packages are installed; a minimal installation has only the command line.

    Raises:
        UsageError: A required package is not installed.
    """
    missing = [name for name in ("numpy", "tokenizers", "xxhash") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"{task} needs {' and '.join(missing)}", f"pip install {' '.join(missing)}")


def summarize_prepared(prepared: PreparedTokens) -> dict[str, object]:
    """Summary of token files for the output of a command."""
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
