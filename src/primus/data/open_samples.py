"""Open the samples of an experiment: of token files, or of instruction data."""

from __future__ import annotations

from primus.config.schema import Trainer
from primus.data.instruction.preference_settings import learns_preferences
from primus.data.training.dataset import Datasets, open_datasets


def open_samples(trainer: Trainer, *, refuses: bool = True) -> Datasets:
    """The samples for training, validation and test.

    Args:
        trainer: Names the data.
        refuses: Whether instruction data is refused in which the check of what counts finds a problem.

    Raises:
        UsageError: The settings contradict each other, or a file is missing or damaged.
    """
    training, vocab_size = trainer.training, trainer.model.vocab_size
    if trainer.data.sft_data_path:
        from primus.data.instruction.dataset import open_instruction_datasets  # for fine-tuning only

        are_pairs = learns_preferences(trainer.backend_args)
        return open_instruction_datasets(
            trainer.data, vocab_size, training.seq_length, training.seed, are_pairs=are_pairs, refuses=refuses
        )
    return open_datasets(trainer.data, vocab_size, training.seq_length, training.seed)
