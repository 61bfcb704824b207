"""The data of a run: opened, compared with that of a replayed run, and described in the run folder."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from primus.config.schedule import find_evaluation_interval
from primus.config.schema import Trainer
from primus.config.token_files import WITHOUT_VALIDATION_DATA
from primus.data.open_samples import open_samples
from primus.data.training.dataset import Datasets
from primus.errors import UnfitError, UsageError
from primus.runs.attempt import Attempt
from primus.runs.files import write_text
from primus.runs.store import Run

DATA_FILE = "config/data_config.yaml"
REPLAYED_DATA_FILE = "config/replayed_data_config.yaml"


OrderSamples = Callable[[Datasets, int], Datasets]
"""Gives the samples of an experiment in the order of an engine's own loader, for a size of the global batch."""


def open_data(
    trainer: Trainer, attempt: Attempt, global_batch_size: int, order_samples: OrderSamples | None = None
) -> Datasets:
    """Open the run's data, and describe it in the run folder."""
    training = trainer.training
    data = open_samples(trainer)
    if order_samples is not None:
        data = order_samples(data, global_batch_size)
    if find_evaluation_interval(training) and data.valid is None:
        raise UsageError(
            f"eval_interval is {training.eval_interval}, but validation data is missing: {data.no_valid}",
            WITHOUT_VALIDATION_DATA,
        )
    _check_replayed(attempt.run, data.fingerprint)
    if attempt.rank == 0:
        _describe_data(attempt.run, trainer, data, training.train_iters * global_batch_size)
    return data


def _check_replayed(run: Run, fingerprint: str) -> None:
    """Check that a replay has the data of the run that it repeats."""
    import yaml

    path = run.directory / REPLAYED_DATA_FILE
    if not path.is_file():
        return
    then = yaml.safe_load(path.read_text(encoding="utf-8")).get("fingerprint")
    if then != fingerprint:
        raise UnfitError(
            f"the data differs from that of the replayed run: {fingerprint} instead of {then}",
            "restore the data, or train with --config",
        )


def _describe_data(run: Run, trainer: Trainer, data: Datasets, num_samples: int) -> None:
    """Record the data of the run, and the share of each corpus that it consumes."""
    import yaml

    described = {
        **msgspec.to_builtins(trainer.data),
        "fingerprint": data.fingerprint,
        "seq_length": trainer.training.seq_length,
        "samples_per_epoch": data.train.samples_per_epoch,
        "corpora": [
            {"prefix": str(part.prefix), "samples": part.samples, "epochs": round(part.epochs, 6)}
            for part in data.train.compute_progress(num_samples)
        ],
    }
    write_text(run.directory / DATA_FILE, yaml.safe_dump(described, sort_keys=False, allow_unicode=True))
