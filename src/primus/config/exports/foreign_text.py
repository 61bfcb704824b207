"""What a writer makes of an experiment: a file of another framework, and each setting that it cannot hold."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from msgspec import Struct, field, structs

from primus.config.convert import DEFAULT
from primus.config.load import Resolved
from primus.config.schema import GROUPS, OWNERS, ModelSpec


class LostSetting(Struct, frozen=True):
    """A setting that the other framework does not have."""

    key: str
    value: Any
    reason: str
    """What the other framework does instead."""


class ForeignText(Struct):
    """A file of another framework."""

    text: str
    lost: list[LostSetting] = field(default_factory=list)


OWN_KEYS = frozenset(
    """
    hf_name data_path device compile loss_chunk_size callbacks allow_other_data auto_continue_train disable_last_saving
    sample_tokens sample_prompt disable_mlflow mlflow_tracking_uri max_nonfinite_steps nonfinite_policy
    loss_spike_policy loss_spike_factor loss_spike_window max_rewinds optimizer keep_last_n wandb_exp_name
    disable_wandb disable_tensorboard wandb_project create_attention_mask_in_dataloader async_save
    init dataloader schedule fim_rate fim_spm_rate fim_prefix_token fim_middle_token fim_suffix_token tokenizer_type
    max_failed_saves
    """.split()
)
"""Keys of this package's own machinery, which no file of another framework needs."""


def list_lost(resolved: Resolved, written: Collection[str], reasons: dict[str, str]) -> list[LostSetting]:
    """Settings with an effect that were not written: those that differ from their defaults.

    Args:
        resolved: The experiment.
        written: Keys that the file holds.
        reasons: What the other framework does about some keys.
    """
    trainer = resolved.experiment.trainer
    lost = []
    for key, group in OWNERS.items():
        if key in written or (key in OWN_KEYS and key not in reasons):
            continue
        value = getattr(getattr(trainer, group), key)
        default = next(each.default for each in structs.fields(GROUPS[group]) if each.name == key)
        was_set = resolved.origins.get(key, DEFAULT) != DEFAULT
        if value != default and was_set and value not in (None, False):
            lost.append(LostSetting(key, value, reasons.get(key, "no setting of this framework")))
    lost += [
        LostSetting(f"backend_args.{key}", value, "a setting of another backend")
        for key, value in trainer.backend_args.items()
        if f"backend_args.{key}" not in written
    ]
    return lost


def find_head_width(model: ModelSpec) -> int:
    """Width of one attention head."""
    return model.kv_channels or model.hidden_size // model.num_attention_heads


def comment_lost(lost: list[LostSetting]) -> list[str]:
    """A comment line for each setting that is lost."""
    if not lost:
        return []
    lines = [f"#   {each.key}: {each.value}: {each.reason}" for each in lost]
    return ["#", "# Settings that this file cannot hold:", *(line.replace("\n", " ") for line in lines)]


def is_number(word: str | float) -> bool:
    """Whether a part of a blend is a weight, not a prefix."""
    try:
        float(word)
    except ValueError:
        return False
    return True
