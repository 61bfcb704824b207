from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primus.data.readers import BadDocument, ReadOptions, TextDocument, plan_shards, read_documents
from primus.data.readers import lines as lines_module
from primus.data.readers import locations as places_module
from primus.data.readers.shard import FilePart
from primus.errors import UsageError

pa = pytest.importorskip("pyarrow")


def items(parts: list[FilePart], **options: object) -> list[tuple[str, str]]:
    """Where each document or bad one is, and what it is."""
    return [
        (item.where, item.reason if isinstance(item, BadDocument) else item.text)
        for part in parts
        for item in read_documents(part, options=ReadOptions(**options))  # type: ignore[arg-type]
    ]


def parts_of(file: Path, shard_bytes: int, text_documents: str = "file") -> list[FilePart]:
    return [part for shard in plan_shards([str(file)], text_documents, shard_bytes) for part in shard.parts]


lines = st.lists(
    st.one_of(
        st.builds(lambda text: json.dumps({"text": text}, ensure_ascii=False).encode(), st.text(max_size=30)),
        st.sampled_from([b"", b" ", b"{", b'{"text": null}', b'{"text": "\xff"}', b'{"text": "a\\ud800"}', b"[]"]),
    ),
    max_size=20,
)


@settings(max_examples=150)
@given(lines, st.sampled_from([b"\n", b"\r\n"]), st.booleans(), st.booleans(), st.integers(1, 200), st.integers(1, 64))
def test_parts_of_any_size_have_every_line_once_and_name_it_alike(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[bytes],
    newline: bytes,
    marked: bool,
    ends: bool,
    shard_bytes: int,
    block: int,
) -> None:
    file = tmp_path_factory.mktemp("parts") / "a.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" * marked + newline.join(lines) + newline * ends)
    whole = items([FilePart(str(file))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines_module, "BLOCK", max(block, 3))
        patch.setattr(lines_module, "END_OF_LINE", block)
        patch.setattr(places_module, "PIECE", block)
        parts = parts_of(file, shard_bytes)
        assert len(parts) <= 1 or sum((part.last or file.stat().st_size) - part.first for part in parts) == (
            file.stat().st_size
        )
        assert items(parts) == whole
    expected = [number for number, line in enumerate(lines, 1) if line.strip()]
    assert [int(where.rpartition(":")[2]) for where, _ in whole] == expected


@given(st.text(st.sampled_from("ab é\n"), max_size=60), st.integers(1, 30))
def test_lines_of_a_text_file_are_shared_out_without_loss(
    tmp_path_factory: pytest.TempPathFactory, content: str, shard_bytes: int
) -> None:
    file = tmp_path_factory.mktemp("parts") / "a.txt"
    file.write_text(content)
    found = items(parts_of(file, shard_bytes, "line"), text_documents="line")
    assert [text for _, text in found] == [line for line in content.split("\n") if line.strip()]
    assert len(parts_of(file, shard_bytes, "paragraph")) == 1


def test_row_groups_are_shared_out_and_rows_are_named_by_their_number_in_the_file(tmp_path: Path) -> None:
    from pyarrow import parquet

    file = tmp_path / "a.parquet"
    values = [f"row {number}" if number != 2222 else None for number in range(3000)]
    parquet.write_table(pa.table({"text": values, "id": list(range(3000))}), file, row_group_size=500)
    parts = parts_of(file, 1)
    assert [(part.first, part.last) for part in parts] == [*((n, n + 1) for n in range(5)), (5, None)]
    expected = [(f"{file}: row {n + 1}", value or "the text is null, not text") for n, value in enumerate(values)]
    assert items(parts) == items([FilePart(str(file))]) == expected
    assert items(parts_of(file, 10_000)) == expected


def test_other_files_are_whole_and_small_ones_share_a_shard(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.md").write_text("x" * 100)
    (tmp_path / "big.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 5))
    files = sorted(map(str, tmp_path.iterdir()))
    shards = plan_shards(files, "file", 220)
    assert [len(shard.parts) for shard in shards] == [2, 2, 2]
    assert [part for shard in shards for part in shard.parts] == [FilePart(file) for file in files]
    assert shards == plan_shards(files, "file", 220)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.csv"])
@pytest.mark.parametrize("block", [16, 1 << 20])
def test_a_line_that_is_too_long_is_named_and_not_held(
    tmp_path: Path, name: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines_module, "BLOCK", block)
    good = {"a.jsonl": '{"text": "%s"}', "a.txt": "%s", "a.csv": '"%s"'}[name]
    header = "text" if name == "a.csv" else good % "0"
    file = tmp_path / name
    content = [header, good % "1", good % ("long" * 30), good % "3", good % ("end" * 40)]
    file.write_text("\n".join(content))
    found = items([FilePart(str(file))], text_documents="line", longest_line=100)
    reason = "a line of more than 100 bytes"
    begin = [] if name == "a.csv" else [(f"{file}:1", "0")]
    assert sorted(found) == sorted(
        [*begin, (f"{file}:2", "1"), (f"{file}:3", reason), (f"{file}:4", "3"), (f"{file}:5", reason)]
    )


def test_the_other_fields_of_a_record_come_when_asked_for(tmp_path: Path) -> None:
    from pyarrow import parquet

    row = {"id": 7, "text": "caf\u00e9", "meta": {"url": "x"}}
    (tmp_path / "a.jsonl").write_text(json.dumps(row, ensure_ascii=False))
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        [document] = read_documents(tmp_path / name, options=ReadOptions(fields=True))
        assert document == TextDocument("caf\u00e9", fields={"id": 7, "meta": {"url": "x"}})
        assert list(read_documents(tmp_path / name)) == [TextDocument("caf\u00e9")]
    (tmp_path / "a.csv").write_text('id,text\n7,"two\nlines, and ""quotes"""\n')
    assert list(read_documents(tmp_path / "a.csv", options=ReadOptions(fields=True))) == [
        TextDocument('two\nlines, and "quotes"', fields={"id": "7"})
    ]


def test_bytes_that_are_not_utf8_in_another_field_make_a_record_bad(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "a", "title": "\xff"}\n{"text": "b"}\n')
    for fields in (False, True):
        assert items([FilePart(str(file))], fields=fields) == [
            (f"{file}:1", "not UTF-8 at byte 25 of the line"),
            (f"{file}:2", "b"),
        ]


def test_far_into_a_file_a_line_is_named_by_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places_module, "FARTHEST_COUNT", 20)
    file = tmp_path / "a.jsonl"
    file.write_text("{\n" * 20)
    assert [where for where, _ in items([FilePart(str(file), 30, 34)])] == [
        f"{file}: line 1 after byte 30",
        f"{file}: line 2 after byte 30",
    ]


@pytest.mark.parametrize(
    ("line", "column"),
    [
        ('{"content": "a", "id": "1", "n": 2}', "content"),
        ('{"prompt": "a", "n": 2}', "prompt"),
        ('{"content": "a", "text": "b"}', "text"),
    ],
)
def test_the_column_of_the_text_is_found(tmp_path: Path, line: str, column: str) -> None:
    from pyarrow import parquet

    from primus.data.readers import choose_text_column

    (tmp_path / "a.jsonl").write_text(line)
    parquet.write_table(pa.Table.from_pylist([json.loads(line)]), tmp_path / "a.parquet")
    assert [choose_text_column([str(tmp_path / name)]) for name in ("a.jsonl", "a.parquet")] == [column] * 2
    assert choose_text_column([str(tmp_path / "a.txt")]) == "text"


def test_a_column_that_can_only_be_guessed_is_asked_for(tmp_path: Path) -> None:
    from primus.data.readers import choose_text_column

    (tmp_path / "a.csv").write_text("question,answer\nq,a\n")
    with pytest.raises(UsageError, match="several columns may hold the text") as caught:
        choose_text_column([str(tmp_path / "a.csv")])
    assert "question, answer" in caught.value.hint


@pytest.mark.parametrize("line", ["The fox, it seems, jumps over the dog", "id;text", "x" * 500 + ";" + "y" * 500])
def test_a_first_line_that_names_no_column_is_not_taken_for_one(tmp_path: Path, line: str) -> None:
    from primus.data.readers import choose_text_column

    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([[line], ["a text"]])
    with pytest.raises(UsageError, match="several columns may hold the text") as caught:
        choose_text_column([str(tmp_path / "a.csv")])
    assert "columns, which its first line must name" in caught.value.hint
    assert len(caught.value.hint) < 300
    (tmp_path / "a.csv").write_text("the_article\na text\n")
    assert choose_text_column([str(tmp_path / "a.csv")]) == "the_article"
