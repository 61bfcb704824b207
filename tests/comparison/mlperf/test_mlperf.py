"""Logs of MLPerf are accepted by its checker, and its check of convergence gives the published examples."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from primus.cli.main import main
from primus.comparison.mlperf.convergence import (
    check_convergence,
    compute_limit,
    compute_reference_point,
)
from primus.runs import store
from primus.runs.store import Run, RunMetadata, RunOutcome
from primus.training_logs.read_log import read_log

# The examples of the convergence rules (training_rules.adoc of mlcommons/training_policies).
SMALL = [16, 14, 16, 17, 16, 16, 15, 16, 15, 16]
LARGE = [20, 21, 21, 20, 22, 22, 21, 21, 20, 20]

SETTINGS = {
    "micro_batch_size": 2,
    "seed": 7,
    "bf16": True,
    "fp8": None,
    "optimizer": "adamw",
    "lr": 8e-4,
    "min_lr": 8e-5,
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 128,
    "lr_decay_iters": None,
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-5,
    "clip_grad": 1.0,
    "tensor_model_parallel_size": 1,
}
"""The rules of llama31_8b in the closed division fix most of them."""
KEYS = {
    *("submission_org", "submission_platform", "submission_division", "submission_benchmark", "init_stop", "run_start"),
    *("run_stop", "train_samples", "eval_samples", "global_batch_size", "gradient_accumulation_steps", "opt_name"),
    *("max_sequence_length", "max_steps", "opt_base_learning_rate", "opt_learning_rate_warmup_steps"),
}
"""Keys that a log has exactly once."""


def make_run(folder: Path, *, losses: tuple[float, ...] = (5.5, 4.1, 3.29), start: float = 1.76e9) -> Run:
    """A run of llama31_8b with an evaluation each 384 steps of 32 samples."""
    run = store.create_run(
        folder / "20251010_101010-abcd",
        RunMetadata(id="20251010_101010-abcd", name="llama", task="train pretrain", created=start - 60, host="node1"),
    )
    run.update_metadata(started=start - 60, outcome=RunOutcome(state="done", exit_code=0))
    run.config.parent.mkdir(parents=True)
    run.config.write_text(yaml.safe_dump({"modules": {"pre_trainer": {"overrides": SETTINGS}}}))
    events: list[dict[str, Any]] = [
        {"time": start, "kind": "run_started", "world_size": 8, "global_batch_size": 32, "seq_length": 8192}
        | {"train_iters": 1_200_000}
    ]
    for number, loss in enumerate(losses, start=1):
        step, end = 384 * number, start + 410.0 * number
        events.append({"time": end - 10, "kind": "step", "step": step, "consumed_samples": 32 * step, "loss": loss})
        events.append({"time": end, "kind": "eval", "step": step, "loss": loss, "tokens": 1024 * 8192, "time_s": 10.0})
    run.events.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return run


def write_log(run: Run, *words: str) -> Path:
    assert main(["direct", "--", "compare", "mlperf", str(run.directory), "--target", "3.3", *words]) == 0
    return run.directory / "report/mlperf.log"


def test_log_of_a_run_has_each_key_of_the_rules_in_order(tmp_path: Path) -> None:
    file = write_log(make_run(tmp_path), "--organization", "ORG")
    lines = [json.loads(line.removeprefix(":::MLLOG ")) for line in file.read_text().splitlines()]
    keys = [line["key"] for line in lines]
    assert {key for key in keys if keys.count(key) == 1} >= KEYS
    assert [key for key in keys if key.endswith(("_start", "_stop"))] == [
        *("init_start", "init_stop", "run_start", "block_start"),
        *("block_stop", "eval_start", "eval_stop", "block_start") * 2,
        *("block_stop", "eval_start", "eval_stop", "run_stop"),
    ]
    times = [line["time_ms"] for line in lines]
    assert times == sorted(times)
    assert lines[-1]["metadata"]["status"] == "success"
    values = {line["key"]: line["value"] for line in lines}
    assert (values["gradient_accumulation_steps"], values["eval_samples"]) == (2, 1024)
    assert values["opt_learning_rate_decay_steps"] == 1_200_000 - 128
    assert values["tracked_stats"]["throughput"] == pytest.approx(12288 / 400)
    log = read_log(file)
    assert log.format == "mlperf"
    assert [each.values["loss"] for each in log.evaluations] == [5.5, 4.1, 3.29]


def test_log_ends_at_the_target_or_says_that_it_was_not_reached(tmp_path: Path) -> None:
    early = write_log(make_run(tmp_path / "a", losses=(5.0, 3.2, 3.1))).read_text()
    assert early.count('"eval_accuracy"') == 2
    late = write_log(make_run(tmp_path / "b", losses=(5.0, 4.0))).read_text()
    assert '"status":"aborted"' in late


@pytest.mark.skipif(find_spec("mlperf_logging") is None, reason="mlperf_logging is not installed")
@pytest.mark.parametrize("rules", ["5.1.0", "6.1.0"])
def test_the_checker_of_mlperf_accepts_the_log(rules: str, tmp_path: Path) -> None:
    file = write_log(make_run(tmp_path), "--organization", "ORG")
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--ruleset", rules, str(file)]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize(
    ("reference", "mean", "deviation", "limit", "counts", "passes"),
    [
        (SMALL, 15.75, 0.43, 15.21, [15, 15, 15, 16, 16], True),
        (LARGE, 20.75, 0.66, 19.93, [19, 19, 19, 20, 21], False),
    ],
)
def test_convergence_gives_the_published_examples(
    reference: list[float], mean: float, deviation: float, limit: float, counts: list[float], passes: bool
) -> None:
    point = compute_reference_point(128, reference)
    assert (point.mean, round(point.deviation, 2)) == (mean, deviation)
    assert round(compute_limit(point, 3), 2) == limit
    check = check_convergence(counts, 128, [point])
    assert check.passes is passes
    olympic_mean = sum(sorted(counts)[1:-1]) / 3  # the smallest and the largest of five do not count
    assert check.mean == pytest.approx(olympic_mean)
    assert check.normalization == pytest.approx(mean / olympic_mean)


def test_batch_sizes_between_two_references_are_interpolated_and_others_need_runs() -> None:
    points = [compute_reference_point(128, SMALL), compute_reference_point(256, LARGE)]
    middle = check_convergence([18, 18, 18, 18, 18], 192, points)
    assert middle.reference is not None and middle.reference.mean == pytest.approx((15.75 + 20.75) / 2)
    assert middle.passes
    assert not check_convergence([30] * 5, 512, points).passes
    smaller = check_convergence([15.7] * 5, 64, points)
    assert smaller.reference == points[0] and smaller.passes


def test_one_run_that_does_not_converge_is_the_slowest_and_two_void_the_result() -> None:
    points = [compute_reference_point(128, SMALL)]
    assert check_convergence([16, 16, 16, 16, math.inf], 128, points).passes
    assert not check_convergence([16, 16, 16, math.inf, math.inf], 128, points).passes


def test_logs_are_checked_against_a_file_of_references(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = [str(write_log(make_run(tmp_path / str(i), start=1.76e9 + i))) for i in range(5)]
    counts = [36864] * 5 + [49152] * 15
    record = {"Benchmark": "llama31_8b", "BS": 32, "Epochs to converge": counts}
    reference = tmp_path / "rcps.json"
    reference.write_text(json.dumps({"llama31_8b_ref_32": record}))
    capsys.readouterr()
    words = ["direct", "--", "compare", "mlperf", *logs, "--reference", str(reference)]
    assert main([*words, "--json"]) == 1, "36,864 samples are significantly less than 46,000"
    report = json.loads(capsys.readouterr().out)
    assert [each["count"] for each in report["runs"]] == [36864] * 5
    record["Epochs to converge"] = [24576] * 10 + [36864] * 10
    reference.write_text(json.dumps({"llama31_8b_ref_32": record}))
    assert main(words) == 0
    assert "passes: not faster than the reference" in capsys.readouterr().out
    reference.write_bytes(msgspec.json.encode({"other": {**record, "Benchmark": "other"}}))
    assert main(words) == 2
    assert "it contains those of: other" in capsys.readouterr().err
