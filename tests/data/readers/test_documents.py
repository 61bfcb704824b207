from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus.data.readers import BadDocument, ReadOptions, TextDocument, find_files, read_documents
from primus.data.readers import texts as texts_module
from primus.errors import PrimusError, UsageError

pa = pytest.importorskip("pyarrow")
zstandard = pytest.importorskip("zstandard")


def texts(path: Path, **options: object) -> list[str]:
    return [
        item.text for item in read_documents(path, options=ReadOptions(**options)) if isinstance(item, TextDocument)
    ]  # type: ignore[arg-type]


def bad(path: Path) -> list[tuple[str, str]]:
    return [(item.where, item.reason) for item in read_documents(path) if isinstance(item, BadDocument)]


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


unicode_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(unicode_text, min_size=1),
    ascii_only=st.booleans(),
    newline=st.sampled_from(["\n", "\r\n", "\n\n"]),
    ends=st.booleans(),
)
def test_json_lines_give_back_every_text(
    tmp_path_factory: pytest.TempPathFactory, values: list[str], ascii_only: bool, newline: str, ends: bool
) -> None:
    lines = [json.dumps({"id": 1, "text": value}, ensure_ascii=ascii_only) for value in values]
    content = (newline.join(lines) + (newline if ends else "")).encode()
    folder = tmp_path_factory.mktemp("lines")
    plain = write(folder / "a.jsonl", content)
    zipped = write(folder / "a.jsonl.gz", gzip.compress(content[:9]) + gzip.compress(content[9:]))
    frames = zstandard.compress(content[:9]) + zstandard.compress(content[9:])
    assert texts(plain) == texts(zipped) == texts(write(folder / "a.jsonl.zst", frames)) == values


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": null}', "field 'text' is null, not text"),
        (b'{"text": 5}', "field 'text' is number, not text"),
        (b'{"txt": "a"}', "no field 'text' (did you mean 'txt'?)"),
        (b"{}", "no field 'text' (no fields)"),
        (b'["a"]', "a JSON array, not an object"),
        (b'"a"', "a JSON text, not an object"),
        (b'{"text": "a"', "not JSON (Expecting ',' delimiter: column 13"),
        (b'{"text": "\xff"}', "not UTF-8 at byte 11 of the line"),
        (b'{"text": "a\\ud800"}', "half of a surrogate pair at character 2"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[", "not JSON by itself but the beginning of it"),
    ],
)
def test_a_bad_line_is_named_and_the_lines_around_it_are_kept(tmp_path: Path, line: bytes, reason: str) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "before"}\n' + line + b'\n{"text": "after"}\n')
    assert texts(path) == ["before", "after"]
    [(where, why)] = bad(path)
    assert where == f"{path}:2"
    assert reason in why


def test_what_strict_json_refuses_but_people_write_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "marked"}\n{"text": "b", "score": NaN}\n')
    assert texts(path) == ["marked", "b"]


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "\ufeffone\r\n\ntwo\n")
    assert list(read_documents(path)) == [TextDocument("one\r\n\ntwo\n")]


def test_a_text_file_can_be_documents_by_line_or_paragraph(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one\r\ntwo\n\n \n three\n")
    assert texts(path, text_documents="line") == ["one", "two", " three"]
    assert texts(path, text_documents="paragraph") == ["one\r\ntwo\n", " three\n"]


def test_a_long_text_file_is_cut_at_line_ends_into_pieces_of_one_document(tmp_path: Path) -> None:
    content = "".join(f"line {number}\n" for number in range(40_000))
    pieces = list(read_documents(write(tmp_path / "a.txt", content)))
    assert all(isinstance(piece, TextDocument) for piece in pieces)
    assert "".join(piece.text for piece in pieces) == content
    assert len(pieces) == len(content) // texts_module.SMALLEST_PIECE + 1
    assert all(piece.text.endswith("\n") for piece in pieces)
    assert [piece.begins for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert texts(tmp_path / "a.txt", cut=False) == [content]


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"one\ncaf\xe9\nthree\n")
    assert bad(path) == [(f"{path}:2", "not UTF-8 at byte 4 of the line")]


def parquet(path: Path, **columns: object) -> Path:
    from pyarrow import parquet as pq

    pq.write_table(pa.table(columns), path, compression="zstd", row_group_size=1000)
    return path


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    values = [f"row {number}" for number in range(3000)]
    path = parquet(tmp_path / "a.parquet", id=list(range(3000)), text=values)
    assert texts(path) == values
    holes = parquet(tmp_path / "b.parquet", text=["a", None, "c"])
    assert texts(holes) == ["a", "c"]
    assert bad(holes) == [(f"{holes}: row 2", "the text is null, not text")]


def test_a_parquet_column_that_is_missing_or_no_text_is_an_error(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", txt=["a"], number=[1])
    with pytest.raises(UsageError, match="no column 'text'") as caught:
        list(read_documents(path))
    assert caught.value.hint == "did you mean 'txt'?"
    with pytest.raises(UsageError, match="column 'number' is int64, not text"):
        list(read_documents(path, "number"))


def test_other_columns_may_hold_what_python_has_not(tmp_path: Path) -> None:
    from pyarrow import parquet as pq

    when, moment = "<value out of range: 1152921504606846976>", "1970-01-01 00:00:00.000000001"
    schema = pa.schema({"text": pa.string(), "name": pa.string(), "when": pa.timestamp("us"), "ns": pa.timestamp("ns")})
    names = pa.array([b"caf\xe9", b"good"]).view(pa.string())
    columns = [pa.array(["one", "two"]), names, pa.array([1 << 60, None]), pa.array([1, 0])]
    table = pa.table([column.cast(field.type) for column, field in zip(columns, schema, strict=True)], schema)
    pq.write_table(table, tmp_path / "a.parquet")
    first, second = read_documents(tmp_path / "a.parquet", options=ReadOptions(fields=True))
    assert isinstance(first, TextDocument) and isinstance(second, TextDocument)
    assert first.fields == {"name": "caf\ufffd", "when": when, "ns": moment}
    assert second.fields and second.fields["name"] == "good" and second.fields["when"] is None


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_file_that_is_not_what_its_name_says_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(PrimusError, match="damaged"):
        texts(write(tmp_path / name, "plain text, and enough of it\n" * 10))


def test_a_source_tree_gives_its_text_files_in_a_fixed_order(tmp_path: Path) -> None:
    for name in (
        "b/z.py",
        "b/a.md",
        "a.c",
        "x.jsonl",
        "package.json",
        "logo.png",
        ".git/config.py",
        "n/__pycache__/q.py",
    ):
        write(tmp_path / name, "{}")
    found = [str(Path(path).relative_to(tmp_path)) for path in find_files(str(tmp_path))]
    assert found == ["a.c", "b/a.md", "b/z.py", "x.jsonl"]


def test_a_tree_is_read_once_through_links_and_what_they_lack_is_told(tmp_path: Path) -> None:
    write(tmp_path / "far" / "a.jsonl", "{}")
    write(tmp_path / "tree" / "b.jsonl", "{}")
    for link, target in (("a-part", "../far"), ("same-part", "../far"), ("up", ".."), ("README.md", "nowhere")):
        (tmp_path / "tree" / link).symlink_to(target)
    found = [str(Path(path).relative_to(tmp_path)) for path in find_files(str(tmp_path / "tree"))]
    assert found == ["tree/a-part/a.jsonl", "tree/b.jsonl"]
    (tmp_path / "tree" / "c.jsonl").symlink_to("nowhere")
    for wanted in ("tree", "tree/*.jsonl"):
        with pytest.raises(UsageError, match=r"c\.jsonl: broken link"):
            find_files(str(tmp_path / wanted))


def test_what_cannot_be_read_twice_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(UsageError, match="cannot be read twice"):
        find_files(str(tmp_path / "a.jsonl"))


def test_inputs_without_text_are_errors(tmp_path: Path) -> None:
    write(tmp_path / "corpus.jsonl", '{"text": "a"}')
    with pytest.raises(UsageError, match="no such file") as caught:
        find_files(str(tmp_path / "corpsu.jsonl"))
    assert caught.value.hint == "did you mean 'corpus.jsonl'?"
    with pytest.raises(UsageError, match="no such file"):
        find_files("~nobody-of-this-name/corpus.jsonl")
    with pytest.raises(UsageError, match="no such file") as caught:
        find_files("c4:realnewslike")
    assert caught.value.hint == "to take the dataset of this name, give --dataset c4:realnewslike"
    with pytest.raises(UsageError, match="empty"):
        find_files(str(write(tmp_path / "empty.txt", "")))
    with pytest.raises(UsageError, match="unsupported kind of text file"):
        find_files(str(write(tmp_path / "image.png", "x")))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UsageError, match="no text in this folder"):
        find_files(str(tmp_path / "nothing"))


@pytest.mark.parametrize("given", ["", "{}/x", "{}/json"])
def test_an_input_that_is_nothing_or_has_no_plain_name_is_refused(tmp_path: Path, given: str) -> None:
    write(tmp_path / "x" / os.fsdecode(b"a\xff.jsonl"), "{}")
    write(tmp_path / "json" / "a.json", "{}")
    expected = {
        "": "empty string",
        "{}/x": r"a.udcff.jsonl': its name is not UTF-8",
        "{}/json": "no text in this folder",
    }
    with pytest.raises(UsageError, match=expected[given]) as caught:
        find_files(given.format(tmp_path))
    assert caught.value.hint


def test_utf16_is_called_by_its_name(tmp_path: Path) -> None:
    for name in ("a.txt", "a.jsonl"):
        [(_, reason), *_] = bad(write(tmp_path / name, '{"text": "fox"}\n'.encode("utf-16")))
        assert "UTF-16, not UTF-8: convert the file by iconv" in reason
    with pytest.raises(UsageError, match=r"a\.csv: UTF-16, not UTF-8"):
        texts(write(tmp_path / "a.csv", "text,id\nfox,1\n".encode("utf-16")))


def test_a_table_may_begin_with_empty_lines_but_not_name_its_text_twice(tmp_path: Path) -> None:
    assert texts(write(tmp_path / "a.csv", "\n\r\ntext,id\nfox,1\n")) == ["fox"]
    with pytest.raises(UsageError, match="2 columns are named 'text'"):
        texts(write(tmp_path / "a.csv", "text,text\nfox,dog\n"))


def test_the_files_of_a_folder_are_named_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "text" / "in" / "a.txt", "fox")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link").symlink_to(tmp_path / "text" / "in")
    monkeypatch.chdir(tmp_path / "text")
    assert [find_files(given) for given in (".", "./", "in/", "./in", "../elsewhere/link/../in")] == [
        ["in/a.txt"],
        ["in/a.txt"],
        ["in/a.txt"],
        ["in/a.txt"],
        ["../elsewhere/link/../in/a.txt"],
    ]
