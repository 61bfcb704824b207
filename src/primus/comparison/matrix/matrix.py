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

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, structs

from primus import registry
from primus.config.schema import OWNERS
from primus.config.source import flatten_settings, read_yaml, strip_origins
from primus.errors import UsageError, did_you_mean
from primus.framework import FRAMEWORKS
from primus.redaction import redact_value

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
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}")
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
    settings: dict[str, Any] = {}
    """Settings of its cells; only those that a tuned side may choose, and `device`."""


class MatrixModel(MatrixPart, frozen=True, kw_only=True):
    """A model of the matrix."""

    preset: str | None = None
    """Model preset, or a file; that of the experiment when null."""
    experiment: str | None = None
    """Experiment file of its cells, instead of that of the matrix."""
    settings: dict[str, Any] = {}
    """Settings of its cells, such as its data and its tokenizer."""


class TunedChoice(MatrixPart, frozen=True, kw_only=True):
    """Settings of the class `tuned` for the cells that match all given names."""

    platform: str | None = None
    framework: str | None = None
    model: str | None = None
    settings: dict[str, Any]


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
    settings: dict[str, Any] = {}
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
    """What the file sets without an effect here."""
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


def load_matrix(file: Path, environ: Mapping[str, str]) -> LoadedMatrix:
    """The matrix in a file: YAML, or a config.env of tprimat.

    Raises:
        UsageError: The file does not exist, or is not a matrix.
    """
    if file.suffix == ".env":
        from primus.comparison.matrix.tprimat_config import read_tprimat_matrix

        return _check_matrix(read_tprimat_matrix(file, environ))
    tree = strip_origins(read_yaml(file, environ))
    try:
        matrix = msgspec.convert(tree | {"name": tree.get("name") or file.stem}, RivalMatrix)
    except msgspec.ValidationError as error:
        raise _explain_error(error, tree, file) from None
    return _check_matrix(LoadedMatrix(matrix=matrix, file=file))


def _check_matrix(loaded: LoadedMatrix) -> LoadedMatrix:
    matrix, file = loaded.matrix, loaded.file
    if not NAME.fullmatch(matrix.name):
        raise UsageError(f"{file}: name: '{matrix.name}' is not the name of a folder", "use letters, digits and dashes")
    for what, found in (("platforms", matrix.platforms), ("frameworks", matrix.frameworks), ("models", matrix.models)):
        if not found:
            raise UsageError(f"{file}: {what}: empty", f"name at least one of the {what}")
    platforms = _rename_platforms(matrix, file)
    frameworks, refused = _rename_frameworks(matrix, file)
    matrix = structs.replace(matrix, platforms=platforms, frameworks=frameworks)
    for name, platform in platforms.items():
        _check_limits(platform.settings, TUNABLE_KEYS | {"device"}, f"{file}: platforms: {name}: settings")
        _check_variables(platform.env, f"{file}: platforms: {name}: env")
    _check_variables(matrix.env, f"{file}: env")
    _check_keys(matrix.settings, f"{file}: settings")
    if matrix.seeds and "seed" in matrix.settings:
        raise UsageError(f"{file}: both seeds: and settings: seed", "remove one of them")
    for name, model in matrix.models.items():
        if not NAME.fullmatch(name):
            raise UsageError(f"{file}: models: '{name}' cannot be part of a file name", "use letters, digits, . and -")
        _check_keys(model.settings, f"{file}: models: {name}: settings")
    if matrix.tuned:
        _check_tuned(matrix, matrix.tuned, file)
    notes = [*loaded.notes, *_list_order_notes(matrix)]
    return structs.replace(loaded, matrix=matrix, notes=tuple(notes), refused={**refused, **loaded.refused})


def _list_order_notes(matrix: RivalMatrix) -> list[str]:
    """The platforms whose cells do not alternate though the matrix asks for it."""
    others = [name for name, platform in matrix.platforms.items() if name != "cpu" or platform.runtime]
    if matrix.order != "alternating" or not others:
        return []
    return [f"order: alternating is for this machine's CPU; {', '.join(others)}: its cells run one after the other"]


def _rename_platforms(matrix: RivalMatrix, file: Path) -> dict[str, MatrixPlatform]:
    found = {}
    for name, platform in matrix.platforms.items():
        known = PLATFORM_ALIASES.get(name, name)
        if known not in PLATFORMS:
            raise UsageError(f"{file}: platforms: no platform '{name}'", did_you_mean(name, PLATFORMS))
        if known in found:
            raise UsageError(f"{file}: platforms: {known} is named twice", f"'{name}' is another name of {known}")
        found[known] = platform
    return found


def _rename_frameworks(matrix: RivalMatrix, file: Path) -> tuple[list[str], dict[str, str]]:
    """The frameworks by the names of primus, and those that cannot run with the reason."""
    found: list[str] = []
    refused: dict[str, str] = {}
    for name in matrix.frameworks:
        known = FRAMEWORK_ALIASES.get(name, name)
        if known in FOREIGN_FRAMEWORKS:
            refused[known] = FOREIGN_FRAMEWORKS[known]
        else:
            try:
                registry.find_plug_in_file(FRAMEWORKS.name, known)
            except UsageError as error:
                names = "" if "did you mean" in error.hint else f", {', '.join(FRAMEWORK_ALIASES)}"
                raise UsageError(f"{file}: frameworks: {error.problem}", error.hint + names) from None
        if known in found:
            hint = f"'{name}' is another name of {known}" if name != known else "repetitions: runs each cell again"
            raise UsageError(f"{file}: frameworks: {known} is named twice", hint)
        found.append(known)
    return found, refused


def _check_tuned(matrix: RivalMatrix, tuned: TunedClass, file: Path) -> None:
    """Check that each choice is within the limits of the matrix, and these within those of a fair comparison."""
    wrong = [key for key in tuned.may_change if key not in TUNABLE_KEYS]
    if wrong:
        raise UsageError(
            f"{file}: tuned: may_change: {wrong[0]} changes what is trained, not only its speed",
            f"a tuned side may choose {', '.join(sorted(TUNABLE_KEYS))}",
        )
    names = {
        "platform": (matrix.platforms, PLATFORM_ALIASES),
        "framework": (matrix.frameworks, FRAMEWORK_ALIASES),
        "model": (matrix.models, {}),
    }
    for number, choice in enumerate(tuned.choices, 1):
        where = f"{file}: tuned: choice {number}"
        for field, (known, aliases) in names.items():
            name = getattr(choice, field)
            if name is not None and aliases.get(name, name) not in known:
                raise UsageError(f"{where}: no {field} '{name}' in this matrix", did_you_mean(name, list(known)))
        _check_limits(choice.settings, frozenset(tuned.may_change), where)


def flatten_engine_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with those of one engine by path, however they are written: `backend_args.optimizer.implementation`."""
    paths = {key: value for key, value in settings.items() if "." in key}
    group = flatten_settings(settings.get(ENGINE_GROUP) or {})
    group |= {path.removeprefix(f"{ENGINE_GROUP}."): value for path, value in flatten_settings(paths).items()}
    others = {key: value for key, value in settings.items() if key not in paths and key != ENGINE_GROUP}
    return others | {f"{ENGINE_GROUP}.{path}": value for path, value in group.items()}


def _check_limits(settings: Mapping[str, Any], allowed: frozenset[str], where: str) -> None:
    for key in flatten_engine_settings(settings):
        if key not in allowed and key.partition(".")[0] not in allowed:
            raise UsageError(f"{where}: {key} is not one of the settings that may differ", did_you_mean(key, allowed))


def _check_variables(env: Mapping[str, str], where: str) -> None:
    """Check that no variable is a secret, which the command of a cell would show."""
    for name, value in env.items():
        if redact_value(name, value) != value:
            raise UsageError(f"{where}: {name} is a secret", f"set it in the environment: export {name}=...")


def _check_keys(settings: Mapping[str, Any], where: str) -> None:
    if not isinstance(settings.get(ENGINE_GROUP) or {}, Mapping):
        raise UsageError(f"{where}: {ENGINE_GROUP}: must hold keys and values", f"{ENGINE_GROUP}: {{KEY: VALUE}}")
    for key in flatten_engine_settings(settings):
        if key not in OWNERS and key.partition(".")[0] not in (ENGINE_GROUP, "profile"):
            raise UsageError(f"{where}: unknown key '{key}'", did_you_mean(key, OWNERS))


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


def _explain_error(error: msgspec.ValidationError, tree: Mapping[str, Any], file: Path) -> UsageError:
    """An error of the conversion in the words of the file."""
    if "modules" in tree:
        return UsageError(
            f"{file}: this is an experiment, not a matrix", f"name it in a matrix: experiment: {file.name}"
        )
    text = str(error)
    match = re.fullmatch(r"Object (missing required|contains unknown) field `(\w+)`(?: - at `\$\.?(.*)`)?", text)
    if match is None:
        place = re.sub(r" - at `\$\.?(.*)`$", r": \1", text)
        return UsageError(f"{file}: {place}", "docs/compare-platforms.md describes the file")
    where = f"{file}: {match[3]}" if match[3] else str(file)
    if match[1] == "missing required":
        return UsageError(f"{where}: '{match[2]}' is missing", "docs/compare-platforms.md describes the file")
    known = RivalMatrix.__struct_fields__ if not match[3] else ()
    hint = did_you_mean(match[2], known) if known else "docs/compare-platforms.md describes the file"
    return UsageError(f"{where}: unknown key '{match[2]}'", hint)
