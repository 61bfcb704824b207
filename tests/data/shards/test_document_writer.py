from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest

from primus.data.readers import ReadOptions, TextDocument, read_documents
from primus.data.shards.document_writer import open_writer
from primus.errors import PrimusError

pytest.importorskip("zstandard")


def written(path: Path, fields: dict[str, Any], compression: str = "zst") -> list[Any]:
    with open_writer(path, "body", compression) as writer:
        writer.write(TextDocument("one", fields=fields))
        writer.write(TextDocument("\u00e9"))
    assert (writer.documents, writer.text_bytes) == (2, 5)
    return list(read_documents(path, "body", options=ReadOptions(fields=True)))


@pytest.mark.parametrize(("compression", "suffix"), [("zst", ".zst"), ("gz", ".gz"), ("none", "")])
def test_documents_are_read_as_they_were_written(tmp_path: Path, compression: str, suffix: str) -> None:
    fields = {"id": 1 << 80, "when": date(2026, 1, 2), "parts": ["a", {"b": None}]}
    found = written(tmp_path / f"a.jsonl{suffix}", fields, compression)
    assert compression != "gz" or (tmp_path / "a.jsonl.gz").read_bytes()[4:8] == bytes(4), "it has a time"
    assert found == [TextDocument("one", fields=fields | {"when": "2026-01-02"}), TextDocument("\u00e9", fields={})]


def test_fields_that_are_no_text_cost_no_document(tmp_path: Path) -> None:
    fields = {"half": "a\ud800b \U0001f600", "raw": ["\udcff"], "\ud801": {"n": float("nan")}}
    [first, _] = written(tmp_path / "a.jsonl.zst", fields)
    assert first.fields == {"half": "a\ufffdb \U0001f600", "raw": ["\ufffd"], "\ufffd": {"n": None}}


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    written(path, {})
    content = bytearray(path.read_bytes())
    content[content.index(b"one")] ^= 1
    path.write_bytes(content)
    with pytest.raises(PrimusError, match="damaged"):
        list(read_documents(path, "body"))
