"""The result of a finished run, from its run folder alone."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import structs

from primus.comparison.results.batch_records import TakenBatch, read_batch_records
from primus.comparison.results.result import (
    ComparisonResult,
    Platform,
    ResultCell,
    ResultDevice,
    ResultFlops,
    ResultInputs,
    ResultLoad,
    ResultMachine,
    ResultMemory,
    ResultModel,
    ResultParallelism,
    ResultSteps,
    ResultTraining,
    StepInterruption,
)
from primus.comparison.results.step_metrics import compute_performance, list_finite, parse_finite
from primus.config.number_formats import find_block_format
from primus.config.schema import OWNERS, Trainer
from primus.experiment import load_run_experiment
from primus.machine.profile import find_peak_tflops
from primus.models.counts import Convention, flops_per_token
from primus.runs import differences, events, speed_facts, step_turns, summary
from primus.runs.events import Event
from primus.runs.settings_in_force import read_settings_in_force
from primus.runs.snapshot import SystemInfo, read_system_info
from primus.runs.store import Run

CONVENTIONS: tuple[Convention, ...] = ("causal", "full", "6N", "causal_window")
INTERRUPTIONS = {
    "eval": "evaluation",
    "test": "evaluation",
    "checkpoint_saved": "checkpoint",
    "profile": "profile",
    "garbage_collection": "garbage collection",
}
"""Kind of an interruption by that of the event."""
COLUMNS = {
    "time_s": "step_time_s", "ended": "time", "data_time_s": "data_time_s", "tokens": "tokens", "loss": "loss",
    "grad_norm": "grad_norm", "learning_rate": "learning_rate", "tflops_per_device": "tflops_per_device",
    "cpu_time_s": "cpu_time_s", "mfu": "mfu", "memory_gib": "memory_gib",
}  # fmt: skip
"""Field of the step events by column."""
GIB_IN_GB = 2**30 / 1e9
NO_SYSTEM = SystemInfo(host="", kernel="", architecture="", python="", cpu_model="", cpu_cores=0, memory_bytes=0)


def read_result(run: Run, cell: ResultCell, *, folder: Path, load: ResultLoad | None = None) -> ComparisonResult:
    """The result of a run that has ended, in whatever state.

    Args:
        run: The run.
        cell: Its place in the comparison.
        folder: Folder of the comparison; paths in the result are relative to it.
        load: What was seen of the machine during the run.

    Raises:
        PrimusError: The run folder is damaged.
    """
    metadata = run.read_metadata()
    recorded = list(events.read_events(run.events))
    steps = events.read_steps(run.events)
    started = next((event for event in reversed(recorded) if event["kind"] == "run_started"), {})
    trainer = load_run_experiment(run).experiment.trainer
    system = read_system_info(run.directory / "env") or NO_SYSTEM
    settings = summary.flatten_run_settings(run)
    batches = read_batch_records(run)
    columns = _build_columns(steps, recorded)
    state = summary.find_run_state(run, metadata)
    failure = metadata.outcome.first_failure
    wall = metadata.ended - metadata.started if metadata.ended and metadata.started else None
    engine = _read_engine_settings(recorded, batches)
    return ComparisonResult(
        platform=_find_platform(cell, started),
        dataset=_name_dataset(settings),
        timestamp=datetime.fromtimestamp(metadata.started or metadata.created, timezone.utc).isoformat(),
        gpu_info=_describe_device(started, system),
        model_info=ResultModel(
            total_params=engine.get("parameters") or started.get("parameters"),
            trainable_params=engine.get("parameters"),
        ),
        parallelism_config=_describe_parallelism(trainer, started),
        training_config=_describe_training(trainer, started, engine),
        performance_metrics=compute_performance(columns, started.get("world_size") or 1),
        step_times=columns.time_s,
        loss_values=columns.loss,
        learning_rates=columns.learning_rate,
        memory_values=[None if value is None else value * GIB_IN_GB for value in columns.memory_gib],
        memory_metrics=_compute_memory(columns, started),
        cell=cell,
        state="done" if state == "done" else "failed",
        reason="" if state == "done" else metadata.outcome.reason or state,
        hint=failure.hint if failure else "",
        run=_format_path(run.directory, folder),
        command=metadata.command,
        wall_s=wall,
        precision=_describe_precision(trainer, started, engine),
        steps=columns,
        interruptions=_list_interruptions(recorded),
        flops=_describe_flops(trainer, started),
        settings=settings,
        engine_settings=engine,
        chosen_settings=[
            each.key
            for each in read_settings_in_force(recorded)
            if each.state != "not asked" and each.key not in (*OWNERS, "learning_rate")
        ],
        versions={name: str(version) for name, version in (started.get("versions") or {}).items()},
        packages=differences.read_run_packages(run),
        inputs=_describe_inputs(started, settings, steps, batches),
        machine=_describe_machine(run, started, system),
        load=load or ResultLoad(),
        notes=_list_notes(steps, started, batches, metadata.attempts),
    )


def _build_columns(steps: Sequence[Event], recorded: Sequence[Event]) -> ResultSteps:
    # A step's event is written when it is reported; the first event of an attempt says after which step it began.
    begins = {event.get("step", 0) + 1 for event in recorded if event["kind"] == "run_started"}
    windows = [event for event in recorded if event["kind"] == "profile" and "first_step" in event]
    numbers = [event["step"] for event in steps]
    columns = ResultSteps(
        number=numbers,
        first_of_attempt=[number for number in numbers if number in begins],
        turn=_number_turns(numbers, recorded),
        profiled=sorted({step for each in windows for step in range(each["first_step"], each["last_step"] + 1)}),
    )
    return structs.replace(columns, **{name: list_finite(steps, field) for name, field in COLUMNS.items()})


def _number_turns(numbers: Sequence[int], recorded: Sequence[Event]) -> list[int]:
    """The turn of each step; a repeated step belongs to the later turn."""
    begins = {event["first_step"]: event["number"] for event in recorded if event["kind"] == step_turns.EVENT}
    if not begins:
        return []
    found, current = [], 0
    for number in numbers:
        current = begins.get(number, current)
        found.append(current)
    return found


def _describe_inputs(
    started: Event, settings: Mapping[str, Any], steps: Sequence[Event], batches: Mapping[int, TakenBatch]
) -> ResultInputs:
    tokens = [_hash_samples(batches.get(event.get("consumed_samples", -1))) for event in steps] if batches else None
    return ResultInputs(
        data=started.get("data_fingerprint"),
        tokens=tokens,
        tokenizer=f"{settings.get('tokenizer_type')}: {settings.get('tokenizer_model') or settings.get('dataset')}",
        weights=started.get("weights_fingerprint"),
        weights_origin=str(started.get("weights_origin") or ""),
    )


def _hash_samples(record: TakenBatch | None) -> str | None:
    """The hash of the samples of a step in their order, whatever process was given which."""
    if record is None:
        return None
    ordered = sorted((int(number), checksum) for number, checksum in record.samples.items())
    return hashlib.sha256(msgspec.json.encode([checksum for _, checksum in ordered])).hexdigest()[:16]


def _read_engine_settings(recorded: Sequence[Event], batches: Mapping[int, TakenBatch]) -> dict[str, Any]:
    """What the engine has, and the shape of the batches that it was given."""
    found: dict[str, Any] = {each.key: each.in_force for each in read_settings_in_force(recorded)}
    if "compile" in found:
        found["compiled"] = found.pop("compile")  # the setting `compile` may leave the choice to the engine
    shapes = {record.shape for record in batches.values() if record.shape}
    if len(shapes) == 1:
        num_micro_batches, rows, columns = shapes.pop()
        found |= {
            "num_micro_batches": num_micro_batches,
            "micro_batch_size": rows,
            "seq_length": columns - 1,  # the last column is the target of the one before
            "global_batch_size": len(next(iter(batches.values())).samples),
        }
    return found


def _describe_parallelism(trainer: Trainer, started: Event) -> ResultParallelism:
    parallel = trainer.parallel
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    replica = tensor * pipeline * parallel.context_parallel_size
    data = max(1, int(started.get("world_size") or 1) // replica)
    batch = started.get("global_batch_size")
    return ResultParallelism(
        strategy_name=f"TP{tensor}_PP{pipeline}_DP{data}",
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        data_parallel_size=data,
        gradient_accumulation_steps=batch // (trainer.training.micro_batch_size * data) if batch else None,
    )


def _describe_training(trainer: Trainer, started: Event, engine: Mapping[str, Any]) -> ResultTraining:
    """The batch as the engine was given it, where that is recorded."""
    return ResultTraining(
        max_steps=trainer.training.train_iters,
        global_batch_size=engine.get("global_batch_size") or started.get("global_batch_size"),
        micro_batch_size=engine.get("micro_batch_size") or trainer.training.micro_batch_size,
        sequence_length=engine.get("seq_length") or trainer.training.seq_length,
        num_gpus=started.get("world_size"),
        parallel_strategy=_describe_parallelism(trainer, started).strategy_name,
    )


def _compute_memory(columns: ResultSteps, started: Event) -> ResultMemory:
    values = [value * GIB_IN_GB for value in columns.memory_gib if value is not None]
    if not values:
        return ResultMemory()
    method = "peak resident memory" if started.get("device_type") == "cpu" else "torch.cuda.max_memory_allocated"
    return ResultMemory(
        peak_memory_allocated_gb=max(values),
        avg_memory_allocated_gb=statistics.fmean(values),
        min_memory_allocated_gb=min(values),
        warmup_memory_allocated_gb=values[0],
        steady_state_memory_allocated_gb=values[-1],
        measurement_method=method,
    )


def _describe_device(started: Event, system: SystemInfo) -> ResultDevice:
    versions = started.get("versions") or {}
    is_cpu = started.get("device_type") == "cpu"
    software = system.facts.software if system.facts else None
    devices = system.facts.devices if system.facts else ()
    memory = system.memory_bytes if is_cpu else next((each.memory_bytes for each in devices if each.memory_bytes), None)
    vendor = "cpu" if is_cpu or not devices else devices[0].vendor
    version = {"amd": software.rocm, "nvidia": software.cuda}.get(vendor) if software else None
    return ResultDevice(
        device_count=started.get("world_size"),
        device_name=(system.cpu_model if is_cpu else "") or str(started.get("device") or ""),
        total_memory_gb=memory / 1e9 if memory else None,
        pytorch_version=versions.get("torch"),
        software_stack={"amd": "rocm", "nvidia": "cuda"}.get(vendor, "cpu"),
        software_version=version,
    )


def _describe_machine(run: Run, started: Event, system: SystemInfo) -> ResultMachine:
    software = speed_facts.describe_software(system, run.read_metadata().command)
    variables = speed_facts.read_run_variables(run)
    return ResultMachine(
        host=system.host,
        kernel=system.kernel,
        cpu_model=system.cpu_model,
        cpu_cores=system.cpu_cores or None,
        memory_bytes=system.memory_bytes or None,
        device_type=str(started.get("device_type") or ""),
        threads=started.get("threads"),
        processes=started.get("world_size"),
        driver=software.get("driver"),
        container=software.get("container"),
        firmware={name: version for name, version in software.items() if name.startswith("firmware ")},
        python=software.get("Python"),
        environment=variables.values,
        variable_sources=variables.sources,
    )


def _describe_flops(trainer: Trainer, started: Event) -> ResultFlops:
    training, device = trainer.training, str(started.get("device") or "")
    peak = None
    if block_format := find_block_format(trainer):
        peak = find_peak_tflops(device, "fp4" if "fp4" in block_format else "fp8")
    elif training.fp8 or training.bf16:
        peak = find_peak_tflops(device, "fp8" if training.fp8 else "bf16")
    return ResultFlops(
        flops_per_token=started.get("flops_per_token"),
        convention=str(started.get("flops_convention") or ""),
        by_convention={name: flops_per_token(trainer.model, training.seq_length, name) for name in CONVENTIONS},
        peak_tflops=peak,
    )


def _describe_precision(trainer: Trainer, started: Event, engine: Mapping[str, Any]) -> str:
    if block_format := find_block_format(trainer):
        return block_format
    if trainer.training.fp8:
        return f"fp8 {trainer.training.fp8}"
    seen = {True: "bfloat16", False: "float32"}.get(engine["bf16"], engine["bf16"]) if "bf16" in engine else None
    return str(seen or started.get("dtype") or "")


def _list_interruptions(recorded: Sequence[Event]) -> list[StepInterruption]:
    return [
        StepInterruption(
            kind=INTERRUPTIONS[event["kind"]],
            step=int(event.get("step") or event.get("last_step") or 0),
            time_s=parse_finite(event.get("time_s")),
        )
        for event in recorded
        if event["kind"] in INTERRUPTIONS
    ]


def _list_notes(steps: Sequence[Event], started: Event, batches: Mapping[int, TakenBatch], attempts: int) -> list[str]:
    notes = []
    if not steps:
        notes.append("the run has no steps")
    if attempts > 1:
        notes.append(f"the run was started {attempts} times")
    if not batches:
        notes.append("the run has no record of its tokens")
    if started and not started.get("weights_fingerprint"):
        notes.append(f"the initial weights are not known ({started.get('weights_origin') or 'not recorded'})")
    lost = [event["step"] for event in steps if parse_finite(event.get("loss")) is None]
    if lost:
        notes.append(f"the loss is not finite at step {lost[0]} ({len(lost)} of {len(steps)} steps)")
    return notes


def _find_platform(cell: ResultCell, started: Event) -> Platform:
    names: dict[str, Platform] = {"amd": "amd", "nvidia": "nvd", "cpu": "cpu"}
    return "cpu" if started.get("device_type") == "cpu" else names.get(cell.platform, "cpu")


def _name_dataset(settings: Mapping[str, Any]) -> str | None:
    if settings.get("mock_data"):
        return "random tokens"
    named = settings.get("dataset") or settings.get("train_data_path")
    return None if named is None else named if isinstance(named, str) else " ".join(map(str, named))


def _format_path(path: Path, folder: Path) -> str:
    path, folder = path.resolve(), folder.resolve()
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def describe_unstarted_cell(
    cell: ResultCell, reason: str, hint: str, state: Literal["failed", "refused"]
) -> ComparisonResult:
    """The result of a cell without a run: refused, or its launch failed."""
    return ComparisonResult(platform=_find_platform(cell, {}), cell=cell, state=state, reason=reason, hint=hint)
