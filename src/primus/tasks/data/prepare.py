"""Make Megatron .bin/.idx token files from text, JSON lines, parquet, source trees or a named dataset."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct

from primus import registry
from primus.errors import UsageError
from primus.task import TaskContext

if TYPE_CHECKING:
    from primus.data.prepare import Job, Prepared, Progress


class Options(Struct, frozen=True, kw_only=True):
    """Options of `data prepare`."""

    input: tuple[str, ...] = ()
    """Files (.txt, .jsonl, .json, .parquet, also .gz and .zst, source files) and folders of them."""
    dataset: str | None = None
    """Named dataset instead of files; see --list."""
    list: bool = False
    """Print the named datasets."""
    tokenizer: str = ""
    """A tokenizer.json, its folder, a name on the Hugging Face hub, or bpe:VOCAB to train one on the text."""
    output: str | None = None
    """Prefix of the files: PREFIX_text_document.bin and .idx, as Megatron-LM names them."""
    data_path: str = "./data"
    """Folder of a named dataset where --output is not given."""
    json_keys: tuple[str, ...] = ("text",)
    """Fields of a record, or columns, that hold text; each becomes a pair of files."""
    append_eod: bool = True
    """End each document with the end-of-document token."""
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
    workers: Annotated[int, Meta(ge=1)] | None = None
    """Processes that tokenize; all cores for a large input by default."""
    overwrite: bool = False
    """Replace other data at the output."""


def run(options: Options, context: TaskContext) -> None:
    """Prepare the data, or list the named datasets.

    Raises:
        PrimusError: See `primus.data.prepare.prepare`.
    """
    if options.list:
        _list(context)
        return
    _check_packages()
    job = _job(options)
    from primus.data.prepare import prepare as make

    with _Display() as display:
        prepared = make(job, display.say, display.show)
    values = [_summary(each) for each in prepared]
    context.result(values, "\n".join(f"--train_data_path {value['prefix']}" for value in values))


def _check_packages() -> None:
    """Tell what is missing where only the command line is installed.

    Raises:
        UsageError: A package that every job needs is not there.
    """
    missing = [name for name in ("numpy", "tokenizers") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"data prepare needs {' and '.join(missing)}", f"pip install {' '.join(missing)}")


def _list(context: TaskContext) -> None:
    found = {name: registry.summary("sources", name) for name in registry.names("sources")}
    width = max(map(len, found), default=0)
    context.result(found, "\n".join(f"{name:{width}}  {summary}" for name, summary in found.items()))


def _job(options: Options) -> Job:
    """The job that the options describe.

    Raises:
        UsageError: Something is missing.
    """
    if not options.input and not options.dataset:
        raise UsageError("nothing to prepare", "give --input PATH... or --dataset NAME (see --list)")
    if not options.tokenizer:
        raise UsageError("no tokenizer", "give --tokenizer PATH, a hub name, or bpe:VOCAB to train one on the text")
    if not options.output and not options.dataset:
        raise UsageError("no output", "give --output PREFIX")
    from primus.data import manifest, named
    from primus.data.prepare import Job

    if options.output or not options.dataset:
        output = Path(options.output or "").expanduser()
    else:
        output = named.output_prefix(Path(options.data_path), options.dataset, options.tokenizer)
    return Job(
        output=output,
        tokenizer=options.tokenizer,
        inputs=options.input,
        dataset=options.dataset,
        json_keys=options.json_keys,
        eod=options.eod,
        recipe=manifest.Recipe(
            append_eod=options.append_eod,
            add_special_tokens=options.add_special_tokens,
            parse_special_tokens=options.parse_special_tokens,
            text_documents=options.text_documents,
            max_bad=options.max_bad,
        ),
        workers=options.workers,
        existing="replace" if options.overwrite else "check",
    )


def _summary(prepared: Prepared) -> dict[str, object]:
    manifest = prepared.manifest
    return {
        "prefix": str(prepared.prefix),
        "made": prepared.made,
        "documents": manifest.documents,
        "tokens": manifest.tokens,
        "empty_documents": manifest.empty_documents,
        "bad_documents": manifest.bad_documents,
        "dtype": manifest.dtype,
        "vocab_size": manifest.tokenizer.vocab_size,
        "tokenizer": str(prepared.prefix.parent / manifest.tokenizer.file),
    }


class _Display:
    """Lines on standard error, and below them on a terminal how far it is."""

    def __init__(self) -> None:
        from rich.console import Console

        console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
        self._console = console
        self._status = console.status("reading", spinner="line") if console.is_terminal else None
        self._start = time.monotonic()

    def __enter__(self) -> _Display:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._status:
            self._status.stop()

    def say(self, text: str) -> None:
        """Print a line."""
        if self._status:
            self._console.print(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def show(self, progress: Progress) -> None:
        """Show the progress on a terminal."""
        if self._status:
            rate = progress.characters / 1e6 / max(time.monotonic() - self._start, 1e-3)
            self._status.update(
                f"{progress.documents:,} documents, {progress.characters / 1e6:,.1f} M characters,"
                f" {progress.tokens / 1e6:,.1f} M tokens, {rate:.1f} M characters/s"
            )
