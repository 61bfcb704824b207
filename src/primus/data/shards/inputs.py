"""The input of a job: its files or named dataset in shards, and what tells whether it is still the same."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from itertools import chain
from pathlib import Path

import xxhash

from primus import registry
from primus.data import readers
from primus.data.megatron.manifest import InputFacts
from primus.data.readers import BadDocument, TextDocument, is_remote
from primus.data.readers import shard as shards
from primus.data.readers.files import whole_file_errors, would_contain
from primus.data.readers.kinds import COLUMNS, detect_kind
from primus.data.readers.shard import FilePart, Shard
from primus.data.source import SOURCES
from primus.errors import PrimusError, UsageError
from primus.redaction import redact

DATASET = "dataset:"
"""What the part of a named dataset begins with, where that of a file has a path."""

BLOCK = 1 << 20
"""Bytes of a file that have a checksum of their own, so that each worker digests what it reads."""


@dataclass(frozen=True)
class Input:
    """One thing that was given: a file, a folder, a pattern, a URL or a named dataset."""

    given: str
    """As it was written."""
    files: tuple[str, ...]
    """Its files in order."""


@dataclass(frozen=True)
class Inputs:
    """Documents that any process reads in the same order and the same shards."""

    given: tuple[Input, ...]
    """Where they come from."""
    stamps: dict[str, str]
    """Size and time of the last change of each file, or the version of a dataset: the same, so is the content."""
    shards: list[Shard]
    """All of it."""

    @property
    def identity(self) -> str:
        """Changes when any file does."""
        return hashlib.sha256("\n".join(f"{file}\t{stamp}" for file, stamp in self.stamps.items()).encode()).hexdigest()

    @property
    def num_bytes(self) -> int:
        """Size of all files, compressed where they are."""
        return sum(shard.bytes for shard in self.shards)

    def __str__(self) -> str:
        return ", ".join(each.given.removeprefix(DATASET) for each in self.given)

    def check_unchanged(self) -> None:
        """Make sure that no file has changed since it was found.

        Raises:
            PrimusError: One has.
        """
        for file, before in self.stamps.items():
            check_fingerprint(file, before)

    def check_outside(self, output: Path, is_folder: bool = True) -> None:
        """Make sure that what is written is no input, now or when the same is done again.

        Args:
            output: A folder, or the path that the names of files begin with.
            is_folder: Which of the two; into a folder of text no file is written beside another.

        Raises:
            UsageError: The output is in an input, or an input in the folder.
        """
        for each in self.given:
            if would_contain(each.given, output):
                raise UsageError(f"{output}: it is in the input {each.given}", "give an --output outside of it")
        place = Path(os.path.expanduser(output)).resolve()
        local = (file for each in self.given for file in each.files if is_folder and not is_remote(file))
        if inside := next((file for file in local if place in Path(file).resolve().parents), None):
            raise UsageError(f"{inside}: this input is in the output {output}", "give another --output")

    def collect_facts(self, contents: Sequence[Sequence[str]]) -> list[InputFacts]:
        """What a manifest says of each input.

        Args:
            contents: For each shard what `content` gave for each of its parts.
        """
        parts = [part for shard in self.shards for part in shard.parts]
        digests = _combine_digests(zip(parts, chain.from_iterable(contents), strict=True))
        return [self._build_facts(each, digests) for each in self.given]

    def read_facts(self) -> list[InputFacts]:
        """The same, where nobody else has read the files."""
        return self.collect_facts([hash_contents(shard) for shard in self.shards])

    def describe_difference(self, facts: Sequence[InputFacts]) -> str:
        """Why facts are not those of these inputs, in words; empty where they are.

        A file of another time or name but of the same size, as a copy is, is read: its content decides.
        """
        if len(facts) == len(self.given) and all(map(self._is_same, self.given, facts)):
            return ""
        old, new = {each.path: each for each in facts}, {redact(each.given): each for each in self.given}
        for path in old | new:
            if path not in old or path not in new or not self._is_same(new[path], old[path]):
                return f"{path.removeprefix(DATASET)} is new, gone or changed"
        return "its inputs have another order"

    def _is_same(self, one: Input, before: InputFacts) -> bool:
        if (before.path, before.stamp) == (redact(one.given), self._fingerprint_input(one)):
            return True
        now = self._build_facts(one, {})
        return (now.files, now.bytes) == (before.files, before.bytes) and self._read(one).sha256 == before.sha256

    def _read(self, one: Input) -> InputFacts:
        parts = (part for shard in self.shards for part in shard.parts if part.file in one.files)
        return self._build_facts(one, _combine_digests((part, hash_part(part)) for part in parts))

    def _fingerprint_input(self, one: Input) -> str:
        return hashlib.sha256("\n".join(self.stamps[file] for file in one.files).encode()).hexdigest()

    def _build_facts(self, one: Input, digests: dict[str, str]) -> InputFacts:
        lines = [f"{_relative_name(one.given, file)}\n{digests.get(file) or self.stamps[file]}\n" for file in one.files]
        return InputFacts(
            path=redact(one.given),
            files=0 if one.given.startswith(DATASET) else len(one.files),
            bytes=sum(map(_read_file_bytes, one.files)),
            version=self.stamps[one.given] if one.given.startswith(DATASET) else "",
            stamp=self._fingerprint_input(one),
            sha256=hashlib.sha256("".join(lines).encode()).hexdigest(),
        )


def open_input(
    given: Iterable[str], dataset: str | None, output: Path, text_documents: str = "file", is_folder: bool = True
) -> Inputs:
    """The documents of files or of a named dataset, of which none is where the result is written.

    Args:
        given: Files, folders, patterns and URLs.
        dataset: Named dataset, instead of them.
        output: See `Inputs.check_outside`.
        text_documents: What is a document in a .txt file.
        is_folder: See `Inputs.check_outside`.

    Raises:
        UsageError: One of them does not exist, is empty or unknown, or the output is in it.
        PrimusError: It cannot be read.
    """
    if dataset:
        return open_dataset(dataset)
    found = open_files(given, text_documents)
    found.check_outside(output, is_folder)
    return found


def open_files(given: Iterable[str], text_documents: str = "file") -> Inputs:
    """The documents of files, folders, patterns and URLs.

    Raises:
        UsageError: One of them does not exist, is empty, or is of no known kind, or a file is given twice.
        PrimusError: It cannot be read.
    """
    found = tuple(Input(each, tuple(readers.find_files(each))) for each in given)
    _check_once(found)
    files = [file for each in found for file in each.files]
    size = shards.choose_shard_size(sum(map(readers.read_size, files)))
    return Inputs(
        found, {file: fingerprint_file(file) for file in files}, readers.plan_shards(files, text_documents, size)
    )


def _check_once(given: Iterable[Input]) -> None:
    """Make sure that no file is read twice, as where both a folder and a file of it are given."""
    seen: dict[str, str] = {}
    for each in given:
        for file in each.files:
            place = file if is_remote(file) else os.path.abspath(file)
            if place in seen:
                raise UsageError(
                    f"{file} is given twice, by {seen[place]} and by {each.given}",
                    "give it once; training repeats a corpus by its weight",
                )
            seen[place] = each.given


def open_dataset(name: str) -> Inputs:
    """The documents of a named dataset.

    Raises:
        UsageError: There is no such dataset, or it is on the hub.
    """
    source = None if "/" in name else registry.load_plug_in(SOURCES, name)
    if source is None or source.documents is None:
        fetching = f"`data fetch {name} --output FOLDER`, then give --input FOLDER; `data prepare` does both"
        raise UsageError(f"dataset {name}: it is on the Hugging Face hub, not here", fetching)
    file = DATASET + name
    version = str(source.version())
    return Inputs((Input(file, (file,)),), {file: version}, [Shard(0, (FilePart(file),), 0)])


def read_part(
    part: FilePart, key: str, text_documents: str = "file", cut: bool = True, lists: bool = False
) -> Iterator[TextDocument | BadDocument]:
    """Documents of a part of an input; see `primus.data.readers.read_documents`."""
    if part.file.startswith(DATASET):
        yield from _read_dataset(part.file.removeprefix(DATASET))
    else:
        yield from readers.read_documents(part, key, text_documents, cut, lists=lists)


def check_fingerprint(file: str, before: str) -> None:
    """Make sure that a file has not changed.

    Raises:
        PrimusError: It has.
    """
    try:
        same = file.startswith(DATASET) or fingerprint_file(file) == before
    except PrimusError:
        same = False
    if not same:
        raise PrimusError(f"{file}: changed while it was read", "run this again when nothing writes to it")


def fingerprint_file(file: str) -> str:
    """Size and time of the last change of a path, or what a server says of a URL.

    Raises:
        PrimusError: It cannot be read.
    """
    if is_remote(file):
        from primus.data.readers import remote

        facts = remote.read_remote_facts(file)
        return f"{facts.size} {facts.version}"
    try:
        status = os.stat(file)
    except OSError as error:
        raise PrimusError(f"{file}: cannot be read, {error.strerror}") from None
    return f"{status.st_size} {status.st_mtime_ns}"


def hash_contents(shard: Shard) -> list[str]:
    """What `content` gives for each part of a shard."""
    return [hash_part(part) for part in shard.parts]


def hash_part(part: FilePart) -> str:
    """Checksums of the blocks of a file that begin in a part of it, in hexadecimal digits; empty for what is no file.

    So those of the parts of a file, one after the other, are those of the file, however it is divided.
    """
    if part.file.startswith(DATASET) or is_remote(part.file):
        return ""
    first, last = part.first, part.last
    if detect_kind(part.file) in COLUMNS:  # such parts count row groups: the first stands for all
        first, last = (0, None) if part.first == 0 else (0, 0)
    with whole_file_errors(part.file), open(part.file, "rb") as file:
        return b"".join(_hash_blocks(file, -(-first // BLOCK), last)).hex()


def _hash_blocks(file: BufferedReader, block: int, last: int | None) -> Iterator[bytes]:
    buffer = bytearray(BLOCK)
    view = memoryview(buffer)
    file.seek(block * BLOCK)
    while (last is None or block * BLOCK < last) and (size := file.readinto(buffer)):
        yield xxhash.xxh3_128_digest(view[:size])
        block += 1


def _combine_digests(contents: Iterable[tuple[FilePart, str]]) -> dict[str, str]:
    """Digest of each file from what `content` gave for its parts, in their order."""
    files: dict[str, list[str]] = {}
    for part, digests in contents:
        files.setdefault(part.file, []).append(digests)
    return {
        file: hashlib.sha256(bytes.fromhex("".join(digests))).hexdigest()
        for file, digests in files.items()
        if any(digests)
    }


def _read_file_bytes(file: str) -> int:
    return 0 if file.startswith(DATASET) else readers.read_size(file)


def _relative_name(given: str, file: str) -> str:
    """A file's name within what was given, which stays the same where that is moved or copied."""
    return os.path.relpath(file, os.path.expanduser(given)) if not is_remote(file) else file


def _read_dataset(name: str) -> Iterator[TextDocument]:
    documents = registry.load_plug_in(SOURCES, name).documents
    assert documents is not None, "open_dataset has refused datasets of the hub"
    try:
        yield from map(TextDocument, documents())
    except OSError as error:
        raise PrimusError(f"dataset {name}: cannot be read, {error}") from None
