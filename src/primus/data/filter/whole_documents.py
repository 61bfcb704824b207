"""Reads whole, non-empty documents of a shard in a fixed order, so that they can be numbered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from primus.data import readers as documents
from primus.data.readers import BadDocument, TextDocument
from primus.data.readers.shard import FilePart, Shard
from primus.data.shards import inputs

LONGEST_DOCUMENT = documents.LONGEST_LINE
"""Maximum size of a text file that is one document. Like a record, it is read into memory."""


@dataclass
class DocumentReader:
    """Reads documents, counts empty ones, and reports bad ones."""

    key: str
    """Field or column of the text."""
    text_documents: str = "file"
    """Unit that is a document in a .txt file."""
    fields: bool = False
    """Whether to read the other fields of records."""
    bad: Callable[[str, str], None] = lambda where, reason: None
    """Called with place and reason of each bad document."""
    empty: int = field(default=0, init=False)
    """Number of documents without text so far."""

    def read(self, shard: Shard) -> Iterator[TextDocument]:
        """Yield the documents of a shard that have text."""
        for part in shard.parts:
            for item in _join_pieces(self._read(part)):
                if isinstance(item, BadDocument):
                    self.bad(item.where, item.reason)
                elif item.text and not item.text.isspace():
                    yield item
                else:
                    self.empty += 1

    def _read(self, part: FilePart) -> Iterator[TextDocument | BadDocument]:
        if part.file.startswith(inputs.DATASET):
            return inputs.read_part(part, self.key, self.text_documents)
        return documents.read_documents(part, self.key, documents.ReadOptions(self.text_documents, fields=self.fields))


def batch_documents(
    documents: Iterable[TextDocument], characters: int, most: int | None = None
) -> Iterator[list[TextDocument]]:
    """Yield documents in batches of at least `characters` characters or of `most` documents."""
    held: list[TextDocument] = []
    size = 0
    for document in documents:
        held.append(document)
        size += len(document.text)
        if size >= characters or len(held) == most:
            yield held
            held, size = [], 0
    if held:
        yield held


def _join_pieces(items: Iterable[TextDocument | BadDocument]) -> Iterator[TextDocument | BadDocument]:
    """Join the pieces of documents that the reader splits."""
    pieces: list[str] = []
    size = 0
    for item in items:
        if isinstance(item, BadDocument) or (item.begins and item.ends):
            yield item
            continue
        if item.begins:
            pieces, size = [], 0
            start = item
        size += len(item.text)
        # Beyond the maximum the pieces are dropped, and only their size is counted until the document ends.
        if size <= LONGEST_DOCUMENT:
            pieces.append(item.text)
        else:
            pieces.clear()
        if item.ends and size <= LONGEST_DOCUMENT:
            yield msgspec.structs.replace(start, text="".join(pieces), ends=True)
        elif item.ends:
            yield BadDocument(start.where, f"a document of more than {LONGEST_DOCUMENT >> 20} MiB")
