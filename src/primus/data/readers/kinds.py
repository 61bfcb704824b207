"""Detect the format and the compression of a file by its name."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

RECORDS = frozenset({".jsonl", ".ndjson", ".json"})
"""JSON lines: one object on each line."""
COLUMNS = frozenset({".parquet", ".arrow", ".feather"})
"""Tables of Apache Arrow."""
TABLES = frozenset({".csv", ".tsv"})
"""Tables of text with a header line."""

PROSE = frozenset({".txt", ".text", ".md", ".rst", ".tex", ".adoc", ".org", ".html", ".htm"})
NATIVE = frozenset(".c .h .cc .cpp .cxx .hpp .cu .cuh .hip .cl .go .rs .swift .m .mm .f90 .f".split())
MANAGED = frozenset(".java .kt .scala .cs .js .jsx .ts .tsx .clj .hs .ml .ex .erl".split())
SCRIPTS = frozenset(".py .pyi .ipynb .rb .php .jl .r .lua .pl .pm .sh .bash .zsh .ps1 .bat .sql".split())
SETTINGS = frozenset(".xml .css .toml .yaml .yml .ini .cfg .proto .cmake .mk".split())
TEXTS = PROSE | NATIVE | MANAGED | SCRIPTS | SETTINGS
"""Suffixes of plain-text files."""

COMPRESSED = frozenset({".gz", ".zst", ".xz", ".bz2"})
UNCLEAR_IN_TREES = frozenset({".json"})
"""Suffixes that are JSON lines if the user names the file, but mostly settings if the file is found in a folder."""

KNOWN = "known: .txt .jsonl .json .csv .tsv .parquet .arrow (.gz .zst .xz .bz2 of text) and sources like .py .c .md"

TEXT_DOCUMENTS = ("file", "paragraph", "line")
"""Units of a document in a .txt file."""


def detect_kind(file: str) -> str:
    """Suffix of a path or URL that determines its format, in lower case, without compression; empty if unknown."""
    suffixes = _split_suffixes(file)
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
        if suffixes and suffixes[-1] in COLUMNS:
            return ""
    last = suffixes[-1] if suffixes else ""
    return last if last in RECORDS | COLUMNS | TABLES | TEXTS else ""


def detect_compression(file: str) -> str:
    """Compression suffix of a path or URL; empty if it is not compressed."""
    suffixes = _split_suffixes(file)
    return suffixes[-1] if suffixes and suffixes[-1] in COMPRESSED else ""


def is_kept_in_trees(file: str) -> bool:
    """Whether to read a file that is found in a folder."""
    return bool(detect_kind(file)) and (detect_kind(file) not in UNCLEAR_IN_TREES or bool(detect_compression(file)))


def is_remote(file: str) -> bool:
    """Whether this is a URL such as ``s3://bucket/file``, not a path."""
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*(::|://)", file) is not None


def _split_suffixes(file: str) -> list[str]:
    path = re.split(r"[?#]", file)[0] if is_remote(file) else file
    return [suffix.lower() for suffix in PurePosixPath(path).suffixes]
