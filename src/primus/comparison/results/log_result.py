"""The result of a run of another framework, from its log and what the user adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import harmonic_mean, median

import msgspec
from msgspec import Struct, structs

from primus import statistics
from primus.comparison.results.result import (
    ComparisonResult,
    Numbers,
    Platform,
    ResultCell,
    ResultDevice,
    ResultMemory,
    ResultParallelism,
    ResultSteps,
    ResultTraining,
    StepInterruption,
)
from primus.comparison.results.step_metrics import compute_performance
from primus.training_logs.formats.mlperf import TIME_TO_TRAIN
from primus.training_logs.read_log import TrainingLog

GIB = 1 << 30
COLUMNS = ("loss", "grad_norm", "learning_rate", "tflops_per_device", "mfu", "memory_gib")
"""Columns of a log that a result has as they are."""
PLATFORMS: dict[str, Platform] = {"amd": "amd", "nvidia": "nvd", "nvd": "nvd", "cpu": "cpu"}
SETTING_NAMES = {
    "sequence_length": ("seq_length", "max_sequence_length", "max_target_length", "encoder_seq_length"),
    "global_batch_size": ("global_batch_size", "global_batch_size_to_train_on"),
    "micro_batch_size": ("micro_batch_size", "micro_batch_size_to_train_on"),
    "num_devices": ("world_size", "num_devices"),
    "tensor_model_parallel_size": ("tensor_model_parallel_size", "tensor_parallelism", "ici_tensor_parallelism"),
    "pipeline_model_parallel_size": ("pipeline_model_parallel_size", "pipeline_parallelism"),
    "data_parallel_size": ("data_parallel_size",),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "max_steps": ("train_iters", "max_steps", "steps"),
}
"""Names that Megatron-LM, MLPerf and MaxText print, by our name."""


class LogFacts(Struct, frozen=True, kw_only=True):
    """What the user knows of a run beyond its log."""

    platform: str = ""
    framework: str = ""
    model: str = ""
    device_name: str = ""
    num_devices: int | None = None
    sequence_length: int | None = None


class LogSummary(Struct, frozen=True, kw_only=True):
    """Figures of a log; of the steps after the warm-up."""

    num_steps: int
    first_step: int
    last_step: int
    num_steady_steps: int
    is_steady: bool
    """Whether the times of the steps settled."""
    step_time_s: float | None = None
    """Median time of a step."""
    tokens_per_s_per_device: float | None = None
    """Harmonic mean of the rates in the log, which is all tokens by all time; without them, the tokens of a batch by
    the median time."""
    tflops_per_device: float | None = None
    """Rate that the log reports; it does not say how operations were counted."""
    memory_gib: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    time_to_train_s: float | None = None
    """Time to train of a run of MLPerf that reached its target."""


def list_known_settings(log: TrainingLog, facts: LogFacts) -> dict[str, int]:
    """Numbers by our names, from the log; what the user says wins."""
    known: dict[str, int] = {}
    for name, names in SETTING_NAMES.items():
        text = next((log.settings[each] for each in names if each in log.settings), "")
        if text.isdecimal():
            known[name] = int(text)
    batch = log.steps.list_finite("global_batch_size")
    known |= {"global_batch_size": int(batch[-1])} if batch else {}
    known |= {"num_devices": facts.num_devices} if facts.num_devices else {}
    known |= {"sequence_length": facts.sequence_length} if facts.sequence_length else {}
    return known


def summarize_log(log: TrainingLog, facts: LogFacts) -> LogSummary:
    """The figures of a log."""
    steps, known = log.steps, list_known_settings(log, facts)
    numbers, times = steps.columns["step"], steps.list_values("step_time_s")
    window = statistics.find_steady_window([time for time in times if time is not None])
    steady = slice(window.start, None)
    step_time_s = median(finite) if (finite := steps.list_finite("step_time_s")[steady]) else None
    rates = [rate for rate in steps.list_finite("tokens_per_s_per_device")[steady] if rate > 0]
    rate = harmonic_mean(rates) if rates else _compute_rate(log, known, step_time_s)
    tflops, losses = steps.list_finite("tflops_per_device")[steady], steps.list_finite("loss")
    return LogSummary(
        num_steps=sum(attempt.num_steps for attempt in log.attempts),
        first_step=int(numbers[0]) if numbers else 0,
        # Not of the table, which does not keep every step of a long log.
        last_step=log.attempts[-1].last_step if log.attempts else 0,
        num_steady_steps=len(numbers[steady]) if numbers else 0,
        is_steady=window.is_steady,
        step_time_s=step_time_s,
        tokens_per_s_per_device=rate,
        tflops_per_device=median(tflops) if tflops else None,
        memory_gib=max(steps.list_finite("memory_gib"), default=None),
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        time_to_train_s=float(log.settings[TIME_TO_TRAIN]) if TIME_TO_TRAIN in log.settings else None,
    )


def build_log_result(log: TrainingLog, facts: LogFacts) -> ComparisonResult:
    """The result of the run that wrote a log; `notes` says what the log does not say."""
    known = list_known_settings(log, facts)
    steps = _read_steps(log, known)
    name = log.format if not facts.framework else facts.framework
    return ComparisonResult(
        platform=PLATFORMS[facts.platform],
        gpu_info=ResultDevice(device_count=known.get("num_devices"), device_name=facts.device_name),
        # SETTING_NAMES has the names of their fields.
        parallelism_config=msgspec.convert(known, ResultParallelism),
        training_config=msgspec.convert({**known, "num_gpus": known.get("num_devices")}, ResultTraining),
        performance_metrics=compute_performance(steps, known.get("num_devices")),
        step_times=steps.time_s,
        loss_values=steps.loss,
        learning_rates=steps.learning_rate,
        memory_values=[None if value is None else value * GIB / 1e9 for value in steps.memory_gib],
        memory_metrics=_describe_memory(steps.memory_gib, log.memory),
        source="log",
        cell=ResultCell(platform=facts.platform, framework=name, model=facts.model),
        run=log.path,
        steps=steps,
        interruptions=[
            StepInterruption(kind="evaluation", step=round(each.values["step"])) for each in log.evaluations
        ],
        settings=dict(log.settings),
        notes=list_notes(log, known),
    )


def _read_steps(log: TrainingLog, known: Mapping[str, int]) -> ResultSteps:
    steps = ResultSteps(
        number=[round(step) for step in log.steps.columns["step"]],
        # A damaged line may hold a negative number.
        time_s=[None if time is None or time < 0 else time for time in log.steps.list_values("step_time_s")],
        tokens=_list_tokens(log, known),
        first_of_attempt=[attempt.first_step for attempt in log.attempts],
    )
    return structs.replace(steps, **{name: log.steps.list_values(name) for name in COLUMNS})


def list_notes(log: TrainingLog, known: Mapping[str, int]) -> list[str]:
    """What is missing or doubtful in a log."""
    notes = []
    if log.num_unread:
        notes.append(f"lines of steps that could not be read: {log.num_unread}")
    if log.is_cut_off:
        notes.append("the file ends within a line of a step, which is not read")
    if log.damage:
        notes.append(f"the compressed file is damaged or cut off ({log.damage}): what follows is not read")
    if log.num_nonfinite_losses:
        notes.append(f"steps without a finite loss: {log.num_nonfinite_losses}")
    notes += _list_target_notes(log.settings)
    if log.step_note:
        notes.append(log.step_note)
    if log.has_derived_times:
        notes.append("times of steps are differences of time stamps, and contain evaluations and checkpoints")
    if not log.steps.list_finite("step_time_s"):
        notes.append("the log has no times of steps")
    if log.steps.stride > 1:
        notes.append(f"of {log.steps.num_added:,} steps one of {log.steps.stride} is kept")
    if len(log.attempts) > 1:
        notes.append(f"{len(log.attempts)} attempts; of a repeated step the last one counts")
    options = {"num_devices": "--devices", "sequence_length": "--seq-length"}
    missing = [option for name, option in options.items() if name not in known]
    if missing and not log.steps.list_finite("tokens_per_s_per_device"):
        notes.append(f"no rate of tokens: add {' and '.join(missing)}")
    return notes


def _list_target_notes(settings: Mapping[str, str]) -> list[str]:
    """Whether a run of MLPerf reached its target, and when."""
    if TIME_TO_TRAIN in settings:
        return [f"time to train: {float(settings[TIME_TO_TRAIN]) / 60:.2f} min"]
    if "run_stop_ms" in settings and settings["status"] != "success":
        return [f"the run did not reach its target: status {settings['status']}"]
    return []


def _compute_rate(log: TrainingLog, known: Mapping[str, int], step_time_s: float | None) -> float | None:
    """Tokens per second and device from the batch, the length of a sample, and the time of a step."""
    factors = [known.get(name) for name in ("global_batch_size", "sequence_length", "num_devices")]
    batch, length, devices = factors
    samples = log.steps.list_finite("samples_per_s")
    if samples and length and devices:
        return median(samples) * length / devices
    if not (batch and length and devices and step_time_s):
        return None
    return batch * length / (step_time_s * devices)


def _list_tokens(log: TrainingLog, known: Mapping[str, int]) -> Numbers:
    """Tokens of the global batch of each step: from the batch and the length, else from the rate."""
    length, devices = known.get("sequence_length"), known.get("num_devices")
    count = len(log.steps)
    if length:
        batches = log.steps.list_values("global_batch_size") or [known.get("global_batch_size")] * count
        return [None if batch is None else float(batch) * length for batch in batches]
    rates, times = log.steps.list_values("tokens_per_s_per_device"), log.steps.list_values("step_time_s")
    if devices and rates and times:
        pairs = zip(rates, times, strict=True)
        return [None if rate is None or time is None else round(rate * time * devices) for rate, time in pairs]
    return []


def _describe_memory(memory: Sequence[float | None], method: str) -> ResultMemory:
    values = [value * GIB / 1e9 for value in memory if value is not None]
    if not values:
        return ResultMemory()
    return ResultMemory(
        peak_memory_reserved_gb=max(values),
        avg_memory_reserved_gb=sum(values) / len(values),
        min_memory_reserved_gb=min(values),
        measurement_method=method or None,
    )
