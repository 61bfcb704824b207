"""One process of a run that JAX trains: devices, processes, session, engine, and its errors in words."""

from __future__ import annotations

import os

from primus.config.schema import Experiment
from primus.runs.attempt import Attempt
from primus.session.ranks.jax_processes import describe_jax_engine, join_jax_run


def train(experiment: Experiment, attempt: Attempt) -> None:
    """Train as one process of a run until its last step or a signal.

    Raises:
        PrimusError: The training cannot begin or continue; the message says why.
    """
    trainer = experiment.trainer
    with join_jax_run(attempt, trainer) as processes:
        # After the processes have joined: these modules import jax.
        from primus.frameworks.jax.engine.driver import JaxEngine
        from primus.frameworks.jax.engine.sharding import plan_layout
        from primus.session.loop import train_with_engine
        from primus.session.open_session import open_session

        attempt.beat("init")
        layout = plan_layout(trainer.parallel, processes.rank, processes.world)
        info = describe_jax_engine("jax", "jax", layout.mesh.size, layout.data_size, "optax")
        session = open_session(experiment, attempt, processes, info, os.environ)
        train_with_engine(session, JaxEngine(trainer, layout, session.data.eod_id))
