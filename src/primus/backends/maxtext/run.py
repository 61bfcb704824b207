"""One process of a run that MaxText trains: devices, processes, session, engine, and its errors in words."""

from __future__ import annotations

import os
from datetime import timedelta

from primus.config.schema import Experiment
from primus.errors import UnfitError
from primus.runs.attempt import Attempt
from primus.session.engine_errors import find_reason
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
    # MaxText then imports no client of Google Cloud (maxtext/common/gcloud_stub.py).
    os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")
    import_jax(trainer.training.deterministic)
    has_accelerators = prepare_devices(trainer.training.device)
    timeout = timedelta(minutes=trainer.parallel.distributed_timeout_minutes)
    with (
        explain_jax_errors(),
        join_jax_processes(attempt, timeout, trainer.training.device, has_accelerators) as processes,
    ):
        _train_with_session(experiment, attempt, processes)


def _import_maxtext() -> None:
    """Import MaxText; its own error is the reason if it cannot be imported.

    Raises:
        UnfitError: It cannot be imported.
    """
    try:
        import maxtext.trainers.pre_train.train  # noqa: F401
    except Exception as error:
        raise UnfitError(
            f"MaxText cannot be imported: {find_reason(error)}",
            "./primus-cli setup --engine maxtext installs a version that works (docs/engine-maxtext.md)",
        ) from error


def _train_with_session(experiment: Experiment, attempt: Attempt, processes: Processes) -> None:
    import jax

    _import_maxtext()
    from primus.backends.maxtext.engine import MaxTextEngine
    from primus.backends.maxtext.layout import build_config, plan_layout
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
