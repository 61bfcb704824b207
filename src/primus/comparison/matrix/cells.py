"""The cells of a matrix: platform x framework x model x class of settings x repetition, each a training command."""

from __future__ import annotations

import hashlib
import itertools
import random
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct, structs

from primus import registry
from primus.comparison.folder.comparison_folder import RUNS
from primus.comparison.matrix.matrix import LoadedMatrix, MatrixModel, flatten_engine_settings, list_choices
from primus.comparison.results.batch_records import RECORD_VARIABLE
from primus.comparison.results.result import ResultCell
from primus.engines.choice import choose_engine
from primus.errors import PrimusError
from primus.experiment import resolve_experiment
from primus.framework import FRAMEWORKS
from primus.launch.command import parse_command
from primus.machine.facts import MachineFacts

QUIET = {"eval_interval": None, "eval_iters": 0, "sample_tokens": 0, "save_interval": None, "disable_last_saving": True,
         "auto_continue_train": False, "disable_tensorboard": True}  # fmt: skip
"""Settings of every cell unless the matrix sets them: nothing but steps."""
WITHOUT_FILES = (
    "mock_data=true",
    "dataset=null",
    "train_data_path=null",
    "valid_data_path=null",
    "test_data_path=null",
)
ELSEWHERE = "run the same command on such a machine, or give its platform a runtime:; merge the results by compare wrap"
PLAIN_TEXT = re.compile(r"[A-Za-z0-9_./~][A-Za-z0-9_./:~@=,-]*")
Status = Literal["runnable", "refused", "elsewhere"]


class MatrixCell(Struct, frozen=True, kw_only=True):
    """A cell with its command."""

    place: ResultCell
    status: Status
    """``elsewhere``: a cell of a platform that this machine is not."""
    reason: str = ""
    """The reason why the cell is refused, or the place where it runs."""
    hint: str = ""
    command: tuple[str, ...] = ()
    """Words after `primus-cli`."""
    turn_steps: int = 0
    """Steps of a turn, if the cell takes turns with others; else 0."""
    is_local: bool = True
    """Whether its processes descend from the harness: a runtime starts them elsewhere, or by a daemon."""

    @property
    def name(self) -> str:
        return self.place.name

    @property
    def turn_key(self) -> tuple[object, ...]:
        """Equal for the cells that take turns with each other."""
        place = self.place
        return (place.model, place.settings_class, place.repetition) if self.turn_steps else (self.name,)

    @property
    def shown_command(self) -> str:
        """The command as a user types it."""
        return " ".join(["primus-cli", *map(shlex.quote, self.command)])


class CellKind(Struct, frozen=True, kw_only=True):
    """What the repetitions of a cell share."""

    platform: str
    framework: str
    model: str
    settings_class: str


class CellLaunch(Struct, frozen=True, kw_only=True):
    """Where the cells of this command run."""

    environ: Mapping[str, str]
    platform: str
    """Platform of this machine."""
    processes: int
    runtime: str


def list_cells(
    loaded: LoadedMatrix, environ: Mapping[str, str], facts: MachineFacts, processes: int, runtime: str = ""
) -> list[MatrixCell]:
    """All cells in the order of execution.

    Args:
        loaded: The matrix.
        environ: Variables of this process.
        facts: This machine.
        processes: Processes of cells whose platform does not say it.
        runtime: Runtime of cells whose platform does not name one; this machine when empty.

    Raises:
        UsageError: The words of a runtime are wrong, or an experiment file does not exist.
    """
    matrix = loaded.matrix
    kinds = [
        CellKind(platform=platform, framework=framework, model=model, settings_class=name)
        for model in matrix.models
        for name in matrix.classes
        for platform in matrix.platforms
        for framework in matrix.frameworks
    ]
    for each in (runtime, *(platform.runtime for platform in matrix.platforms.values())):
        if each:
            parse_command([*shlex.split(each), "--", "train", "pretrain"])  # raises if a runtime is unknown
    launch = CellLaunch(environ=environ, platform=find_platform(facts), processes=processes, runtime=runtime)
    prepared = {kind: _prepare_cell(loaded, kind, launch) for kind in kinds}
    rng, ordered = random.Random(matrix.order_seed), []
    for repetition in range(1, matrix.repetitions + 1):
        block = list(prepared)
        if matrix.order == "random":
            rng.shuffle(block)
        ordered += [(prepared[kind], repetition) for kind in block]
    return [_number_cell(cell, loaded, repetition, position) for position, (cell, repetition) in enumerate(ordered)]


def find_platform(facts: MachineFacts) -> str:
    """The platform of a machine."""
    return facts.devices[0].vendor if facts.devices else "cpu"


def _prepare_cell(loaded: LoadedMatrix, kind: CellKind, launch: CellLaunch) -> MatrixCell:
    """The first repetition of a cell, without its run folder; refused with the reason if it cannot run."""
    matrix = loaded.matrix
    platform, model = matrix.platforms[kind.platform], matrix.models[kind.model]
    place = ResultCell(comparison=matrix.name, **structs.asdict(kind))
    if kind.framework in loaded.refused:
        return MatrixCell(place=place, status="refused", reason=loaded.refused[kind.framework])
    file, words = loaded.find_experiment(model), _format_words(_merge_settings(loaded, kind), model)
    words = ["--framework", kind.framework, *words]
    processes = platform.processes or launch.processes
    env = {**matrix.env, **platform.env, RECORD_VARIABLE: "1"}
    runtime = platform.runtime or launch.runtime
    is_here = not runtime and kind.platform in ("cpu", launch.platform)
    try:
        # Random tokens need no files: those of a cell that runs elsewhere are there.
        resolved = resolve_experiment(file, [*words, *WITHOUT_FILES], launch.environ)
        if is_here:
            resolve_experiment(file, words, launch.environ)
            choose_engine(list_engines(kind.framework), launch.environ)  # raises if none is installed nor can be
    except PrimusError as error:
        return MatrixCell(place=place, status="refused", reason=error.problem, hint=error.hint)
    asked = structs.replace(resolved.experiment, exp_name="", workspace="", work_group="", user_name="")
    identity = msgspec.json.encode([msgspec.to_builtins(asked), words, processes, env, runtime], order="sorted")
    place = structs.replace(place, fingerprint=hashlib.sha256(identity).hexdigest()[:16])
    command = _format_command(file, words, processes, env, runtime)
    turn_steps = matrix.turn_steps if matrix.order == "alternating" and is_here and kind.platform == "cpu" else 0
    cell = MatrixCell(place=place, status="runnable", command=command, turn_steps=turn_steps, is_local=not runtime)
    if is_here or runtime:
        return cell
    reason = f"this machine is {launch.platform}, not {kind.platform}"
    return structs.replace(cell, status="elsewhere", reason=reason, hint=ELSEWHERE)


def _number_cell(cell: MatrixCell, loaded: LoadedMatrix, repetition: int, position: int) -> MatrixCell:
    """The cell of a repetition, with its seed and its folder of runs."""
    place, own = structs.replace(cell.place, repetition=repetition, position=position), []
    seeds = loaded.matrix.seeds
    if seeds:
        own.append(f"seed={seeds[(repetition - 1) % len(seeds)]}")
        identity = f"{place.fingerprint} {own[0]}".encode()
        place = structs.replace(place, fingerprint=hashlib.sha256(identity).hexdigest()[:16])
    own += ["--workspace", str(loaded.output / RUNS), "--exp_name", place.name]
    return structs.replace(cell, place=place, command=(*cell.command, *own) if cell.command else ())


def _merge_settings(loaded: LoadedMatrix, kind: CellKind) -> dict[str, object]:
    """The settings of a cell; later ones win."""
    matrix = loaded.matrix
    device = {"device": "cpu" if kind.platform == "cpu" else "cuda"}
    layers: list[Mapping[str, Any]] = [QUIET, device, matrix.settings, matrix.models[kind.model].settings]
    layers.append(matrix.platforms[kind.platform].settings)
    if kind.settings_class == "tuned":
        layers += [each.settings for each in list_choices(matrix, kind.platform, kind.framework, kind.model)]
    return {key: value for layer in layers for key, value in flatten_engine_settings(layer).items()}


def _format_words(settings: Mapping[str, Any], model: MatrixModel) -> list[str]:
    """Settings as words of the command line."""
    preset = ["--model", model.preset] if model.preset else []
    return preset + [f"{key}={_format_value(value)}" for key, value in settings.items()]


def _format_value(value: Any) -> str:
    """A value so that YAML reads it back: text that looks like another type is quoted."""
    if isinstance(value, str) and PLAIN_TEXT.fullmatch(value) and not _is_other_scalar(value):
        return value
    return msgspec.json.encode(value).decode()


def _is_other_scalar(text: str) -> bool:
    import yaml

    return not isinstance(yaml.safe_load(text), str)


def _format_command(
    file: Path, words: Sequence[str], processes: int, env: Mapping[str, str], runtime: str
) -> tuple[str, ...]:
    outer = shlex.split(runtime)
    is_complete = "direct" in (outer[:1] + [word for before, word in itertools.pairwise(outer) if before == "--"])
    chain = outer if is_complete else [*outer, *(["--"] if outer else []), "direct", "--nproc", str(processes)]
    variables = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
    return (*chain, *variables, "--", "train", "pretrain", "--config", str(file), *words)


def list_engines(framework: str) -> tuple[str, ...]:
    """Engines that a framework drives, preferred first."""
    return tuple(registry.load_plug_in(FRAMEWORKS, framework).ENGINES)
