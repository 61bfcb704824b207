"""Open the samples of an experiment: of token files, or of instruction data."""

from __future__ import annotations

from primus.config.schema import Trainer
from primus.data.instruction.policy_settings import learns_from_rewards, read_policy_settings
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
    if learns_from_rewards(trainer.backend_args):
        from primus.data.instruction.prompts import Schedule, open_prompt_datasets  # for `train rl` only

        settings = read_policy_settings(trainer.backend_args)
        assert training.global_batch_size, "the framework has checked it"
        schedule = Schedule(training.global_batch_size, settings.num_generations, settings.updates_per_rollout)
        return open_prompt_datasets(
            trainer.data, vocab_size, training.seq_length, training.seed, settings.max_new_tokens, schedule
        )
    if trainer.data.sft_data_path:
        from primus.data.instruction.dataset import open_instruction_datasets  # for fine-tuning only

        are_pairs = learns_preferences(trainer.backend_args)
        return open_instruction_datasets(
            trainer.data, vocab_size, training.seq_length, training.seed, are_pairs=are_pairs, refuses=refuses
        )
    return open_datasets(trainer.data, vocab_size, training.seq_length, training.seed)
