"""One rank of a run that native trains: processes, session, the decision to compile, engine."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import torch

from primus.callback import CONVENTION
from primus.config.checks import data_parallel_size
from primus.config.schema import Experiment
from primus.frameworks.native.engine import compilation
from primus.frameworks.native.engine.compilation import CompileDecision
from primus.frameworks.native.engine.driver import NativeEngine
from primus.frameworks.native.engine.memory_need import explain_shortage
from primus.models.counts import flops_per_token
from primus.runs.attempt import Attempt
from primus.session.loop import train_with_engine
from primus.session.open_session import open_session
from primus.session.ranks.engine_errors import explain_torch_errors
from primus.session.ranks.torch_processes import TorchProcesses, describe_torch_engine, join_run
from primus.session.session import Session

FLOAT64_VARIABLE = "PRIMUS_NATIVE_FLOAT64"
"""Variable that makes native train one process in float64 if it is 1: the reference by which engines are judged."""


def train(experiment: Experiment, attempt: Attempt) -> None:
    """Train as one rank of a run until its last step or a signal, from its newest checkpoint on.

    Raises:
        PrimusError: The training cannot begin or continue; the message says why.
    """
    # Inside of the process group: the set-up already communicates, for example to agree on the checkpoint.
    trainer = experiment.trainer
    with (
        explain_torch_errors(),
        join_run(attempt, trainer) as processes,
        explain_torch_errors(
            partial(explain_shortage, trainer=trainer, world=processes.world, device=processes.device)
        ),
    ):
        data_size = data_parallel_size(trainer.parallel, processes.world)
        info = describe_torch_engine(processes, "native", "torch", str(torch.__version__), data_size)
        session = open_session(experiment, attempt, processes, info, os.environ)
        # After the search: a resumed run is compiled if the checkpoint's was, since rounding differs.
        decision = _decide_compile(session, processes)
        session = replace(session, compiled=decision.compiled, compile_reason=decision.reason)
        dtype = torch.float64 if session.environ.get(FLOAT64_VARIABLE) == "1" else torch.float32
        train_with_engine(session, NativeEngine(session, processes, dtype))


def _decide_compile(session: Session, processes: TorchProcesses) -> CompileDecision:
    trainer, start = session.trainer, session.start
    training = trainer.training
    tokens = training.train_iters * session.global_batch_size * training.seq_length
    return compilation.decide_compilation(
        training.compile,
        before=start.manifest.compiled if start and not start.weights_only else None,
        flops_per_device=tokens * flops_per_token(trainer.model, training.seq_length, CONVENTION) / processes.world,
        device_type=processes.device.type,
        threads=torch.get_num_threads(),
        environ=session.environ,
    )
