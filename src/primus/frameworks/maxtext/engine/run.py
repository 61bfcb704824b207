"""One process of a run that MaxText trains: devices, processes, session, engine, and its errors in words."""

from __future__ import annotations

import os

from primus.config.schema import Experiment
from primus.runs.attempt import Attempt
from primus.session.ranks.engine_errors import explain_import
from primus.session.ranks.jax_processes import describe_jax_engine, join_jax_run
from primus.session.ranks.processes import Processes


def train(experiment: Experiment, attempt: Attempt) -> None:
    """Train as one process of a run until its last step or a signal.

    Raises:
        PrimusError: The training cannot begin or continue; the message says why.
    """
    trainer = experiment.trainer
    # MaxText then imports no client of Google Cloud (maxtext/common/gcloud_stub.py).
    os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")
    with join_jax_run(attempt, trainer) as processes:
        _train_with_session(experiment, attempt, processes)


def _train_with_session(experiment: Experiment, attempt: Attempt, processes: Processes) -> None:
    import jax

    with explain_import("MaxText", "maxtext"):
        import maxtext.trainers.pre_train.train  # noqa: F401
    from primus.frameworks.maxtext.engine.driver import MaxTextEngine
    from primus.frameworks.maxtext.engine.layout import build_config, plan_layout
    from primus.session.loop import train_with_engine
    from primus.session.open_session import open_session

    trainer = experiment.trainer
    attempt.beat("init")
    folder = attempt.run.directory / "maxtext"
    on_cpu = jax.default_backend() == "cpu"
    layout = plan_layout(trainer, folder, on_cpu)
    info = describe_jax_engine("maxtext", "maxtext", layout.mesh.size, layout.data_size, "jax")
    session = open_session(experiment, attempt, processes, info, os.environ)
    config = build_config(trainer, folder, on_cpu, layout, session.global_batch_size)
    train_with_engine(session, MaxTextEngine(trainer, config, layout, session.data.eod_id))
