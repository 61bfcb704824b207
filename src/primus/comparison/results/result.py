"""One result of a comparison as a file.

The fields up to `memory_metrics` are those of the JSON that tprimat (github.com/DmitriiNikolaevAtAmd/tprimat) writes
for each run, with the same names, units and nesting, so that its readers read our files. The fields after them are
what a fair comparison needs beyond that. `load_result` also reads tprimat's own files; what they lack is None or empty.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from primus.comparison.results.tprimat_result import convert_tprimat
from primus.config.docs import read_field_docs
from primus.errors import PrimusError, UsageError
from primus.runs.files import write_json

T = TypeVar("T")
SCHEMA = "primus-comparison-result"
SCHEMA_VERSION = 1
"""Raised with every change that an older reader would misunderstand."""
SHORTEST_STEP_S, LONGEST_STEP_S = 1e-6, 1e7
"""Times outside are damage, and would make speeds that no device has."""

Platform = Literal["amd", "nvd", "cpu"]
"""tprimat's names."""
ResultState = Literal["done", "failed", "refused"]
ResultSource = Literal["run", "log", "tprimat", "published"]
"""A run of primus, the log of another framework (`compare extract`), a file of tprimat, or a published table."""
Numbers = list[float | None]
"""A value for each step; None where it is not finite or was not reported."""


class ResultDevice(Struct, frozen=True, kw_only=True):
    """The field `gpu_info`."""

    device_count: int | None = None
    """Devices that trained."""
    device_name: str = ""
    """Model of each device; of the CPU, if the host trained."""
    total_memory_gb: float | None = None
    """Memory of one device in 10^9 bytes; of the host, if it trained."""
    gpu_cores: int | None = None
    """Cores of one device, as tprimat counts them; None in results of primus, since their number says nothing."""
    pytorch_version: str | None = None
    software_stack: str = ""
    """``rocm``, ``cuda`` or ``cpu``; tprimat also writes the framework here."""
    software_version: str | None = None
    """Version of the software stack."""


class ResultModel(Struct, frozen=True, kw_only=True):
    """The field `model_info`."""

    total_params: int | None = None
    trainable_params: int | None = None


class ResultParallelism(Struct, frozen=True, kw_only=True):
    """The field `parallelism_config`."""

    strategy_name: str | None = None
    tensor_model_parallel_size: int | None = None
    pipeline_model_parallel_size: int | None = None
    data_parallel_size: int | None = None
    gradient_accumulation_steps: int | None = None


class ResultTraining(Struct, frozen=True, kw_only=True):
    """The field `training_config`."""

    max_steps: int | None = None
    """Steps that were asked for."""
    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    sequence_length: int | None = None
    num_gpus: int | None = None
    parallel_strategy: str | None = None


class ResultPerformance(Struct, frozen=True, kw_only=True):
    """The field `performance_metrics`: means without the first step, as in tprimat. Reports use medians of `steps`."""

    total_steps: int | None = None
    """Steps that were taken."""
    total_time_seconds: float | None = None
    """Sum of all steps."""
    avg_step_time_seconds: float | None = None
    min_step_time_seconds: float | None = None
    max_step_time_seconds: float | None = None
    steps_per_second: float | None = None
    tokens_per_second: float | None = None
    tokens_per_second_per_gpu: float | None = None
    throughput_per_gpu_core: float | None = None
    """Always None in results of primus: cores of different devices are not comparable."""


class ResultMemory(Struct, frozen=True, kw_only=True):
    """The field `memory_metrics`, in 10^9 bytes."""

    peak_memory_allocated_gb: float | None = None
    avg_memory_allocated_gb: float | None = None
    min_memory_allocated_gb: float | None = None
    warmup_memory_allocated_gb: float | None = None
    steady_state_memory_allocated_gb: float | None = None
    peak_memory_reserved_gb: float | None = None
    avg_memory_reserved_gb: float | None = None
    min_memory_reserved_gb: float | None = None
    measurement_method: str | None = None


class ResultCell(Struct, frozen=True, kw_only=True):
    """The place of a result in its comparison."""

    comparison: str = ""
    """Name of the matrix; empty for files of others."""
    platform: str = ""
    """``amd``, ``nvidia`` or ``cpu``, or the name of the platform in the matrix."""
    framework: str = ""
    """Name of the framework, such as ``native`` or ``torchtitan``; of a log the framework that wrote it."""
    model: str = ""
    """Name of the model in the matrix, or what the user calls it."""
    settings_class: str = "identical"
    """``identical`` or ``tuned``."""
    repetition: int = 1
    """Number of the run among the repetitions of its cell, from 1."""
    turn_group: str = ""
    """Name of the group of runs that took turns with each other; empty for a run that took no turns."""
    position: int | None = None
    """Place in the order of execution, counted from 0."""
    fingerprint: str = ""
    """Hash of the settings and the command of the cell: results of another version of the matrix have another one."""

    @property
    def name(self) -> str:
        """The name of its file, without the suffix."""
        parts = (self.platform, self.framework, self.model, self.settings_class, str(self.repetition))
        return "_".join(part for part in parts if part)


class ResultSteps(Struct, frozen=True, kw_only=True):
    """The steps in columns of equal length. Steps that were repeated after a restart are listed once."""

    number: list[int] = []
    """Number of each step, from 1."""
    time_s: Numbers = []
    """Time from the end of the step before; it includes waiting for data, and neither evaluations nor checkpoints."""
    data_time_s: Numbers = []
    """Time in the step that was spent waiting for the batch."""
    ended: Numbers = []
    """Time at which the step ended, in seconds since the epoch."""
    tokens: Numbers = []
    """Tokens of the global batch."""
    loss: Numbers = []
    """Training loss of the step."""
    grad_norm: Numbers = []
    """Norm of the gradient before clipping."""
    learning_rate: Numbers = []
    """Learning rate that the step applied."""
    tflops_per_device: Numbers = []
    """Rate of operations by the convention of `flops`."""
    mfu: Numbers = []
    """Share of the dense peak, as the run or the log reports it."""
    memory_gib: Numbers = []
    """Peak memory of rank 0 up to the step, in GiB."""
    first_of_attempt: list[int] = []
    """Numbers of the steps that began an attempt: the run was restarted before each but the first."""
    cpu_time_s: Numbers = []
    """CPU time of rank 0 in the step."""
    profiled: list[int] = []
    """Numbers of the steps that a profiler recorded."""
    turn: list[int] = []
    """Number of the turn of each step, if cells of the comparison took turns; 0 for a step of none."""

    def pair_values(self, values: Sequence[T | None]) -> dict[int, T]:
        """The known values of a column by step."""
        return {number: value for number, value in zip(self.number, values, strict=False) if value is not None}


class StepInterruption(Struct, frozen=True, kw_only=True):
    """Something besides steps that the run did, which explains a slow step."""

    kind: str
    """``evaluation``, ``checkpoint``, ``profile`` or ``garbage collection``."""
    step: int
    """Number of the step before the interruption; a garbage collection is part of this step."""
    time_s: float | None = None
    """Duration of the interruption. An evaluation or a checkpoint in the foreground is part of no step."""


class ResultFlops(Struct, frozen=True, kw_only=True):
    """How floating-point operations were counted."""

    flops_per_token: float | None = None
    convention: str = ""
    """``causal``, ``full``, ``6N`` or ``causal_window``; empty if it is not known."""
    by_convention: dict[str, float] = {}
    """The operations of a token by each convention, from the shape of the model."""
    peak_tflops: float | None = None
    """Dense peak of one device in the training precision; None if it is not known."""


class ResultInputs(Struct, frozen=True, kw_only=True):
    """Fingerprints of what was trained on; None where it was not recorded."""

    data: str | None = None
    """Fingerprint of the token files and their order."""
    tokens: list[str | None] | None = None
    """Fingerprint of all tokens of each step, in the order of `steps`."""
    tokenizer: str | None = None
    """Fingerprint of the tokenizer's file, or its name."""
    weights: str | None = None
    """Hash of the initial weights that the engine was given."""
    weights_origin: str = ""
    """``seed 1234``, a checkpoint, or ``engine`` for weights that the engine draws itself."""


class LoadSample(Struct, frozen=True, kw_only=True):
    """The state of the machine at one time."""

    time: float
    """Seconds since the epoch."""
    cpu_mhz: float | None = None
    """Mean clock of the CPUs."""
    load: float | None = None
    """Load average of one minute."""
    host_energy_j: float | None = None
    """Energy that the CPUs of the host have used since the first sample (RAPL); only differences count."""
    device_clock_mhz: list[float | None] = []
    """Clock of each device; the values of devices are only in the samples that read them."""
    device_power_w: list[float | None] = []
    """Power that each device draws."""
    device_power_limit_w: list[float | None] = []
    """Power limit of each device."""
    device_energy_j: list[float | None] = []
    """Energy by the counter of each device."""
    device_temperature_c: list[float | None] = []
    throttled: list[str] = []
    """Reasons why a device or CPU is throttled."""


class ResultLoad(Struct, frozen=True, kw_only=True):
    """The machine while the cell ran, as the harness saw it from outside; empty for runs on other machines."""

    samples: list[LoadSample] = []
    other_cpu_share: float | None = None
    """Share of all CPUs that processes other than the run used, from its start to its end."""
    other_gpu_processes: list[str] = []
    """Processes that held memory of a device before the run, or after it."""
    energy_source: str = ""
    """``rapl`` for CPUs, else where the energy of GPUs is from, or their power; empty if neither can be read."""


class ResultMachine(Struct, frozen=True, kw_only=True):
    """The machine that trained."""

    host: str = ""
    kernel: str = ""
    cpu_model: str = ""
    cpu_cores: int | None = None
    """Number of cores that the run could use."""
    memory_bytes: int | None = None
    device_type: str = ""
    """``cpu``, or what the engine calls its devices."""
    threads: int | None = None
    """Threads of each process."""
    processes: int | None = None
    nodes: int | None = None
    driver: str | None = None
    firmware: dict[str, str] = {}
    """Version by ``firmware NAME``; several versions where the devices differ."""
    python: str | None = None
    container: str | None = None
    """Image or container engine around the run."""
    environment: dict[str, str] = {}
    """Variables that the launch set, and those of the shell that can change the speed."""
    variable_sources: dict[str, str] = {}
    """The source of each of these variables: a layer of the launch such as ``mi300x``, ``--env`` or ``shell``."""


class ComparisonResult(Struct, frozen=True, kw_only=True):
    """A result. The fields up to `memory_metrics` are tprimat's."""

    platform: Platform
    dataset: str | None = None
    """Name of the data."""
    timestamp: str = ""
    """Start of the run, ISO 8601."""
    gpu_info: ResultDevice = ResultDevice()
    model_info: ResultModel = ResultModel()
    parallelism_config: ResultParallelism = ResultParallelism()
    training_config: ResultTraining = ResultTraining()
    performance_metrics: ResultPerformance = ResultPerformance()
    step_times: Numbers = []
    """Seconds of all steps, the first one included; equal to `steps.time_s`."""
    loss_values: Numbers = []
    """Loss of all steps; equal to `steps.loss`."""
    learning_rates: Numbers = []
    """Learning rate of all steps; equal to `steps.learning_rate`."""
    memory_values: Numbers = []
    """Memory at each step in 10^9 bytes."""
    memory_metrics: ResultMemory = ResultMemory()

    schema: Literal["primus-comparison-result"] = "primus-comparison-result"
    schema_version: int = SCHEMA_VERSION
    source: ResultSource = "run"
    cell: ResultCell = ResultCell()
    state: ResultState = "done"
    reason: str = ""
    """The reason why the cell has no complete run."""
    hint: str = ""
    """The action that resolves the reason."""
    run: str = ""
    """Run folder, relative to the folder of the comparison."""
    command: list[str] = []
    """Command line of the run."""
    wall_s: float | None = None
    """Time from the launch to the end of the run."""
    precision: str = ""
    """Type that the engine computed in: ``bfloat16``, ``float32``, ``fp8 hybrid``."""
    steps: ResultSteps = ResultSteps()
    """The steps of the run."""
    interruptions: list[StepInterruption] = []
    """The evaluations, checkpoints and other work that the run did between steps."""
    flops: ResultFlops = ResultFlops()
    settings: dict[str, Any] = {}
    """Every setting by its key, as the run resolved it."""
    engine_settings: dict[str, Any] = {}
    """Settings in force, as they were read from the objects of the engine after the first step."""
    chosen_settings: list[str] = []
    """The engine settings that the experiment asked for by the engine's own names, in `backend_args`."""
    versions: dict[str, str] = {}
    """Version of each library that trains."""
    packages: dict[str, str] = {}
    """Version of each installed package."""
    inputs: ResultInputs = ResultInputs()
    machine: ResultMachine = ResultMachine()
    load: ResultLoad = ResultLoad()
    notes: list[str] = []
    """Values of this result that are missing or doubtful."""


def save_result(result: ComparisonResult, path: Path) -> None:
    """Write a result by rename.

    Raises:
        PrimusError: The file cannot be written, for example because the disk is full.
    """
    write_json(path, result)


def load_result(path: Path) -> ComparisonResult:
    """The result in a file of primus or tprimat.

    Raises:
        UsageError: The file is not a result, or of a newer version of primus.
        PrimusError: It cannot be read, or is damaged.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PrimusError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_result(data, str(path))


def parse_result(data: bytes, name: str) -> ComparisonResult:
    """The result in `data`; `name` is that of its file. Raises as `load_result`."""
    try:
        tree = json.loads(data)  # msgspec rejects the NaN that Python's json writes, as tprimat does
    except (ValueError, RecursionError) as error:
        raise PrimusError(f"{name}: damaged: {error}", "run the cell again, or remove the file") from None
    kind = find_file_kind(tree)
    if kind is None:
        raise UsageError(
            f"{name}: not a result of a comparison", "results are written by compare run and compare extract"
        )
    if kind == "tprimat":
        tree = convert_tprimat(tree)
    elif tree.get("schema_version") != SCHEMA_VERSION:
        version = f"version {tree['schema_version']}" if "schema_version" in tree else "an unknown version"
        raise UsageError(
            f"{name}: results of {version} cannot be read by this version of primus, which reads version"
            f" {SCHEMA_VERSION}",
            "use the version of primus that wrote it, or run the cell again",
        )
    try:
        result = msgspec.convert(tree, ComparisonResult, strict=kind != "tprimat")
    except msgspec.ValidationError as error:
        raise PrimusError(f"{name}: damaged: {error}", "run the cell again, or remove the file") from None
    problem = find_problem(result)
    if problem:
        raise PrimusError(f"{name}: damaged: {problem}", "run the cell again, or remove the file")
    return result


def find_file_kind(tree: Any) -> Literal["primus", "tprimat"] | None:
    """Who wrote a JSON value; None if it is not a result."""
    if not isinstance(tree, dict):
        return None
    if tree.get("schema") == SCHEMA:
        return "primus"
    is_theirs = isinstance(tree.get("platform"), str) and {"training_config", "performance_metrics"} <= tree.keys()
    return "tprimat" if is_theirs and "schema" not in tree else None


def find_problem(result: ComparisonResult) -> str:
    """Why the values of a result contradict each other; empty if they do not."""
    steps, count = result.steps, len(result.steps.number)
    for name in ("time_s", "data_time_s", "ended", "tokens", "loss", "grad_norm", "learning_rate", "tflops_per_device",
                 "mfu", "memory_gib", "cpu_time_s"):  # fmt: skip
        if len(getattr(steps, name)) not in (0, count):
            return f"steps.{name} has {len(getattr(steps, name))} values for {count} steps"
    if any(later <= earlier for earlier, later in zip(steps.number, steps.number[1:], strict=False)):
        return "steps.number does not increase"
    wrong = next((value for value in steps.time_s if value and not SHORTEST_STEP_S < value < LONGEST_STEP_S), None)
    if wrong is not None:
        return f"steps.time_s has a step of {wrong:g} s"
    share, devices = result.load.other_cpu_share or 0.0, result.gpu_info.device_count
    if min(filter(None, steps.tokens), default=0) < 0 or not 0 <= share < math.inf or (devices or 1) < 1:
        return "the tokens of a step, the number of devices or the load is negative"
    if result.inputs.tokens is not None and len(result.inputs.tokens) != count:
        return f"inputs.tokens has {len(result.inputs.tokens)} values for {count} steps"
    return ""


def build_json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of a result, with the meaning of each field."""
    schema = msgspec.json.schema(ComparisonResult)
    kinds = {kind.__name__: kind for kind in vars(sys.modules[__name__]).values() if isinstance(kind, type)}
    for name, part in schema["$defs"].items():
        for field, text in read_field_docs(kinds[name]).items():
            part["properties"][field]["description"] = text
    title = f"Result of a comparison, version {SCHEMA_VERSION}"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **schema}
