"""The contracts of a framework: what trains, and the parts of its folder `frameworks/NAME/`, each of which is optional.

The parts translate its settings in experiment files, read and write its own files, read its logs and choose its
variables; `keys.yaml` and `packages.yaml` are data. A framework of which only logs are read is a folder with `logs.py`
alone, without `__init__.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from primus.contract import PlugInKind, optional, optional_value

if TYPE_CHECKING:
    from pathlib import Path

    from primus.checkpoint.convert import TargetSettings
    from primus.checkpoint.formats.open import FoundCheckpoint, OpenedCheckpoint
    from primus.checkpoint.output import OutputPlan
    from primus.checkpoint.training_state import TrainingState
    from primus.checkpoint.weights import WeightReader
    from primus.config.exports.foreign_text import ForeignText
    from primus.config.imports.foreign_config import ForeignConfig
    from primus.config.imports.foreign_file import ForeignFile
    from primus.config.load import Resolved
    from primus.config.schema import Experiment, ModelSpec
    from primus.config.translation.foreign_settings import Translator
    from primus.machine.profile import Library, Profile, Setting
    from primus.machine.workload import JobWorkload
    from primus.prediction.rank_record import RankRecord
    from primus.runs.attempt import Attempt
    from primus.training_logs.step_reader import StepReader


class Framework(Protocol):
    """A framework that trains: `frameworks/NAME.py`, chosen by `framework: NAME` in an experiment.

    The file is imported on the control plane, on machines without a GPU and without the engine: import tensor libraries
    inside `train`. The folder `frameworks/NAME/` may define `check` in `support.py`, and `train` in `engine/run.py`,
    which only the workers import.
    """

    def check(self, experiment: Experiment, /) -> None:
        """Accept or refuse an experiment.

        Called on the control plane when an experiment is resolved, before anything is allocated or started. Raise
        `primus.errors.UsageError` with the key and the fix for what `train` would fail on later.
        """
        ...

    def train(self, experiment: Experiment, attempt: Attempt, /) -> None:
        """Train as one rank.

        Called once in every worker process. Return when the last step is done, or after saving a checkpoint when
        `attempt.stop_signal` is set. Raise `primus.errors.PrimusError` with the cause and the fix. `UnfitError` (a
        package or device is unusable) and `FinalError` (a restart would fail in the same way) are not retried by
        `--max-restarts`. Any other exception fails the run with a traceback in the log of the rank.
        """
        ...

    @optional
    def run_fake_step(self, experiment: Experiment, device: str, observer: AbstractContextManager[object], /) -> None:
        """Run the forward and backward passes of one micro batch on fake tensors inside of `observer`, a mode of
        torch's dispatcher.

        Called by `tune gemm`, which records the matrix products, for ``cuda``; this machine need not have the device.
        Default: not supported; `tune gemm` reads logs or records a step of a run.
        """
        raise NotImplementedError

    @optional
    def run_fake_rank(self, experiment: Experiment, rank: int, world_size: int, devices_per_node: int, /) -> RankRecord:
        """Execute set-up, one step and what a checkpoint takes, as one rank of a run that does not happen.

        Called by `analyze layout` in a process of its own, without devices, network, data or other ranks. Use fake
        tensors and a fake process group, and observe the step by `primus.session.fake_run.observer`. Raise what a
        process of the run would raise. Default: not supported; the message says so.
        """
        raise NotImplementedError

    @property
    @optional_value(())
    def KEYS(self) -> Collection[str]:
        """Keys that may stand under `overrides:` in addition to the schema's. They arrive unchecked in
        `experiment.trainer.backend_args`, a mapping as a mapping. Default: none."""
        ...

    @property
    @optional_value(("pre_trainer",))
    def STAGES(self) -> Collection[str]:
        """Modules of an experiment that `train` takes: ``pre_trainer`` for `train pretrain`, ``post_trainer`` for
        `train posttrain`, ``rl_trainer`` for `train rl`. Default: pre_trainer."""
        ...

    @property
    @optional_value(False)
    def USES_TORCH(self) -> bool:
        """Whether a launch fails with exit code 3 if the installed PyTorch cannot use the machine's AMD or NVIDIA GPUs.
        Default: False."""
        ...

    @property
    @optional_value(())
    def ENGINES(self) -> Collection[str]:
        """Engines that `train` drives, preferred first: names of frameworks whose `packages.yaml` states the package,
        its supported versions, and what `setup --engine NAME` installs. Workers are started by the interpreter of the
        first one that is installed; the launch refuses another version than the supported ones. Default: none; workers
        run in the main environment."""
        ...


FRAMEWORKS = PlugInKind[Framework]("frameworks", Framework, modules={"check": "support", "train": "engine.run"})


class SettingsTranslation(Protocol):
    """Translation of a framework's own settings in experiment files: `frameworks/NAME/translation.py`."""

    def create_translator(self) -> Translator:
        """The translation of the settings of one experiment file."""
        ...


TRANSLATIONS = PlugInKind[SettingsTranslation]("translations", SettingsTranslation)


class FileImport(Protocol):
    """Reading a framework's own files as experiments: `frameworks/NAME/import_file.py`.

    `config import` asks every framework whether a file or a command is its own.
    """

    @property
    def FORMATS(self) -> str:
        """The files that are read, in messages: ``a torchtitan TOML or Python file``."""
        ...

    @optional
    def read_file(self, file: ForeignFile, /) -> ForeignConfig | None:
        """The experiment of a YAML, TOML or Python file; None if the file is another framework's.

        Raise `primus.errors.UsageError` if the file is the framework's, and cannot be read.
        """
        return None

    @property
    @optional_value("")
    def COMMANDS(self) -> str:
        """What the commands of `find_arguments` start, in messages: ``Megatron-LM``. Default: there are none."""
        ...

    @optional
    def find_arguments(self, words: Sequence[str], /) -> Mapping[str, tuple[str, ...]] | None:
        """Values by argument, as the command writes it, of a command that trains; None if it is another one.

        Called with the words of each command of a script, with its variables expanded. Words that belong to no argument
        stand under an empty name. Raise `primus.errors.UsageError` if the command is the framework's, and cannot be
        imported; the hint says what to import instead. Default: None.
        """
        return None

    @optional
    def read_arguments(self, arguments: Mapping[str, Sequence[str]], target: ForeignConfig, /) -> None:
        """Set the keys of `target` from the arguments of a command, and list each argument without a key."""
        raise NotImplementedError


IMPORTS = PlugInKind[FileImport]("imports", FileImport)


class FileExport(Protocol):
    """Writing an experiment as a framework's own file: `frameworks/NAME/export_file.py`."""

    @property
    def TARGET(self) -> str:
        """What `config export --to` takes: ``megatron-lm``."""
        ...

    @property
    def FILE_NAME(self) -> str:
        """Usual name of the file: ``train.sh``."""
        ...

    def format_file(self, resolved: Resolved, preset: str | None, /) -> ForeignText:
        """The file, and the settings that it cannot hold. `preset` names the model's preset, if it has one.

        Raise `primus.errors.UsageError` if the framework has no such model.
        """
        ...


EXPORTS = PlugInKind[FileExport]("exports", FileExport)


class LogFormat(Protocol):
    """The lines that a framework logs: `frameworks/NAME/logs.py`."""

    @property
    def READER(self) -> type[StepReader]:
        """Reads the steps of a log."""
        ...


LOGS = PlugInKind[LogFormat]("logs", LogFormat)


class FrameworkVariables(Protocol):
    """Environment variables of a framework: `frameworks/NAME/variables.py`, used with `framework: NAME`.

    The file is imported on every node before the workers start; it must not import tensor libraries.
    """

    @property
    def LIBRARIES(self) -> tuple[Library, ...]:
        """Libraries that the framework computes with, which enables their settings in the machine's layers."""
        ...

    def list_settings(self, workload: JobWorkload, device: Profile | None, /) -> Mapping[str, Setting]:
        """Variables by the layout of a job, on devices of a model; None where the model is not known."""
        ...


VARIABLES = PlugInKind[FrameworkVariables]("variables", FrameworkVariables)


class FrameworkCheckpoint(Protocol):
    """The checkpoints that a framework writes: `frameworks/NAME/checkpoint.py`.

    Weights are read and written in hub names, so that each format needs one reader and one writer. Import
    torch.distributed.checkpoint inside of the functions: it takes a second.
    """

    @property
    def FORMATS(self) -> tuple[str, ...]:
        """Names of the formats that are read."""
        ...

    def find_format(self, folder: Path, names: Collection[str], /) -> str | None:
        """The format of a folder; None if it is another framework's. `names` are the tensors in a folder of
        torch.distributed.checkpoint; empty for other folders."""
        ...

    def open_weights(self, found: FoundCheckpoint, spec: ModelSpec, trust_pickle: bool, /) -> WeightReader:
        """The weights in hub names."""
        ...

    @optional
    def read_training_state(
        self, found: FoundCheckpoint, spec: ModelSpec, weights: WeightReader, /
    ) -> TrainingState | None:
        """The state of AdamW; None if there is none. Default: none."""
        return None

    @optional
    def read_shape(self, found: FoundCheckpoint, /) -> Mapping[str, Any] | None:
        """The sizes that a checkpoint says of its model besides those of its manifest; None if it says none."""
        return None

    @optional
    def plan_output(
        self,
        weights: WeightReader,
        source: OpenedCheckpoint,
        settings: TargetSettings,
        training: TrainingState | None,
        /,
    ) -> OutputPlan:
        """The files of a checkpoint in the framework's format, with the state of the optimizer if there is one.

        Raise `primus.errors.UsageError` if the framework cannot hold the model.
        """
        raise NotImplementedError


CHECKPOINTS = PlugInKind[FrameworkCheckpoint]("checkpoints", FrameworkCheckpoint)
