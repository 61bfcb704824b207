"""Documents from files: text, source trees, JSON lines and parquet, with each bad one named by file and line."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from primus.errors import PrimusError, UsageError, did_you_mean

RECORDS = frozenset({".jsonl", ".ndjson", ".json"})
COLUMNS = frozenset({".parquet"})
PROSE = frozenset({".txt", ".text", ".md", ".rst", ".tex", ".adoc", ".org", ".html", ".htm"})
NATIVE = frozenset(
    {
        ".c",
        ".h",
        ".cc",
        ".cpp",
        ".cxx",
        ".hpp",
        ".cu",
        ".cuh",
        ".hip",
        ".cl",
        ".go",
        ".rs",
        ".swift",
        ".m",
        ".mm",
        ".f90",
        ".f",
    }
)
MANAGED = frozenset(
    {".java", ".kt", ".scala", ".cs", ".js", ".jsx", ".ts", ".tsx", ".clj", ".hs", ".ml", ".ex", ".erl"}
)
SCRIPTS = frozenset(
    {
        ".py",
        ".pyi",
        ".ipynb",
        ".rb",
        ".php",
        ".jl",
        ".r",
        ".lua",
        ".pl",
        ".pm",
        ".sh",
        ".bash",
        ".zsh",
        ".ps1",
        ".bat",
        ".sql",
    }
)
SETTINGS = frozenset({".xml", ".css", ".toml", ".yaml", ".yml", ".ini", ".cfg", ".proto", ".cmake", ".mk"})
TEXTS = PROSE | NATIVE | MANAGED | SCRIPTS | SETTINGS
"""Suffixes by which a file is a text of its own."""

COMPRESSED = frozenset({".gz", ".zst"})
UNCLEAR_IN_TREES = frozenset({".json"})
"""JSON lines when a file is named, more often settings when it is found in a folder."""

SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages"})
TEXT_DOCUMENTS = ("file", "paragraph", "line")

SMALLEST_PIECE = 1 << 16
LARGEST_PIECE = 1 << 20
PIECES_OF_A_FILE = 64
ROWS = 1024


@dataclass(frozen=True)
class Text:
    """A document, or a piece of a long one."""

    text: str
    begins: bool = True
    ends: bool = True


@dataclass(frozen=True)
class Bad:
    """Something that should have been a document."""

    where: str
    """File and line."""
    reason: str
    """What is wrong with it."""


def find(given: str) -> list[Path]:
    """The files that an input means: itself, or everything below a folder whose suffix is known, in a fixed order.

    Raises:
        UsageError: It does not exist, is empty, or is of no known kind.
    """
    path = Path(given).expanduser()
    if path.is_dir():
        files = [file for file in _walk(path) if _kind(file) not in UNCLEAR_IN_TREES | {""}]
        if not any(file.stat().st_size for file in files):
            raise UsageError(f"{given}: no text in this folder", _known_suffixes())
        return files
    if not path.exists():
        raise UsageError(f"{given}: no such file or folder", _neighbours(path))
    if not _kind(path):
        raise UsageError(f"{given}: not a kind of file that has text", _known_suffixes())
    if not path.stat().st_size:
        raise UsageError(f"{given}: empty", "give a file that has text")
    return [path]


def read(path: Path, key: str = "text", text_documents: str = "file", cut: bool = True) -> Iterator[Text | Bad]:
    """Documents of one file, in its order and in constant memory.

    Args:
        path: The file; its suffix says what it is.
        key: Field of a record, or column, that holds the text.
        text_documents: What is a document in a .txt file: the file, a paragraph (up to a blank line) or a line.
        cut: Cut long text files at line ends, so that one file can be shuffled and split.

    Raises:
        PrimusError: The file as a whole cannot be read, as when it is truncated.
    """
    kind = _kind(path)
    with _whole_file_errors(path):
        if kind in COLUMNS:
            yield from _parquet(path, key)
            return
        with _open(path) as lines:
            if kind in RECORDS:
                yield from _records(path, lines, key)
            elif kind == ".txt" and text_documents == "line":
                yield from _by_line(_decoded(path, lines))
            elif kind == ".txt" and text_documents == "paragraph":
                yield from _by_paragraph(_decoded(path, lines))
            else:
                yield from _by_file(_decoded(path, lines), _piece_size(path) if cut else None)


def _walk(folder: Path) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(".") or entry.name in SKIPPED_FOLDERS:
            continue
        if entry.is_dir() and not entry.is_symlink():
            yield from _walk(entry)
        elif entry.is_file():
            yield entry


def _kind(path: Path) -> str:
    """The suffix that says what a file is, in lower case and without compression; empty if none is known."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    last = suffixes[-1] if suffixes else ""
    return last if last in RECORDS | COLUMNS | TEXTS else ""


def _known_suffixes() -> str:
    return "known: .txt .jsonl .json .parquet (.gz and .zst of these) and source files like .py .c .md .html"


def _neighbours(path: Path) -> str:
    names = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    return did_you_mean(path.name, names) if len(names) <= 50 else ""


def _piece_size(path: Path) -> int:
    return min(max(path.stat().st_size // PIECES_OF_A_FILE, SMALLEST_PIECE), LARGEST_PIECE)


@contextmanager
def _whole_file_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise PrimusError(f"{path}: damaged, {error}", "copy or download it again") from None
    except OSError as error:
        raise PrimusError(f"{path}: cannot be read, {error.strerror or error}") from None


def _open(path: Path) -> BinaryIO:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return io.BufferedReader(gzip.open(path))  # type: ignore[arg-type]
    if suffix == ".zst":
        return io.BufferedReader(_Zstandard(path), LARGEST_PIECE)
    return path.open("rb")


class _Zstandard(io.RawIOBase):
    """Decompressed content of a .zst of any number of frames; unlike the library's reader it notices truncation."""

    def __init__(self, path: Path) -> None:
        try:
            import zstandard
        except ImportError:
            raise UsageError(f"{path}: reading .zst needs the package zstandard", "pip install zstandard") from None
        self._library: Any = zstandard
        self._file = path.open("rb")
        self._frame: Any = None
        self._ready = memoryview(b"")
        self._rest = b""

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            chunk = self._rest or self._file.read(LARGEST_PIECE)
            if not chunk and self._frame is None:
                return 0
            if not chunk:
                raise EOFError("the last zstd frame is not complete")
            self._ready = memoryview(self._decompress(chunk))
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def _decompress(self, chunk: bytes) -> bytes:
        if self._frame is None:
            self._frame = self._library.ZstdDecompressor().decompressobj()
        try:
            content: bytes = self._frame.decompress(chunk)
        except self._library.ZstdError as error:
            raise EOFError(str(error)) from None
        self._rest = b""
        if self._frame.eof:
            self._rest, self._frame = self._frame.unused_data, None
        return content


def _decoded(path: Path, lines: Iterable[bytes]) -> Iterator[str | Bad]:
    for number, line in enumerate(lines, 1):
        text = _utf8(line, "utf-8-sig" if number == 1 else "utf-8")
        yield Bad(f"{path}:{number}", text.reason) if isinstance(text, Bad) else text


def _utf8(line: bytes, encoding: str = "utf-8") -> str | Bad:
    try:
        return line.decode(encoding)
    except UnicodeDecodeError as error:
        return Bad("", f"not UTF-8 at byte {error.start + 1} of the line")


def _by_line(lines: Iterable[str | Bad]) -> Iterator[Text | Bad]:
    for line in lines:
        if isinstance(line, Bad):
            yield line
        elif line.strip():
            yield Text(line.rstrip("\r\n"))


def _by_paragraph(lines: Iterable[str | Bad]) -> Iterator[Text | Bad]:
    paragraph: list[str] = []
    for line in lines:
        if isinstance(line, Bad):
            yield line
        elif line.strip():
            paragraph.append(line)
        elif paragraph:
            yield Text("".join(paragraph))
            paragraph = []
    if paragraph:
        yield Text("".join(paragraph))


def _by_file(lines: Iterable[str | Bad], piece_size: int | None) -> Iterator[Text | Bad]:
    """The whole file, in pieces of about `piece_size` characters that end where a line ends."""
    piece: list[str] = []
    size, begins = 0, True
    for line in lines:
        if isinstance(line, Bad):
            yield line
            continue
        if piece_size and size >= piece_size:
            yield Text("".join(piece), begins, ends=False)
            piece, size, begins = [], 0, False
        piece.append(line)
        size += len(line)
    yield Text("".join(piece), begins)


def _records(path: Path, lines: Iterable[bytes], key: str) -> Iterator[Text | Bad]:
    for number, line in enumerate(lines, 1):
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if not line.isspace():
            text = _text_of_record(line.strip(), key)
            yield Bad(f"{path}:{number}", text.reason) if isinstance(text, Bad) else Text(text)


def _text_of_record(line: bytes, key: str) -> str | Bad:
    try:
        record = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        record = _lenient(line)
    if isinstance(record, Bad):
        return record
    if not isinstance(record, dict):
        return Bad("", f"a JSON {_json_name(record)}, not an object with a field '{key}'")
    if key not in record:
        return Bad("", f"no field '{key}' ({did_you_mean(key, record) or 'no fields'})")
    return _checked(record[key], f"field '{key}'")


def _lenient(line: bytes) -> Any:
    """What Python's own parser makes of a line, which takes NaN and lone surrogates; Bad if nothing."""
    text = _utf8(line)
    if isinstance(text, Bad):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        return Bad("", f"not JSON ({str(error).replace(' line 1', '')})")
    except RecursionError:
        return Bad("", "JSON that is nested too deeply")


def _checked(text: Any, what: str) -> str | Bad:
    if not isinstance(text, str):
        return Bad("", f"{what} is {_json_name(text)}, not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return Bad("", f"{what} has half of a surrogate pair at character {error.start + 1}")
    return text


def _json_name(value: Any) -> str:
    if value is None:
        return "null"
    return {dict: "object", list: "array", str: "text", bool: "boolean"}.get(type(value), "number")


def _parquet(path: Path, key: str) -> Iterator[Text | Bad]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise UsageError(f"{path}: reading .parquet needs the package pyarrow", "pip install pyarrow") from None
    try:
        with parquet.ParquetFile(path) as file:
            _check_column(path, file.schema_arrow, key, pa)
            cells = (cell for batch in file.iter_batches(ROWS, columns=[key]) for cell in batch.column(0))
            for row, cell in enumerate(cells, 1):
                text = _text_of_cell(cell)
                yield Bad(f"{path}: row {row}", text.reason) if isinstance(text, Bad) else Text(text)
    except pa.ArrowException as error:
        raise PrimusError(f"{path}: damaged, {error}", "copy or download it again") from None


def _check_column(path: Path, schema: Any, key: str, pa: Any) -> None:
    if key not in schema.names:
        raise UsageError(f"{path}: no column '{key}'", did_you_mean(key, schema.names) or "it has no columns")
    kind = schema.field(key).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise UsageError(f"{path}: column '{key}' is {kind}, not text", f"columns: {', '.join(schema.names)}")


def _text_of_cell(cell: Any) -> str | Bad:
    try:
        return _checked(cell.as_py(), "the text")
    except UnicodeDecodeError as error:
        return Bad("", f"not UTF-8 at byte {error.start + 1}")
