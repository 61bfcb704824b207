"""What a job is asked that makes a folder of documents from documents, as cleaning and deduplication do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from msgspec import Struct

from primus.data import readers as documents
from primus.data.megatron.manifest import FileFacts, InputFacts
from primus.data.shards import inputs
from primus.data.shards.executors import Executor
from primus.data.shards.inputs import Inputs
from primus.data.shards.shard_queue import BadItem
from primus.errors import UsageError

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class TextJob:
    """What to read, where to write, and who does it."""

    inputs: tuple[str, ...] = ()
    """Files, folders, patterns and URLs."""
    dataset: str | None = None
    """Named dataset instead of files."""
    output: Path
    """Folder for the documents that are kept; beside it are pages for people, ``OUTPUT.report.md`` and ``.html``."""
    json_key: str = "text"
    """Field or column of the text."""
    text_documents: str = "file"
    """What is a document in a .txt file."""
    max_bad: int = 0
    """Bad documents that may be left out."""
    workers: int | None = None
    """Processes; all cores when None."""
    executor: Executor = "local"
    """Who works: processes of this machine or the tasks of a Ray cluster."""
    existing: Literal["check", "replace"] = "check"
    """Other data that is at the output is an error, or is replaced."""

    def open(self) -> Inputs:
        """The input.

        Raises:
            UsageError: It is missing or unknown, or the output is in it.
        """
        if bool(self.inputs) == bool(self.dataset):
            raise UsageError("both an input and a dataset" if self.inputs else "nothing to read", "give one of them")
        if self.output.name in ("", "."):
            raise UsageError(f"output '{self.output}' is no name of a folder", "give a new folder like data/new")
        return inputs.open_input(self.inputs, self.dataset, self.output, self.text_documents)

    def page_path(self, kind: str = "html") -> Path:
        """The page for people that belongs to the output: ``md`` or ``html``."""
        return self.output.with_name(f"{self.output.name}.report.{kind}")


class TextReport(Struct, frozen=True, kw_only=True):
    """What every report of such a job says; written last, so that its existence means that all files are there."""

    primus: str
    """Version of the package that wrote it."""
    identity: str
    """Changes with the recipe, and how the input is read and the result written."""
    inputs: list[InputFacts]
    """What it was made from."""
    documents: int
    """Documents that have text."""
    bad: list[BadItem] = []
    """Bad documents, left out."""
    files: dict[str, FileFacts] = {}
    """What was kept, by name."""

    @property
    def input_text(self) -> str:
        """The input as it was given."""
        return ", ".join(each.path for each in self.inputs)


def parse_text_key(given: tuple[str, ...]) -> str:
    """Field or column of the text of an input where nobody has named one.

    Raises:
        UsageError: There are several that could be meant, or the input is missing or unknown.
    """
    return documents.choose_text_column((file for each in given for file in documents.find_files(each)), "--json-key")
