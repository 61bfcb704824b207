"""One rank of a run that trains a model of Transformers: processes, session, engine."""

from __future__ import annotations

import os
from datetime import timedelta

from primus.config.schema import Experiment
from primus.errors import UnfitError
from primus.runs.attempt import Attempt


def train(experiment: Experiment, attempt: Attempt) -> None:
    """Train as one rank of a run until its last step or a signal.

    Raises:
        PrimusError: The training cannot begin or continue; the message says why.
    """
    transformers_version = _import_transformers()
    from primus.backends.huggingface.engine import TransformersEngine
    from primus.session.loop import train_with_engine
    from primus.session.open_session import open_session
    from primus.session.torch_processes import describe_torch_engine, join_processes, seed_everything

    trainer = experiment.trainer
    timeout = timedelta(minutes=trainer.parallel.distributed_timeout_minutes)
    place = (attempt.rank, attempt.local_rank, attempt.world_size)
    with join_processes(*place, timeout, os.environ, trainer.training.device) as processes:
        seed_everything(trainer.training.seed, trainer.training.deterministic)
        info = describe_torch_engine(processes, "huggingface", "transformers", transformers_version, attempt.world_size)
        session = open_session(experiment, attempt, processes, info, os.environ)
        attempt.beat("init")
        train_with_engine(session, TransformersEngine(trainer, processes, session.masked_token))


def _import_transformers() -> str:
    """Import transformers, and return its version; its own error is the reason if it cannot be imported."""
    try:
        import transformers
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnfitError(
            f"transformers cannot be imported: {reason}",
            "./primus-cli setup --engine huggingface installs it; ./primus-cli engines shows what is installed",
        ) from error
    return str(transformers.__version__)
