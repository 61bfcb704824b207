"""The log of MLPerf Training for a run: one line of JSON for each event of the run folder.

The keys, their order and their values follow the rules of mlperf_logging (github.com/mlcommons/logging, Apache-2.0),
whose checker accepts the log: `python -m mlperf_logging.compliance_checker --ruleset 5.1.0 FILE`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from primus.errors import PrimusError
from primus.runs.events import Event, read_events
from primus.runs.store import Run
from primus.runs.summary import flatten_run_settings
from primus.training_logs.formats.mlperf import TOKEN

PRECISIONS = {"bf16": "bfloat16", "fp8": "fp8", "fp32": "fp32"}
"""The names that the checker has for them."""
SCHEDULES = {"cosine": "cosine with linear warmup"}
OPTIMIZERS = {"adamw": "adamw", "adam": "adamw"}


class MlperfSubmission(Struct, frozen=True, kw_only=True):
    """What a submission says beyond its run."""

    benchmark: str
    organization: str
    platform: str
    division: Literal["closed", "open"] = "closed"
    target: float | None = None
    """Evaluation loss at which the run has converged."""


class MlperfLogEntry(Struct, frozen=True, kw_only=True):
    """A line of the log; the fields are in their order in it."""

    namespace: str = ""
    time_ms: int
    event_type: str
    key: str
    value: Any
    metadata: Mapping[str, Any]


def format_mlperf_log(run: Run, submission: MlperfSubmission) -> str:
    """The lines of the log. It ends at the first evaluation that reaches the target.

    Raises:
        PrimusError: The run took no step, or its files are damaged.
    """
    events = list(read_events(run.events))
    started = next((event for event in events if event["kind"] == "run_started"), None)
    if started is None or not any(event["kind"] == "step" for event in events):
        raise PrimusError(f"{run.directory}: the run took no step", "MLPerf's log needs a run that trained")
    lines = _list_lines(run, submission, events, started)
    return "".join(f"{TOKEN.decode()}{msgspec.json.encode(line).decode()}\n" for line in lines)


def _list_lines(
    run: Run, submission: MlperfSubmission, events: list[Event], started: Event
) -> Iterator[MlperfLogEntry]:
    begin = started["time"]
    created = min(run.read_metadata().started or begin, begin)
    yield _make_point("cache_clear", True, created)
    yield _make_line("INTERVAL_START", "init_start", None, created)
    for key, value in _list_settings(run, submission, started, events).items():
        yield _make_point(key, value, begin)
    yield _make_line("INTERVAL_END", "init_stop", None, begin)
    yield _make_line("INTERVAL_START", "run_start", None, begin)
    yield _make_line("INTERVAL_START", "block_start", None, begin, samples_count=0)
    samples, samples_before, since = 0, 0, begin
    end = begin
    for event in events:
        end = max(end, event["time"])
        if event["kind"] == "step":
            samples = event["consumed_samples"]
        elif event["kind"] == "eval":
            evaluated = event["time"] - (event.get("time_s") or 0.0)
            if evaluated > since and samples > samples_before:
                rate = (samples - samples_before) / (evaluated - since)
                yield _make_point("tracked_stats", {"throughput": rate}, evaluated, step=samples, samples_count=samples)
            yield _make_line("INTERVAL_END", "block_stop", None, evaluated, samples_count=samples)
            yield _make_line("INTERVAL_START", "eval_start", None, evaluated, samples_count=samples)
            yield _make_point("eval_accuracy", event["loss"], event["time"], samples_count=samples)
            yield _make_line("INTERVAL_END", "eval_stop", None, event["time"], samples_count=samples)
            if submission.target is not None and event["loss"] <= submission.target:
                yield _make_line(
                    "INTERVAL_END", "run_stop", None, event["time"], status="success", samples_count=samples
                )
                return
            since, samples_before = event["time"], samples
            yield _make_line("INTERVAL_START", "block_start", None, since, samples_count=samples)
    yield _make_line("INTERVAL_END", "block_stop", None, end, samples_count=samples)
    is_success = submission.target is None and run.read_metadata().outcome.state == "done"
    status = "success" if is_success else "aborted"
    yield _make_line("INTERVAL_END", "run_stop", None, end, status=status, samples_count=samples)


def _list_settings(run: Run, submission: MlperfSubmission, started: Event, events: list[Event]) -> Mapping[str, Any]:
    config: Mapping[str, Any] = flatten_run_settings(run)
    batch, length = started["global_batch_size"], started["seq_length"]
    micro, world = config.get("micro_batch_size") or 1, started.get("world_size", 1)
    iterations, warmup = started["train_iters"], _count_warmup(config, started["train_iters"])
    lr = config["lr"]
    precision = PRECISIONS["fp8" if config.get("fp8") else "bf16" if config.get("bf16") else "fp32"]
    layout = {name: config.get(f"{name}_parallel_size") or 1 for name in ("tensor_model", "pipeline_model", "context")}
    data_parallel = max(1, world // (layout["tensor_model"] * layout["pipeline_model"] * layout["context"]))
    evaluation = next((event for event in events if event["kind"] == "eval"), None)
    precisions = {f"lowest_numerical_precision_in_{place}": precision for place in ("linear", "attn", "comm")}
    return {
        "submission_benchmark": submission.benchmark,
        "submission_org": submission.organization,
        "submission_platform": submission.platform,
        "submission_division": submission.division,
        "submission_status": "onprem",
        "seed": config.get("seed"),
        "global_batch_size": batch,
        "micro_batch_size": micro,
        "gradient_accumulation_steps": max(1, batch // (micro * data_parallel)),
        "max_sequence_length": length,
        "train_samples": iterations * batch,
        "eval_samples": evaluation["tokens"] // length if evaluation else 0,
        "max_steps": iterations,
        "opt_name": OPTIMIZERS.get(config.get("optimizer", ""), config.get("optimizer")),
        "opt_base_learning_rate": lr,
        "opt_end_learning_rate": config.get("min_lr") or lr * (config.get("min_lr_ratio") or 0.0),
        "opt_learning_rate_warmup_steps": warmup,
        "opt_learning_rate_decay_steps": (config.get("lr_decay_iters") or iterations) - warmup,
        "opt_learning_rate_decay_schedule": SCHEDULES.get(config.get("lr_decay_style", ""), "other"),
        "opt_adamw_beta_1": config.get("adam_beta1"),
        "opt_adamw_beta_2": config.get("adam_beta2"),
        "opt_adamw_epsilon": config.get("adam_eps"),
        "opt_adamw_weight_decay": config.get("weight_decay"),
        "opt_gradient_clip_norm": config.get("clip_grad"),
        **precisions,
        "tensor_parallelism": layout["tensor_model"],
        "pipeline_parallelism": layout["pipeline_model"],
        "context_parallelism": layout["context"],
        "expert_parallelism": config.get("expert_model_parallel_size") or 1,
        "config_filename": run.config.name,
    }


def _count_warmup(config: Mapping[str, Any], iterations: int) -> int:
    return config.get("lr_warmup_iters") or round((config.get("lr_warmup_fraction") or 0.0) * iterations)


def _make_point(key: str, value: Any, time_s: float, **metadata: Any) -> MlperfLogEntry:
    return _make_line("POINT_IN_TIME", key, value, time_s, **metadata)


def _make_line(event: str, key: str, value: Any, time_s: float, **metadata: Any) -> MlperfLogEntry:
    # The format asks for the place in the source that logs the line.
    place = {"file": "primus/comparison/mlperf/log.py", "lineno": 1}
    return MlperfLogEntry(
        time_ms=round(time_s * 1000), event_type=event, key=key, value=value, metadata={**place, **metadata}
    )
