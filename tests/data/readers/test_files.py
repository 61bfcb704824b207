from __future__ import annotations

import bz2
import gzip
import lzma
from pathlib import Path

import pytest

from primus.data.readers import BadDocument, ReadOptions, TextDocument, find_files, read_documents
from primus.data.readers import texts as texts_module
from primus.errors import PrimusError, UsageError

pa = pytest.importorskip("pyarrow")
zstandard = pytest.importorskip("zstandard")

PACK = {".gz": gzip.compress, ".zst": zstandard.compress, ".xz": lzma.compress, ".bz2": bz2.compress}
CONTENT = b"text,id\n" + b"".join(b"%d,%d\n" % (number * 7919, number) for number in range(20_000))


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("middle", [".csv", ".jsonl", ".txt"])
def test_any_text_can_be_compressed_in_any_way_and_in_several_streams(tmp_path: Path, suffix: str, middle: str) -> None:
    content = {".csv": b"text\na\nb\n", ".jsonl": b'{"text": "a"}\n{"text": "b"}\n', ".txt": b"a\nb\n"}[middle]
    file = tmp_path / f"x.y{middle}{suffix}"
    file.write_bytes(PACK[suffix](content[:7]) + PACK[suffix](content[7:]))
    assert find_files(str(file)) == [str(file)]
    assert list(read_documents(file, options=ReadOptions(text_documents="line"))) == [
        TextDocument("a"),
        TextDocument("b"),
    ]


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("part", [0.0001, 0.5, 0.999])
def test_a_truncated_file_is_an_error(tmp_path: Path, suffix: str, part: float) -> None:
    packed = PACK[suffix](CONTENT)
    file = tmp_path / f"a.csv{suffix}"
    file.write_bytes(packed[: max(1, int(len(packed) * part))])
    with pytest.raises(PrimusError, match=": damaged, ") as caught:
        list(read_documents(file))
    assert str(file) in caught.value.problem


@pytest.mark.parametrize("suffix", PACK)
def test_a_file_that_is_damaged_inside_is_an_error(tmp_path: Path, suffix: str) -> None:
    packed = bytearray(PACK[suffix](CONTENT))
    packed[len(packed) // 2 : len(packed) // 2 + 8] = b"\x00" * 8
    file = tmp_path / f"a.csv{suffix}"
    file.write_bytes(packed)
    if suffix == ".zst":  # its frames have a checksum only where their writer wanted it
        return
    with pytest.raises(PrimusError, match=": damaged, "):
        list(read_documents(file))


def test_a_bad_row_of_a_table_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "a.tsv"
    file.write_bytes(b'id\ttext\n1\tfirst\n2\t"two\nlines"\n3\n4\tcaf\xe9\n5\t"a"b\n\n6\tlast\n7\t"open\nand more\n')
    found = [(item.where, item.reason) if isinstance(item, BadDocument) else item.text for item in read_documents(file)]
    assert found == [
        "first",
        "two\nlines",
        (f"{file}:5", "1 columns where the header has 2"),
        (f"{file}:6", "not UTF-8 at character 4 of the text"),
        (f"{file}:7", "not a row of a table, '\t' expected after '\"'"),
        "last",
        (f"{file}:10", "not a row of a table, unexpected end of data (lines 10 to 11)"),
    ]
    assert [item.where for item in read_documents(file) if isinstance(item, TextDocument)] == [
        f"{file}:{n}" for n in (2, 3, 9)
    ]
    with pytest.raises(UsageError, match="no column 'txt'"):
        list(read_documents(file, "txt"))
    file.write_bytes(b"id\ttext\n1\tone\ttoo many\n")
    assert list(read_documents(file)) == [BadDocument(f"{file}:2", "3 columns where the header has 2")]


@pytest.mark.parametrize("form", ["file", "stream"])
def test_files_of_data_frames_are_read(tmp_path: Path, form: str) -> None:
    table = pa.table({"text": ["a", None, "c"], "id": [1, 2, 3]})
    file = tmp_path / "a.arrow"
    with pa.OSFile(str(file), "wb") as sink, getattr(pa.ipc, f"new_{form}")(sink, table.schema) as writer:
        writer.write_table(table)
    first, second, third = read_documents(file, options=ReadOptions(fields=True))
    assert (first, third) == (TextDocument("a", fields={"id": 1}), TextDocument("c", fields={"id": 3}))
    assert second == BadDocument(f"{file}: row 2", "the text is null, not text")


def test_a_text_without_line_ends_is_cut_at_its_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts_module, "LONGEST_OVERHANG", 1000)
    file = tmp_path / "a.txt"
    content = "caf\u00e9 society " * 30_000
    file.write_text(content)
    pieces = [item.text for item in read_documents(file) if isinstance(item, TextDocument)]
    assert "".join(pieces) == content
    assert max(map(len, pieces)) <= texts_module.SMALLEST_PIECE + 1000
    assert all(piece.startswith(" ") for piece in pieces[1:])
    for first in ("", "x", "xy"):  # so that a cut falls into each byte of a character
        file.write_text(first + "\u20ac" * 100_000)
        assert (
            "".join(item.text for item in read_documents(file) if isinstance(item, TextDocument))
            == first + "\u20ac" * 100_000
        )


def test_a_pattern_gives_the_files_that_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b/1.jsonl", "a/1.jsonl", "a/2.jsonl.gz", "a/x.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert find_files(f"{tmp_path}/*/1.*") == [f"{tmp_path}/a/1.jsonl", f"{tmp_path}/b/1.jsonl"]
    assert find_files(f"{tmp_path}/**/*") == [
        f"{tmp_path}/a/1.jsonl",
        f"{tmp_path}/a/2.jsonl.gz",
        f"{tmp_path}/b/1.jsonl",
    ]
    with pytest.raises(UsageError, match="no file matches"):
        find_files(f"{tmp_path}/*.txt")
    with pytest.raises(UsageError, match="no matching file has a supported text format"):
        find_files(f"{tmp_path}/a/*.png")


def test_a_cell_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    from pyarrow import parquet

    cells = pa.array([b"a", b"caf\xe9", b"c"]).view(pa.string())
    file = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": cells}), file)
    for fields in (False, True):
        first, second, third = read_documents(file, options=ReadOptions(fields=fields))
        assert second == BadDocument(f"{file}: row 2", "not UTF-8")
        assert [item.text for item in (first, third) if isinstance(item, TextDocument)] == ["a", "c"]
        assert isinstance(third, TextDocument) and third.where == f"{file}: row 3"
