"""Results of comparisons as files, of primus and of tprimat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from primus.comparison.results.result import (
    ComparisonResult,
    ResultCell,
    ResultSteps,
    build_json_schema,
    load_result,
    save_result,
)
from primus.errors import PrimusError, UsageError

RESULT = ComparisonResult(
    platform="cpu",
    cell=ResultCell(platform="cpu", framework="native", model="llama", repetition=2),
    steps=ResultSteps(number=[1, 2], time_s=[0.5, 0.25], loss=[8.0, None]),
    step_times=[0.5, 0.25],
    settings={"lr": 1e-3, "train_data_path": ["a", 0.5]},
)
TPRIMAT: dict[str, Any] = {
    "platform": "nvd",
    "gpu_info": {"device_count": "N/A", "device_name": "NVIDIA H100 80GB HBM3", "total_memory_gb": 85.0},
    "timestamp": "2026-02-02T21:44:16.399662",
    "parallelism_config": {"strategy_name": "unknown", "tensor_model_parallel_size": 1},
    "training_config": {"max_steps": 500, "global_batch_size": 64, "sequence_length": 2048, "micro_batch_size": "N/A"},
    "performance_metrics": {"total_steps": 3, "tokens_per_second": 38235.1, "throughput_per_gpu_core": 1.7e-05},
    "step_times": [36.9, 3.5, float("nan")],
    "loss_values": [12.6, 11.2, 7.2],
    "learning_rates": [1e-5],
    "source": "log",
    "raw_step_times": [],
}


def write_file(folder: Path, tree: object) -> Path:
    path = folder / "result.json"
    path.write_text(json.dumps(tree))
    return path


def test_a_saved_result_is_read_back_equal_and_valid_by_the_published_schema(tmp_path: Path) -> None:
    save_result(RESULT, tmp_path / "result.json")
    assert load_result(tmp_path / "result.json") == RESULT
    tree = json.loads((tmp_path / "result.json").read_text())
    jsonschema.validate(tree, build_json_schema())
    assert {"platform", "step_times", "training_config", "performance_metrics"} <= tree.keys()
    assert RESULT.cell.name == "cpu_native_llama_identical_2"


def test_the_schema_describes_its_fields() -> None:
    described = build_json_schema()["$defs"]["ResultSteps"]["properties"]["time_s"]
    assert described["description"].startswith("Time from the end of the step before")


def test_a_file_of_tprimat_is_read_with_unknown_values_as_none(tmp_path: Path) -> None:
    result = load_result(write_file(tmp_path, TPRIMAT))
    assert (result.source, result.cell.platform, result.gpu_info.device_count) == ("tprimat", "nvidia", None)
    assert result.steps.time_s == [36.9, 3.5, None] and result.steps.loss == [12.6, 11.2, 7.2]
    assert result.steps.tokens == [131072.0] * 3
    assert result.training_config.micro_batch_size is None and result.parallelism_config.strategy_name is None
    assert result.notes == ["learning_rates has 1 values for 3 steps, and is not assigned to steps"]


@pytest.mark.parametrize("tree", [[], {"platform": "amd"}, {"schema": "other"}, {"modules": {}}, 3])
def test_foreign_json_is_refused(tmp_path: Path, tree: object) -> None:
    with pytest.raises(UsageError, match="not a result of a comparison"):
        load_result(write_file(tmp_path, tree))


def test_a_result_of_another_version_names_both_versions(tmp_path: Path) -> None:
    tree = msgspec.to_builtins(RESULT) | {"schema_version": 99}
    with pytest.raises(UsageError, match=r"version 99 cannot be read.*reads version 1"):
        load_result(write_file(tmp_path, tree))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"time_s": [0.5]}, "steps.time_s has 1 values for 2 steps"),
        ({"number": [2, 1]}, "steps.number does not increase"),
        ({"time_s": [0.5, -1.0]}, "a step of -1 s"),
        ({"time_s": [0.5, 1e300]}, "a step of 1e+300 s"),
        ({"tokens": [512.0, -5.0]}, "the tokens of a step, the number of devices or the load is negative"),
        ({"loss": ["low", 1.0]}, "Expected `float | null`, got `str`"),
    ],
)
def test_a_contradictory_result_is_damaged(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    tree = msgspec.to_builtins(RESULT)
    tree["steps"] |= changes
    with pytest.raises(PrimusError, match="damaged") as caught:
        load_result(write_file(tmp_path, tree))
    assert problem in caught.value.problem


def test_a_truncated_file_is_damaged_and_a_missing_one_is_named(tmp_path: Path) -> None:
    save_result(RESULT, tmp_path / "result.json")
    (tmp_path / "result.json").write_text((tmp_path / "result.json").read_text()[:100])
    with pytest.raises(PrimusError, match="damaged"):
        load_result(tmp_path / "result.json")
    (tmp_path / "result.json").write_text("[" * 100_000)
    with pytest.raises(PrimusError, match="damaged: maximum recursion depth"):
        load_result(tmp_path / "result.json")
    with pytest.raises(PrimusError, match="No such file"):
        load_result(tmp_path / "none.json")
