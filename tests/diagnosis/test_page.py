"""The generated page of all signatures is a table."""

from __future__ import annotations

from pathlib import Path

from primus.diagnosis.signature_files import get_signature_table

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_has_a_row_for_every_signature() -> None:
    text = (DOCS / "reference" / "failures.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == len(get_signature_table().signatures)
    assert all(row.replace(r"\|", "").count("|") == 9 for row in rows)
