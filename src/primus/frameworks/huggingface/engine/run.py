"""One rank of a run that trains a model of Transformers: processes, session, engine."""

from __future__ import annotations

import os

from primus.config.schema import Experiment
from primus.runs.attempt import Attempt
from primus.session.ranks.engine_errors import explain_import


def train(experiment: Experiment, attempt: Attempt) -> None:
    """Train as one rank of a run until its last step or a signal.

    Raises:
        PrimusError: The training cannot begin or continue; the message says why.
    """
    with explain_import("transformers", "huggingface"):
        import transformers
    from primus.frameworks.huggingface.engine.driver import TransformersEngine
    from primus.session.loop import train_with_engine
    from primus.session.open_session import open_session
    from primus.session.ranks.torch_processes import describe_torch_engine, join_run, seed_everything

    trainer = experiment.trainer
    with join_run(attempt, trainer) as processes:
        seed_everything(trainer.training.seed, trainer.training.deterministic)
        version = str(transformers.__version__)
        info = describe_torch_engine(processes, "huggingface", "transformers", version, attempt.world_size)
        session = open_session(experiment, attempt, processes, info, os.environ)
        attempt.beat("init")
        train_with_engine(session, TransformersEngine(trainer, processes, session.masked_token))
