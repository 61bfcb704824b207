"""One process of a run that JAX trains: devices, processes, session, engine, and its errors in words."""

from __future__ import annotations

import os
from datetime import timedelta

from primus.config.schema import Experiment
from primus.runs.attempt import Attempt
from primus.session.jax_processes import (
    describe_jax_engine,
    explain_jax_errors,
    import_jax,
    join_jax_processes,
    prepare_devices,
)
from primus.session.processes import Processes


def train(experiment: Experiment, attempt: Attempt) -> None:
    """Train as one process of a run until its last step or a signal.

    Raises:
        PrimusError: The training cannot begin or continue; the message says why.
    """
    trainer = experiment.trainer
    import_jax(trainer.training.deterministic)
    has_accelerators = prepare_devices(trainer.training.device)
    timeout = timedelta(minutes=trainer.parallel.distributed_timeout_minutes)
    with (
        explain_jax_errors(),
        join_jax_processes(attempt, timeout, trainer.training.device, has_accelerators) as processes,
    ):
        _train_with_session(experiment, attempt, processes)


def _train_with_session(experiment: Experiment, attempt: Attempt, processes: Processes) -> None:
    from primus.backends.jax.engine import JaxEngine
    from primus.backends.jax.sharding import plan_layout
    from primus.session.loop import train_with_engine
    from primus.session.open_session import open_session

    trainer = experiment.trainer
    attempt.beat("init")
    layout = plan_layout(trainer.parallel, processes.rank, processes.world)
    info = describe_jax_engine("jax", "jax", layout.mesh.size, layout.data_size, "optax")
    session = open_session(experiment, attempt, processes, info, os.environ)
    train_with_engine(session, JaxEngine(trainer, layout, session.data.eod_id))
