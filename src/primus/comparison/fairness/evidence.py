"""What a result states of that the fairness of its comparison depends on, by step and by the names of the schema."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from msgspec import Struct

from primus.comparison.fairness.rules import read_fairness_rules, translate_key, translate_settings, translate_value
from primus.comparison.results.result import ComparisonResult
from primus.config.extended_files import load_model
from primus.errors import PrimusError
from primus.machine.tools.vitals import NORMAL_LIMITS, POWER_LIMITS, UNCLEAR_LIMIT
from primus.models.counts import detect_convention
from primus.runs.speed_facts import SpeedPart, filter_packages

WORDS: dict[str, object] = {"True": True, "False": False, "None": None}
RUN_TIMER = "waiting for data included, evaluation and checkpoints excluded"
"""The parts that the time of a step of primus has (primus.callback.StepReport)."""


class DeviceState(Struct, frozen=True, kw_only=True):
    """The machine while the steps ran; None where it could not be read."""

    clock_mhz: float | None = None
    """Mean over the devices of the median of each; of all cores of the host, idle ones included, if it trained."""
    has_device_clock: bool = False
    faults: tuple[str, ...] | None = None
    """Limits other than the power limit that lowered a clock."""
    is_power_limited: bool = False
    """Whether a device was at its power limit in at least half of the samples: its clock then follows the work."""
    power_limit_w: float | None = None
    """Mean of the devices; where no tool tells it, the power that they drew at their limit."""


class FairnessEvidence(Struct, frozen=True, kw_only=True):
    """What a result states; None or empty where it does not."""

    name: str
    framework: str = ""
    stated: Mapping[str, Any] = {}
    """Settings as the engine had them, by its names."""
    settings: Mapping[str, Any] = {}
    """The same by the names and values of the schema, with what the framework's own loop implies."""
    chosen: frozenset[str] = frozenset()
    """Settings that were asked for in the words of the engine, by the names of the schema."""
    tokens: Mapping[int, str] = {}
    """Fingerprint of the tokens of each step."""
    num_tokens: Mapping[int, float] = {}
    """Number of tokens of each step, by which its rate is computed."""
    weights: str | None = None
    """Hash of the initial weights."""
    precision: str | None = None
    """Precision that the computation really used."""
    gflop_per_token: float | None = None
    flops_convention: str = ""
    timed_steps: Sequence[int] = ()
    """Steps with a time; empty if there are only averages."""
    timer: str | None = None
    """The parts of a step that its time includes."""
    learning_rates: Mapping[int, float] = {}
    """Learning rate that each step applied."""
    losses: Mapping[int, float] = {}
    device: str = ""
    device_state: DeviceState = DeviceState()
    other_load: float | None = None
    """Share of the machine that other processes took."""
    turn_group: str = ""
    """Name of the group of runs that took turns with each other."""
    platform: str = ""
    environment: Mapping[SpeedPart, Mapping[str, str]] = {}
    """Facts besides settings that can change the speed, by the names of `primus.runs.speed_facts`."""
    variable_sources: Mapping[str, str] = {}
    """The source of each variable."""
    states_environment: bool = False
    """Whether a variable that is not there was not set."""


def collect_evidence(result: ComparisonResult, name: str) -> FairnessEvidence:
    """The evidence in a result; `name` is how the report calls it."""
    framework, is_own_loop = result.cell.framework, result.source != "run"
    stated = _collect_settings(result)
    steps = result.steps
    loop = read_fairness_rules().find_own_loop(framework) if is_own_loop else None
    rates = steps.pair_values(steps.learning_rate)
    if loop is not None and loop.printed_rate_lag:
        rates = {step + loop.printed_rate_lag: rate for step, rate in rates.items()}
    flops = result.flops.flops_per_token or _find_reported_flops(result)
    return FairnessEvidence(
        name=name,
        framework=framework,
        stated=stated,
        settings=translate_settings(stated, framework, is_own_loop=is_own_loop),
        chosen=frozenset(translate_key(key) for key in result.chosen_settings),
        tokens=steps.pair_values(result.inputs.tokens or []),
        num_tokens=steps.pair_values(steps.tokens),
        weights=result.inputs.weights,
        precision=translate_value("precision", result.precision) if result.precision else None,
        gflop_per_token=flops / 1e9 if flops else None,
        flops_convention=result.flops.convention or _name_convention(result, flops),
        timed_steps=tuple(steps.pair_values(steps.time_s)),
        timer=None if is_own_loop else RUN_TIMER,
        learning_rates=rates,
        losses=steps.pair_values(steps.loss),
        device=result.gpu_info.device_name,
        device_state=_summarize_samples(result),
        turn_group=result.cell.turn_group,
        other_load=1.0 if result.load.other_gpu_processes else result.load.other_cpu_share,
        platform=result.platform,
        environment=_collect_environment(result),
        variable_sources=result.machine.variable_sources,
        states_environment=not is_own_loop and bool(result.machine.host),
    )


def _collect_environment(result: ComparisonResult) -> dict[SpeedPart, dict[str, str]]:
    """Variables that are set, packages that compute, and what is known of the machine."""
    machine, device = result.machine, result.gpu_info
    versions = {"torch": device.pytorch_version or "", **result.packages, **result.versions}
    toolkit = {"rocm": "ROCm", "cuda": "CUDA"}.get(device.software_stack.partition(" ")[0].lower())
    known = {
        "driver": machine.driver,
        "container": machine.container,
        "Python": machine.python,
        "kernel": machine.kernel,
        "CPU": machine.cpu_model,
        "CPU cores": machine.cpu_cores,
        **machine.firmware,
        **({toolkit: device.software_version} if toolkit else {}),
    }
    return {
        "variable": {name: value for name, value in machine.environment.items() if value},
        "package": filter_packages({name: version for name, version in versions.items() if version}),
        "machine": {name: str(value) for name, value in known.items() if value},
    }


def _collect_settings(result: ComparisonResult) -> Mapping[str, object]:
    """The settings that a result states, those that were read back from the engine last."""
    training, parallel = result.training_config, result.parallelism_config
    fields = {
        "global_batch_size": training.global_batch_size,
        "micro_batch_size": training.micro_batch_size,
        "seq_length": training.sequence_length,
        "train_iters": training.max_steps,
        "dataset": result.dataset,
        "tokenizer_hash": result.inputs.tokenizer,
        "world_size": result.gpu_info.device_count or training.num_gpus,
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "gradient_accumulation_steps": parallel.gradient_accumulation_steps,
        "threads": result.machine.threads,
    }
    known = {key: value for key, value in fields.items() if value is not None}
    stated = {key: parse_text(value) for key, value in result.settings.items()}
    return {**known, **stated, **result.engine_settings}


def parse_text(value: Any) -> Any:
    """A value of a log, which is text, as the number or word of Python that it is."""
    if not isinstance(value, str):
        return value
    if value in WORDS:
        return WORDS[value]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(value)
    return value


def _find_reported_flops(result: ComparisonResult) -> float | None:
    """The FLOPs of a token that reported TFLOP/s imply."""
    steps, devices = result.steps, result.gpu_info.device_count
    rows = zip(steps.tflops_per_device, steps.time_s, steps.tokens, strict=False)
    found = [rate * 1e12 * devices * time / count for rate, time, count in rows if devices and rate and time and count]
    return median(found) if found else None


def _name_convention(result: ComparisonResult, flops: float | None) -> str:
    """How FLOPs were counted, if the model is a preset."""
    length = result.training_config.sequence_length
    if not flops or not length or not result.cell.model:
        return ""
    try:
        return detect_convention(load_model(result.cell.model), length, flops) or ""
    except PrimusError:
        return ""


def _summarize_samples(result: ComparisonResult) -> DeviceState:
    """The samples from the end of the first step to that of the last: before and after them devices idle."""
    ended = [time for time in result.steps.ended if time is not None]
    begin, end = (ended[0], ended[-1]) if len(ended) > 1 else (-math.inf, math.inf)
    samples = [sample for sample in result.load.samples if begin <= sample.time <= end]
    clocks = [sample.device_clock_mhz for sample in samples if sample.device_clock_mhz]
    host_clocks = [sample.cpu_mhz for sample in samples if sample.cpu_mhz is not None]
    clock = _average_devices(clocks)
    faults = sorted({reason for sample in samples for reason in sample.throttled} - NORMAL_LIMITS - {UNCLEAR_LIMIT})
    at_limit = [sample for sample in samples if POWER_LIMITS.intersection(sample.throttled)]
    is_power_limited = bool(clocks) and len(at_limit) >= len(clocks) / 2
    limit_w = _average_devices([sample.device_power_limit_w for sample in samples])
    if limit_w is None and is_power_limited:
        limit_w = _average_devices([sample.device_power_w for sample in at_limit])
    return DeviceState(
        clock_mhz=clock if clock is not None else median(host_clocks) if host_clocks else None,
        has_device_clock=clock is not None,
        faults=tuple(faults) if faults or clocks else None,
        is_power_limited=is_power_limited,
        power_limit_w=limit_w,
    )


def _average_devices(readings: Sequence[Sequence[float | None]]) -> float | None:
    """The mean over the devices of the median over the readings of each."""
    columns = itertools.zip_longest(*readings)
    medians = [median(known) for column in columns if (known := [value for value in column if value is not None])]
    return fmean(medians) if medians else None
