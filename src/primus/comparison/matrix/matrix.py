"""The matrix of a comparison: platforms, frameworks, models and two classes of settings in one file.

name: rival-cpu
experiment: quickstart.yaml          # what every cell trains; a path, or next to this file
platforms:
  cpu: {processes: 1}
frameworks: [native, torchtitan, megatron, jax, huggingface]
models:
  llama: {preset: llama_quickstart}
settings: {train_iters: 40}          # of every cell: the class `identical`
tuned:                               # the class `tuned`: the best settings of each side, within limits
  may_change: [compile]
  choices:
    - {framework: native, settings: {compile: true}}
repetitions: 3
seeds: [1, 2, 3]                     # of the repetitions, in turn
order: interleaved
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from primus.config.source import flatten_settings
from primus.errors import UsageError

PLATFORMS = ("amd", "nvidia", "cpu")
PLATFORM_ALIASES = {"nvd": "nvidia", "cuda": "nvidia", "rocm": "amd"}
FRAMEWORK_ALIASES = {"mega": "megatron", "nemo": "megatron-bridge", "prim": "native", "tran": "huggingface"}
"""Names of tprimat: `nemo` runs recipes of Megatron-Bridge, `prim` is Primus, whose own trainer is `native` here, and
`tran` is Transformers."""
FOREIGN_FRAMEWORKS = {
    "deep": "primus has no driver for DeepSpeed; read its logs by 'compare extract'",
    "fsdp": "primus has no driver of this name; huggingface trains models of Transformers by FSDP2, native its own",
}
"""Frameworks of tprimat that no cell can run, with the reason."""
TUNABLE_KEYS = frozenset(
    {
        "compile", "context_parallel_size", "expert_model_parallel_size", "loss_chunk_size", "micro_batch_size",
        "num_workers", "pipeline_model_parallel_size", "recompute_activations", "sequence_parallel",
        "tensor_model_parallel_size", "use_distributed_optimizer", "backend_args",
    }
)  # fmt: skip
"""Settings that change the speed of a training and not its mathematics, which a tuned side may choose."""
ENGINE_GROUP = "backend_args"
"""Settings of one engine; their paths may also stand for themselves."""
Order = Literal["interleaved", "random", "alternating"]
Positive = Annotated[int, Meta(ge=1)]


class MatrixPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the parts of a matrix: unknown keys are refused."""


class MatrixPlatform(MatrixPart, frozen=True, kw_only=True):
    """A platform, and how its cells are launched."""

    processes: Positive | None = None
    """Processes on each node, one for each device; those of this launch when null."""
    runtime: str = ""
    """Words of the runtimes of each cell, such as `slurm sbatch -N 1 --partition mi300x`; it runs here when empty."""
    env: dict[str, str] = {}
    """Variables of its cells."""
    settings: dict[str, object] = {}
    """Settings of its cells; only those that a tuned side may choose, and `device`."""


class MatrixModel(MatrixPart, frozen=True, kw_only=True):
    """A model of the matrix."""

    preset: str | None = None
    """Model preset, or a file; that of the experiment when null."""
    experiment: str | None = None
    """Experiment file of its cells, instead of that of the matrix."""
    settings: dict[str, object] = {}
    """Settings of its cells, such as its data and its tokenizer."""


class TunedChoice(MatrixPart, frozen=True, kw_only=True):
    """Settings of the class `tuned` for the cells that match all given names."""

    platform: str | None = None
    framework: str | None = None
    model: str | None = None
    settings: dict[str, object]


class TunedClass(MatrixPart, frozen=True, kw_only=True):
    """The class `tuned`: each side with its best settings, within stated limits."""

    may_change: list[str]
    """Keys that a side may choose; all others are those of the class `identical`."""
    choices: list[TunedChoice]


class RivalMatrix(MatrixPart, frozen=True, kw_only=True):
    """The file of a comparison."""

    name: str
    """Name of the comparison, and of its folder in `output/`."""
    experiment: str | None = None
    """Experiment file that every cell trains; a model can name another one."""
    output: str | None = None
    """Folder of the results; output/NAME when null."""
    platforms: dict[str, MatrixPlatform]
    frameworks: list[str]
    models: dict[str, MatrixModel]
    settings: dict[str, object] = {}
    """Settings of every cell, by the keys of an experiment."""
    env: dict[str, str] = {}
    """Variables of every cell."""
    tuned: TunedClass | None = None
    repetitions: Positive = 3
    """Runs of each cell; three or more give an interval."""
    seeds: list[int] = []
    """Seed of each repetition, in turn; that of the experiment when empty. Runs with several seeds show how much losses
    differ by chance."""
    order: Order = "interleaved"
    """`interleaved` runs each cell once before any is repeated; `random` also shuffles the cells of each repetition.
    `alternating` starts the cells of a repetition that have the same model and class on this CPU together, and lets
    them take turns."""
    turn_steps: Positive = 2
    """Steps of a turn, with `order: alternating`."""
    order_seed: int = 42
    """Seed of the random order."""
    timeout_minutes: Annotated[float, Meta(gt=0)] = 240.0
    """Time limit of a cell."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes of settings that the matrix has."""
        return ("identical", "tuned") if self.tuned else ("identical",)


class LoadedMatrix(Struct, frozen=True, kw_only=True):
    """A matrix with its place."""

    matrix: RivalMatrix
    file: Path
    notes: tuple[str, ...] = ()
    """Settings of the file that have no effect here."""
    refused: dict[str, str] = {}
    """Frameworks that cannot run, with the reason."""
    draws_report: bool = False
    """Whether `compare run` ends with a report and its picture, as tprimat's run_train.sh does."""

    @property
    def output(self) -> Path:
        """Folder of the results."""
        return Path(self.matrix.output or f"output/{self.matrix.name}")

    def find_experiment(self, model: MatrixModel) -> Path:
        """The experiment file of a model.

        Raises:
            UsageError: It does not exist, or none is named.
        """
        name = model.experiment or self.matrix.experiment
        if name is None:
            raise UsageError(f"{self.file}: no experiment", "set experiment: to an experiment file")
        for candidate in (self.file.parent / name, Path(name)):
            if candidate.is_file():
                return candidate
        raise UsageError(f"{self.file}: experiment: {name}: no such file", f"looked in {self.file.parent} and here")


def flatten_engine_settings(settings: Mapping[str, Any]) -> dict[str, object]:
    """Settings with those of one engine by path, however they are written: `backend_args.optimizer.implementation`."""
    paths = {key: value for key, value in settings.items() if "." in key}
    group = flatten_settings(settings.get(ENGINE_GROUP) or {})
    group |= {path.removeprefix(f"{ENGINE_GROUP}."): value for path, value in flatten_settings(paths).items()}
    others = {key: value for key, value in settings.items() if key not in paths and key != ENGINE_GROUP}
    return others | {f"{ENGINE_GROUP}.{path}": value for path, value in group.items()}


def list_choices(matrix: RivalMatrix, platform: str, framework: str, model: str) -> Sequence[TunedChoice]:
    """The tuned choices of a cell, in the order of the file; later ones win."""
    own = {"platform": (platform, PLATFORM_ALIASES), "framework": (framework, FRAMEWORK_ALIASES), "model": (model, {})}
    choices = matrix.tuned.choices if matrix.tuned else []
    return [
        choice
        for choice in choices
        if all(
            (name := getattr(choice, field)) is None or aliases.get(name, name) == value
            for field, (value, aliases) in own.items()
        )
    ]
