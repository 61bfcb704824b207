"""Loggers that send the numbers of a run to TensorBoard, Weights & Biases and MLflow."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import msgspec

from primus.config.schema import Experiment, LoggingConfig
from primus.config.source import ConfigValue, flatten_settings
from primus.errors import PrimusError, UnfitError
from primus.experiment import list_tracker_packages
from primus.launch.worker_packages import format_missing_package
from primus.redaction import redact_tree
from primus.runs.store import Run

Scalars = Mapping[str, float]
"""Values of one step by name."""


class Logger(Protocol):
    """Takes the numbers of a run, on its first process."""

    def log_scalars(self, step: int, scalars: Scalars) -> None: ...

    def discard_steps_after(self, step: int) -> None:
        """Discard what was logged after `step`: these steps are repeated."""

    def close(self) -> None: ...


def check_packages(config: LoggingConfig) -> None:
    """Raises UnfitError if the package of a requested logger is not installed."""
    # The launcher has checked as well, except for an engine that it installed.
    for package in list_tracker_packages(config):
        if not find_spec(package):
            raise UnfitError(
                f"{format_missing_package(package)} in {sys.prefix}",
                f"{sys.executable} -m pip install {package}, or set disable_{package}: true",
            )


def open_loggers(experiment: Experiment, run: Run, first_step: int) -> tuple[list[Logger], str]:
    """Open the loggers of the experiment; also returns a note on what is missing.

    Args:
        experiment: Its `logging` decides.
        run: Its folder takes the files, its id is the name.
        first_step: Step after which this attempt begins.
    """
    config = experiment.trainer.logging
    loggers: list[Logger] = []
    note = ""
    if not config.disable_wandb:
        loggers.append(WeightsAndBiasesLogger(experiment, run))
    if not config.disable_mlflow:
        loggers.append(MLflowLogger(experiment, run))
    if not config.disable_tensorboard:
        if find_spec("tensorboard"):
            loggers.append(TensorBoardLogger(run.directory / "tensorboard", first_step))
        else:
            note = "tensorboard is not installed, so no TensorBoard files are written (pip install tensorboard)"
    return loggers, note


class TensorBoardLogger:
    """Event files by tensorboard's own writer, which needs neither torch nor TensorFlow; opened at the first value.

    Args:
        folder: Where the files go.
        first_step: TensorBoard discards what older files have after this step: the steps are repeated.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        self._folder, self._first_step = folder, first_step
        self._writer: Any = None

    def log_scalars(self, step: int, scalars: Scalars) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        try:
            if self._writer is None:
                self._open_writer()
            self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        except OSError as error:  # a full disk ends tensorboard's thread; the next step begins another file
            print(f"TensorBoard lacks values up to step {step}: {error}", file=sys.stderr)
            self._writer, self._first_step = None, step

    def discard_steps_after(self, step: int) -> None:
        self._first_step = step
        if self._writer is not None:
            self._write_session_start()

    def close(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()

    def _open_writer(self) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(self._folder))
        self._write_session_start()

    def _write_session_start(self) -> None:
        """Write the event that makes TensorBoard discard later steps of older files."""
        # It discards from the step of this event on, which is the first one that is taken again.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        restarted = SessionLog(status=SessionLog.SessionStatus.START)
        self._writer.add_event(Event(wall_time=time.time(), step=self._first_step + 1, session_log=restarted))


class WeightsAndBiasesLogger:
    """A Weights & Biases run with the id of the run; it is continued after a restart."""

    def __init__(self, experiment: Experiment, run: Run) -> None:
        config = experiment.trainer.logging
        wandb = import_module("wandb")
        try:
            self._run = wandb.init(
                project=config.wandb_project or experiment.exp_name,
                name=config.wandb_exp_name or run.id,
                id=run.id,
                resume="allow",
                dir=str(run.directory),
                config=_collect_settings(experiment),
            )
        except wandb.Error as error:
            hint = "wandb login, WANDB_MODE=offline, or disable_wandb: true"
            raise PrimusError(f"Weights & Biases: {error}", hint) from None

    def log_scalars(self, step: int, scalars: Scalars) -> None:
        self._run.log(dict(scalars), step=step)

    def discard_steps_after(self, step: int) -> None:
        """Weights & Biases takes each step once: repeated steps keep the first values."""

    def close(self) -> None:
        self._run.finish()


class MLflowLogger:
    """An MLflow run with the name of the run; it is continued after a restart."""

    TAG = "primus_run"

    def __init__(self, experiment: Experiment, run: Run) -> None:
        self._mlflow = import_module("mlflow")
        try:
            self._start_run(experiment, run)
        except self._mlflow.MlflowException as error:
            raise PrimusError(f"MLflow: {error}", "check mlflow_tracking_uri, or set disable_mlflow: true") from None

    def log_scalars(self, step: int, scalars: Scalars) -> None:
        self._mlflow.log_metrics(dict(scalars), step=step, synchronous=False)

    def discard_steps_after(self, step: int) -> None:
        """MLflow keeps both values of a repeated step."""

    def close(self) -> None:
        self._mlflow.flush_async_logging()
        self._mlflow.end_run()

    def _start_run(self, experiment: Experiment, run: Run) -> None:
        mlflow, uri = self._mlflow, experiment.trainer.logging.mlflow_tracking_uri
        if uri:
            mlflow.set_tracking_uri(uri)
        name = experiment.exp_name
        mlflow.set_experiment(name)
        query = f"tags.{self.TAG} = '{run.id}'"
        existing_runs = mlflow.search_runs(experiment_names=[name], filter_string=query, output_format="list")
        if existing_runs:
            mlflow.start_run(run_id=existing_runs[0].info.run_id)
        else:
            mlflow.start_run(run_name=run.id, tags={self.TAG: run.id})
            mlflow.log_params(flatten_settings(_collect_settings(experiment)))


def _collect_settings(experiment: Experiment) -> dict[str, ConfigValue]:
    """The experiment's settings, without its variables and the server's address, which may hold secrets."""
    settings = msgspec.to_builtins(experiment)
    del settings["env"], settings["trainer"]["logging"]["mlflow_tracking_uri"]
    return redact_tree(settings)  # type: ignore[no-any-return]
