"""Settings of one engine in a matrix, as a group or by path, reach the command of a cell and keep the limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from primus.comparison.matrix.matrix import flatten_engine_settings
from primus.comparison.matrix.matrix_file import load_matrix
from primus.errors import UsageError

MATRIX: dict[str, Any] = {
    "name": "m",
    "experiment": "e.yaml",
    "platforms": {"cpu": {}},
    "frameworks": ["torchtitan"],
    "models": {"tiny": {"preset": "tiny"}},
}


def load(folder: Path, **changes: Any) -> None:
    file = folder / "m.yaml"
    file.write_text(yaml.safe_dump(MATRIX | changes))
    load_matrix(file, {})


@pytest.mark.parametrize(
    ("written", "flat"),
    [
        ({"backend_args": {"optimizer": {"implementation": "x"}}}, {"backend_args.optimizer.implementation": "x"}),
        ({"backend_args": {"optimizer.implementation": "x"}}, {"backend_args.optimizer.implementation": "x"}),
        ({"optimizer.implementation": "x"}, {"backend_args.optimizer.implementation": "x"}),
        ({"backend_args.optimizer.implementation": "x"}, {"backend_args.optimizer.implementation": "x"}),
        ({"lr": 1, "a.b": 2, "backend_args": {"c": 3}}, {"lr": 1, "backend_args.c": 3, "backend_args.a.b": 2}),
        ({"backend_args": None}, {}),
    ],
)
def test_settings_of_an_engine_have_one_form_however_they_are_written(
    written: dict[str, Any], flat: dict[str, Any], tmp_path: Path
) -> None:
    assert flatten_engine_settings(written) == flat
    load(tmp_path, settings=written)


def test_a_group_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="settings: backend_args: must hold keys and values"):
        load(tmp_path, settings={"backend_args": "full"})


@pytest.mark.parametrize("allowed", [["backend_args"], ["compile"]])
def test_a_tuned_side_chooses_settings_of_its_engine_only_where_the_matrix_allows_it(
    allowed: list[str], tmp_path: Path
) -> None:
    tuned = {"may_change": allowed, "choices": [{"settings": {"optimizer.implementation": "foreach"}}]}
    if allowed == ["backend_args"]:
        load(tmp_path, tuned=tuned)
        return
    with pytest.raises(UsageError, match=r"backend_args\.optimizer\.implementation is not one of the settings"):
        load(tmp_path, tuned=tuned)
