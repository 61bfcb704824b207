"""The contract of training backends."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from primus.contract import PlugInKind, optional

if TYPE_CHECKING:
    from primus.config.schema import Experiment
    from primus.runs.attempt import Attempt


class Backend(Protocol):
    """A training engine: `backends/NAME.py`, chosen by `framework: NAME` in an experiment.

    The file is imported on the control plane, on machines without a GPU and without the engine: import tensor libraries
    inside `train`.
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

    @property
    @optional
    def KEYS(self) -> Collection[str]:
        """Keys that may stand under `overrides:` in addition to the schema's. They arrive unchecked in
        `experiment.trainer.backend_args`, a mapping as a mapping. Default: none."""
        return ()

    @property
    @optional
    def STAGES(self) -> Collection[str]:
        """Modules of an experiment that `train` takes: ``pre_trainer`` for `train pretrain`, ``post_trainer`` for
        `train posttrain`. Default: pre_trainer."""
        return ("pre_trainer",)

    @property
    @optional
    def USES_TORCH(self) -> bool:
        """Whether a launch fails with exit code 3 if the installed PyTorch cannot use the machine's AMD or NVIDIA GPUs.
        Default: False."""
        return False

    @property
    @optional
    def ENGINES(self) -> Collection[str]:
        """Engines that `train` drives, preferred first: names of files `engines/NAME.yaml`, which state the package,
        its supported versions, and what `setup --engine NAME` installs. Workers are started by the interpreter of the
        first one that is installed; the launch refuses another version than the supported ones. Default: none; workers
        run in the main environment."""
        return ()


BACKENDS = PlugInKind[Backend]("backends", Backend)
