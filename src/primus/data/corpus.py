"""The text of a job: files and folders, or a named dataset, with an identity that tells when it has changed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from primus import registry
from primus.data import atomic, documents
from primus.data.documents import Bad, Text
from primus.data.manifest import InputFacts, Recipe
from primus.errors import PrimusError


@dataclass(frozen=True)
class Corpus:
    """Documents that can be read again and again."""

    recipe: Recipe
    """How files become documents."""
    facts: list[InputFacts]
    """Identity of each input."""
    dataset: str | None = None
    """Named dataset, instead of files."""
    files: list[str] = field(default_factory=list)
    """All files of all inputs, in order."""
    modified_ns: list[int] = field(default_factory=list)
    """Time of the last change of each."""

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(facts.bytes for facts in self.facts)

    def read(self, key: str) -> Iterator[Text | Bad]:
        """Every document; `key` is the field of a record that holds the text.

        Raises:
            PrimusError: A file is damaged or cannot be read.
        """
        if self.dataset:
            yield from _documents_of(self.dataset)
        for file in self.files:
            yield from documents.read(file, key, self.recipe.text_documents, cut=not self.recipe.add_special_tokens)

    def check_unchanged(self) -> None:
        """Make sure that what was read is what the facts describe.

        Raises:
            PrimusError: A file was changed meanwhile.
        """
        for file, modified_ns in zip(self.files, self.modified_ns, strict=True):
            if not os.path.exists(file) or os.stat(file).st_mtime_ns != modified_ns:
                raise PrimusError(f"{file}: changed while it was read", "run this again when nothing writes to it")


def open_files(inputs: tuple[str, ...], recipe: Recipe) -> Corpus:
    """The documents of files and folders.

    Raises:
        UsageError: An input does not exist, is empty, or is of no known kind.
    """
    found = {given: documents.find(given) for given in inputs}
    files = [file for group in found.values() for file in group]
    modified_ns = [os.stat(file).st_mtime_ns for file in files]
    return Corpus(recipe, [_facts(given, group) for given, group in found.items()], None, files, modified_ns)


def open_dataset(name: str, recipe: Recipe) -> Corpus:
    """The documents of a named dataset.

    Raises:
        UsageError: There is no such dataset.
    """
    source = registry.load("sources", name)
    version = str(getattr(source, "version", str)())
    digest = hashlib.sha256(f"{name}\n{version}".encode()).hexdigest()
    return Corpus(recipe, [InputFacts(path=f"dataset:{name}", version=version, sha256=digest)], name)


def _documents_of(dataset: str) -> Iterator[Text]:
    try:
        yield from map(Text, registry.load("sources", dataset).documents())
    except OSError as error:
        raise PrimusError(f"dataset {dataset}: cannot be read, {error}") from None


def _facts(given: str, files: list[str]) -> InputFacts:
    root = Path(given).expanduser()
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{Path(file).relative_to(root)}\n{atomic.sha256(Path(file))}\n".encode())
    size = sum(map(documents.size_of, files))
    return InputFacts(path=given, files=len(files), bytes=size, sha256=digest.hexdigest())
