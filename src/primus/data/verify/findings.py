"""Findings about token files: one for each kind of damage, with its first places and their number."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

MAX_PLACES = 5
"""Maximum places that a finding lists."""


class DamagePlace(Struct, frozen=True, kw_only=True):
    """A damaged place."""

    byte: int
    """Offset in the file."""
    document: int | None = None
    """Number of the document, if known."""
    sequence: int | None = None
    """Number of the sequence, if the entry of a sequence is wrong."""

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
    """Name of the check: header, size, lengths, pointers, documents, tokens, ends, zeros, checksum, manifest, ..."""
    file: str
    """The file."""
    problem: str
    """Description of the damage."""
    places: list[DamagePlace] = []
    """The first places."""
    count: int = 1
    """Number of places."""

    def __str__(self) -> str:
        places = "; ".join(map(str, self.places))
        more = f"; {self.count - len(self.places):,} more" if self.places and self.count > len(self.places) else ""
        return f"{self.file}: {self.problem}" + (f" ({places}{more})" if places else "")


def build_missing_finding(path: Path) -> TokenFileFinding:
    """A finding for a .bin or .idx that is missing while the other file exists."""
    other = ".bin" if path.suffix == ".idx" else ".idx"
    return build_finding("files", path, "a folder" if path.is_dir() else f"missing, while its {other} exists")


def build_unreadable_finding(path: Path, error: OSError) -> TokenFileFinding:
    """A finding for a file that cannot be read; `path` is used if the error names no file."""
    return build_finding("files", Path(error.filename or path), f"cannot be read: {error.strerror}")


def build_finding(
    check: str, file: Path, problem: str, *places: DamagePlace, count: int | None = None
) -> TokenFileFinding:
    """A finding with the first of its places."""
    total = len(places) if count is None else count
    return TokenFileFinding(
        check=check, file=str(file), problem=problem, places=list(places[:MAX_PLACES]), count=max(1, total)
    )
