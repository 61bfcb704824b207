"""Input of a job: files or a named dataset, divided into shards, with fingerprints that detect changes."""

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
from primus.data.readers.files import explain_file_errors, would_contain
from primus.data.readers.kinds import COLUMNS, detect_kind
from primus.data.readers.shard import FilePart, Shard
from primus.data.source import SOURCES
from primus.errors import PrimusError, UsageError
from primus.redaction import redact

DATASET = "dataset:"
"""Prefix of a named dataset in the place of a file path."""

BLOCK = 1 << 20
"""Size of the blocks of a file that are hashed separately, so that each worker hashes only its own part."""


@dataclass(frozen=True)
class Input:
    """One input argument: a file, a folder, a glob pattern, a URL or a named dataset."""

    given: str
    """The argument as the user wrote it."""
    files: tuple[str, ...]
    """Files of the input, in order."""


@dataclass(frozen=True)
class Inputs:
    """All inputs of a job. Every process reads them in the same order and in the same shards."""

    given: tuple[Input, ...]
    """The inputs in order."""
    fingerprints: dict[str, str]
    """Fingerprint of each file (size and modification time) or dataset (version); it changes with the content."""
    shards: list[Shard]
    """Shards of all inputs."""

    @property
    def identity(self) -> str:
        """Digest that changes when any file changes."""
        return hashlib.sha256(
            "\n".join(f"{file}\t{stamp}" for file, stamp in self.fingerprints.items()).encode()
        ).hexdigest()

    @property
    def num_bytes(self) -> int:
        """Size of all files on disk, in bytes."""
        return sum(shard.bytes for shard in self.shards)

    def __str__(self) -> str:
        return ", ".join(each.given.removeprefix(DATASET) for each in self.given)

    def check_unchanged(self) -> None:
        """Check that no file has changed since the input was opened.

        Raises:
            PrimusError: A file has changed.
        """
        for file, before in self.fingerprints.items():
            check_fingerprint(file, before)

    def check_outside(self, output: Path, is_folder: bool = True) -> None:
        """Check that the output is not part of the input, in this run or when the command is repeated.

        Args:
            output: The output folder, or the common prefix of the output files.
            is_folder: Whether `output` is a folder. No input file may then be inside it.

        Raises:
            UsageError: The output is inside an input, or an input is inside the output folder.
        """
        # By pattern, not by file: the output does not exist yet, and the same command would read it the next time.
        for each in self.given:
            if would_contain(each.given, output):
                raise UsageError(
                    f"{output}: the output is inside the input {each.given}", "give an --output outside of it"
                )
        place = Path(os.path.expanduser(output)).resolve()
        local = (file for each in self.given for file in each.files if is_folder and not is_remote(file))
        if inside := next((file for file in local if place in Path(file).resolve().parents), None):
            raise UsageError(f"{inside}: the input is inside the output {output}", "give another --output")

    def collect_facts(self, contents: Sequence[Sequence[str]]) -> list[InputFacts]:
        """Manifest entry of each input.

        Args:
            contents: Result of `hash_contents` for each shard.
        """
        parts = [part for shard in self.shards for part in shard.parts]
        digests = _combine_digests(zip(parts, chain.from_iterable(contents), strict=True))
        return [self._build_facts(each, digests) for each in self.given]

    def describe_difference(self, facts: Sequence[InputFacts]) -> str:
        """Describe how manifest entries differ from these inputs; empty if they are equal.

        A file with the same size but another modification time or name, such as a copy, is compared by its content.
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
        # The size first: it decides most cases without reading the files.
        now = self._build_facts(one, {})
        return (now.files, now.bytes) == (before.files, before.bytes) and self._read(one).sha256 == before.sha256

    def _read(self, one: Input) -> InputFacts:
        parts = (part for shard in self.shards for part in shard.parts if part.file in one.files)
        return self._build_facts(one, _combine_digests((part, hash_part(part)) for part in parts))

    def _fingerprint_input(self, one: Input) -> str:
        return hashlib.sha256("\n".join(self.fingerprints[file] for file in one.files).encode()).hexdigest()

    def _build_facts(self, one: Input, digests: dict[str, str]) -> InputFacts:
        # Without digests (a comparison of sizes, or a URL) the fingerprint stands for the content.
        lines = [
            f"{_format_relative_name(one.given, file)}\n{digests.get(file) or self.fingerprints[file]}\n"
            for file in one.files
        ]
        return InputFacts(
            path=redact(one.given),
            files=0 if one.given.startswith(DATASET) else len(one.files),
            bytes=sum(map(_read_file_bytes, one.files)),
            version=self.fingerprints[one.given] if one.given.startswith(DATASET) else "",
            stamp=self._fingerprint_input(one),
            sha256=hashlib.sha256("".join(lines).encode()).hexdigest(),
        )


def open_input(
    given: Iterable[str], dataset: str | None, output: Path, text_documents: str = "file", is_folder: bool = True
) -> Inputs:
    """Open files or a named dataset, and check that the output is outside of them.

    Args:
        given: Files, folders, glob patterns and URLs.
        dataset: Named dataset; replaces `given`.
        output: See `Inputs.check_outside`.
        text_documents: Unit of a document in a .txt file.
        is_folder: See `Inputs.check_outside`.

    Raises:
        UsageError: An input does not exist, is empty or of an unknown kind, or contains the output.
        PrimusError: An input cannot be read.
    """
    if dataset:
        return open_dataset(dataset)
    found = open_files(given, text_documents)
    found.check_outside(output, is_folder)
    return found


def open_files(given: Iterable[str], text_documents: str = "file") -> Inputs:
    """Open files, folders, glob patterns and URLs.

    Raises:
        UsageError: An input does not exist, is empty or of an unknown kind, or a file is given twice.
        PrimusError: An input cannot be read.
    """
    # Sorted by `find_files`: every worker and every restart must see the same order, which numbers the shards.
    found = tuple(Input(each, tuple(readers.find_files(each))) for each in given)
    _check_once(found)
    files = [file for each in found for file in each.files]
    # From all inputs together: shards of similar size end at similar times, whatever the sizes of the files.
    size = shards.choose_shard_size(sum(map(readers.read_size, files)))
    return Inputs(
        found, {file: fingerprint_file(file) for file in files}, readers.plan_shards(files, text_documents, size)
    )


def _check_once(given: Iterable[Input]) -> None:
    """Check that no file is given twice, for example by a folder and by its own path."""
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
    """Open a named dataset.

    Raises:
        UsageError: The dataset does not exist, or it must be downloaded from the hub first.
    """
    source = None if "/" in name else registry.load_plug_in(SOURCES, name)
    if source is None or source.documents is None:
        fetching = f"`data fetch {name} --output FOLDER`, then give --input FOLDER; `data prepare` does both"
        raise UsageError(f"dataset {name}: on the Hugging Face Hub, not on this machine", fetching)
    file = DATASET + name
    version = str(source.version())
    return Inputs((Input(file, (file,)),), {file: version}, [Shard(0, (FilePart(file),), 0)])


def read_part(
    part: FilePart, key: str, text_documents: str = "file", cut: bool = True, lists: bool = False
) -> Iterator[TextDocument | BadDocument]:
    """Read the documents of a part of an input; see `primus.data.readers.read_documents`."""
    if part.file.startswith(DATASET):
        yield from _read_dataset(part.file.removeprefix(DATASET))
    else:
        yield from readers.read_documents(part, key, readers.ReadOptions(text_documents, cut, lists=lists))


def check_fingerprint(file: str, before: str) -> None:
    """Check that the fingerprint of a file is still `before`.

    Raises:
        PrimusError: The file has changed.
    """
    try:
        same = file.startswith(DATASET) or fingerprint_file(file) == before
    except PrimusError:
        same = False
    if not same:
        raise PrimusError(f"{file}: changed while it was read", "run the command again when no process writes to it")


def fingerprint_file(file: str) -> str:
    """Fingerprint of a file: size and modification time of a path, size and version of a URL.

    Raises:
        PrimusError: The file cannot be read.
    """
    if is_remote(file):
        from primus.data.readers import remote

        facts = remote.read_remote_facts(file)
        return f"{facts.size} {facts.version}"
    # Not the content: it takes hours for a corpus. A copy has another time, and `_is_same` then reads it.
    try:
        status = os.stat(file)
    except OSError as error:
        raise PrimusError(f"{file}: cannot be read: {error.strerror}") from None
    return f"{status.st_size} {status.st_mtime_ns}"


def hash_contents(shard: Shard) -> list[str]:
    """Result of `hash_part` for each part of a shard."""
    return [hash_part(part) for part in shard.parts]


def hash_part(part: FilePart) -> str:
    """Checksums of the blocks of a file that begin in a part, in hexadecimal digits; empty for a dataset or a URL.

    The concatenated checksums of all parts of a file do not depend on how the file is divided into parts.
    """
    if part.file.startswith(DATASET) or is_remote(part.file):
        return ""
    first, last = part.first, part.last
    if detect_kind(part.file) in COLUMNS:  # parts are row groups, not bytes: the first part hashes the whole file
        first, last = (0, None) if part.first == 0 else (0, 0)
    # A block belongs to the part in which it begins, and is read past the end of that part: so each is hashed once.
    with explain_file_errors(part.file), open(part.file, "rb") as file:
        return b"".join(_hash_blocks(file, -(-first // BLOCK), last)).hex()


def _hash_blocks(file: BufferedReader, block: int, last: int | None) -> Iterator[bytes]:
    # One buffer for all blocks, sliced by a view: no copy for the hash.
    buffer = bytearray(BLOCK)
    view = memoryview(buffer)
    file.seek(block * BLOCK)
    while (last is None or block * BLOCK < last) and (size := file.readinto(buffer)):
        yield xxhash.xxh3_128_digest(view[:size])
        block += 1


def _combine_digests(contents: Iterable[tuple[FilePart, str]]) -> dict[str, str]:
    """Digest of each file from the result of `hash_part` for its parts, in order."""
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


def _format_relative_name(given: str, file: str) -> str:
    """Name of a file relative to its input, which does not change when the input is moved or copied."""
    return os.path.relpath(file, os.path.expanduser(given)) if not is_remote(file) else file


def _read_dataset(name: str) -> Iterator[TextDocument]:
    documents = registry.load_plug_in(SOURCES, name).documents
    assert documents is not None, "open_dataset has refused datasets of the hub"
    try:
        yield from map(TextDocument, documents())
    except OSError as error:
        raise PrimusError(f"dataset {name}: cannot be read: {error}") from None
