"""The generated page of all signatures is current."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from primus.diagnosis.signature_files import get_signature_table

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_failures_is_current() -> None:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec and spec.loader
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    page = generate.failures_page()
    assert (DOCS / "reference" / "failures.md").read_text(encoding="utf-8") == page, "run: python docs/generate.py"


def test_the_page_has_a_row_for_every_signature() -> None:
    text = (DOCS / "reference" / "failures.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == len(get_signature_table().signatures)
    assert all(row.replace(r"\|", "").count("|") == 9 for row in rows)
