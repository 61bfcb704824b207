"""What is wrong with token files, and where: each kind of damage once, with its first places and their number."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

MAX_PLACES = 5
"""Places of one kind of damage that are told."""


class DamagePlace(Struct, frozen=True, kw_only=True):
    """Where something is wrong."""

    byte: int
    """Offset in the file."""
    document: int | None = None
    """Number of the document, where it is known."""
    sequence: int | None = None
    """Number of the sequence, where that is what is wrong."""

    def __str__(self) -> str:
        words = [f"byte {self.byte:,}"]
        if self.sequence is not None:
            words.append(f"sequence {self.sequence:,}")
        if self.document is not None:
            words.append(f"document {self.document:,}")
        return ", ".join(words)


class TokenFileFinding(Struct, frozen=True, kw_only=True):
    """One kind of damage in one file."""

    check: str
    """What was checked: header, size, lengths, pointers, documents, tokens, ends, zeros, checksum, manifest, ..."""
    file: str
    """The file."""
    problem: str
    """What is wrong, in words."""
    places: list[DamagePlace] = []
    """The first places."""
    count: int = 1
    """Number of places."""

    def __str__(self) -> str:
        places = "; ".join(map(str, self.places))
        more = f"; {self.count - len(self.places):,} more" if self.places and self.count > len(self.places) else ""
        return f"{self.file}: {self.problem}" + (f" ({places}{more})" if places else "")


def build_missing_finding(path: Path) -> TokenFileFinding:
    """A .bin or .idx that is not there, though the other of the pair is."""
    other = ".bin" if path.suffix == ".idx" else ".idx"
    return build_finding("files", path, "a folder" if path.is_dir() else f"no such file, but its {other} is there")


def build_unreadable_finding(path: Path, error: OSError) -> TokenFileFinding:
    """A file that the system does not let us read, or the disk; `path` where the error names none."""
    return build_finding("files", Path(error.filename or path), f"cannot be read: {error.strerror}")


def build_finding(
    check: str, file: Path, problem: str, *places: DamagePlace, count: int | None = None
) -> TokenFileFinding:
    """A finding with the first of its places."""
    total = len(places) if count is None else count
    return TokenFileFinding(
        check=check, file=str(file), problem=problem, places=list(places[:MAX_PLACES]), count=max(1, total)
    )
