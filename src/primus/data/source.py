"""The contract of sources: named datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from msgspec import Struct

from primus.contract import PlugInKind, optional, optional_value


class HubDataset(Struct, frozen=True, kw_only=True):
    """A dataset of the hub, as a source plug-in declares it in its ``DATASET``."""

    repo: str
    """OWNER/NAME."""
    files: dict[str, str] = {}
    """Pattern of the files of each configuration, the default one first. A configuration may be a pattern too;
    ``{config}`` and ``{split}`` stand for the requested ones. Empty where the hub itself lists the files."""
    text: str | None = None
    """Column of the text; found in the first file when None."""


class Source(Protocol):
    """A named dataset: `sources/NAME.py`, chosen by `dataset: NAME` in an experiment or `--dataset NAME`.

    A source yields documents, or names the files of a dataset on the Hugging Face hub: it has `documents` or `DATASET`.
    The file is imported on the control plane and in the processes that encode; import heavy packages inside
    `documents`.
    """

    @property
    @optional_value(None)
    def documents(self) -> Callable[[], Iterator[str]] | None:
        """Function `documents()` that returns an iterator of texts. Called once in one process of `data prepare` or of
        the first rank that needs the dataset. It must yield the same texts in the same order each time."""
        ...

    @property
    @optional_value(None)
    def DATASET(self) -> HubDataset | None:
        """The dataset on the hub: `HubDataset(repo="OWNER/NAME", files={...}, text="COLUMN")`."""
        ...

    @optional
    def version(self, /) -> str:
        """Text that changes whenever the documents do; prepared data of another version is not reused. Default: the
        empty text."""
        return ""


SOURCES = PlugInKind[Source]("sources", Source, one_of=("documents", "DATASET"))
