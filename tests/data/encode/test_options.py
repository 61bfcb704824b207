from __future__ import annotations

from pathlib import Path

import pytest

from primus.data.encode.options import EncodeOptions, make_job
from primus.errors import UsageError


def keys(path: Path, *named: str) -> tuple[str, ...]:
    options = EncodeOptions(input=(str(path),), json_keys=named)
    return make_job(options, Path("out"), "bpe:300").json_keys


def test_the_column_of_the_text_is_the_one_that_was_named_or_the_only_one(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("id,content\n1,a\n")
    assert keys(file) == ("content",)
    assert keys(file, "id") == ("id",)
    file.write_text("question,answer\nq,a\n")
    with pytest.raises(UsageError, match="several columns may hold the text"):
        keys(file)
    (tmp_path / "b.txt").write_text("a")
    assert keys(tmp_path / "b.txt") == ("text",)
