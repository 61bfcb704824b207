"""One rank of a run that torchtitan trains: processes, session, engine, and its errors in words."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version

from msgspec import structs

from primus.config.schema import Experiment
from primus.errors import UsageError
from primus.frameworks.torchtitan.engine.layout import plan_layout
from primus.frameworks.torchtitan.engine.log_messages import write_engine_messages
from primus.frameworks.torchtitan.support import check_for_cpu
from primus.runs.attempt import Attempt
from primus.session.ranks.engine_errors import explain_torch_errors, find_reason

HIDDEN_GPUS = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
"""Variables by which CUDA and HIP find no device."""


def train(experiment: Experiment, attempt: Attempt) -> None:
    """Train as one rank of a run until its last step or a signal.

    Raises:
        PrimusError: The training cannot begin or continue; the message says why.
    """
    trainer = experiment.trainer
    if trainer.training.device == "cpu":
        # torchtitan takes whatever accelerator torch finds.
        os.environ.update(HIDDEN_GPUS)

    write_engine_messages()
    from primus.frameworks.torchtitan.engine.driver import TorchTitanEngine
    from primus.session.loop import train_with_engine
    from primus.session.open_session import open_session
    from primus.session.ranks.torch_processes import describe_torch_engine, join_run, join_single_process

    layout = plan_layout(trainer.training, trainer.parallel, attempt.world_size)
    with explain_torch_errors(), join_run(attempt, trainer) as processes:
        if processes.device.type == "cpu":
            check_for_cpu(trainer)
        info = describe_torch_engine(
            processes,
            "torchtitan",
            "torchtitan",
            version("torchtitan"),
            layout.data_size,
            compiles=trainer.training.compile is True,
        )
        session = open_session(experiment, attempt, processes, info, os.environ)
        # A resumed run keeps its batch, also with another number of processes.
        resumed = structs.replace(trainer.training, global_batch_size=session.global_batch_size)
        layout = plan_layout(resumed, trainer.parallel, attempt.world_size)
        with join_single_process(processes), _set_local_rank(attempt.local_rank):
            attempt.beat("init")
            folder = attempt.run.directory / "torchtitan"
            with explain_refusal():
                engine = TorchTitanEngine(
                    trainer, layout, folder=folder, device=processes.device, eod_id=session.data.eod_id
                )
            train_with_engine(session, engine)


@contextmanager
def _set_local_rank(local_rank: int) -> Iterator[None]:
    """Set the variable by which torchtitan chooses the device."""
    before: Mapping[str, str] = dict(os.environ)
    os.environ["LOCAL_RANK"] = str(local_rank)
    try:
        yield
    finally:
        if "LOCAL_RANK" not in before:
            del os.environ["LOCAL_RANK"]


@contextmanager
def explain_refusal() -> Iterator[None]:
    """Turn what torchtitan and PyTorch raise while they build the trainer into an error of the configuration."""
    try:
        yield
    except (NotImplementedError, ValueError, AssertionError) as error:
        traceback.print_exc()
        raise UsageError(
            f"torchtitan refuses the configuration: {find_reason(error)}",
            "docs/engine-torchtitan.md lists the layouts; the traceback is in the log of the rank",
        ) from error
