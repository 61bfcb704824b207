"""What reading a configuration needs to know of the keys of the schema besides their types."""

from functools import cache
from typing import Any, get_args

from msgspec import structs

from primus.config.schema import GROUPS


def _is_switch(kind: Any) -> bool:
    return kind is bool or any(option is bool for option in get_args(kind))


@cache
def list_switch_keys() -> frozenset[str]:
    """Keys whose type admits true and false."""
    groups = GROUPS.values()
    return frozenset(field.name for struct in groups for field in structs.fields(struct) if _is_switch(field.type))


@cache
def list_text_keys() -> frozenset[str]:
    """Keys whose type admits any text."""
    fields = [field for struct in GROUPS.values() for field in structs.fields(struct)]
    return frozenset(field.name for field in fields if str in (field.type, *get_args(field.type)))


def needs_value(field: structs.FieldInfo) -> bool:
    """Whether null is refused for a key, because its default would silently enable something."""
    return field.default is True or field.name in ("train_iters", "micro_batch_size", "seq_length", "lr")


ZERO_IS_NONE = frozenset(
    {
        "eval_interval",
        "save_interval",
        "keep_last_n",
        "num_experts",
        "moe_shared_expert_intermediate_size",
        "q_lora_rank",
    }
)
"""Keys of which 0 says the same as null, as in Megatron-LM (intervals), torchtitan (keep_latest_k, q_lora_rank)."""
ALTERNATIVES: tuple[tuple[str, ...], ...] = (
    ("min_lr", "min_lr_ratio"),
    ("lr_warmup_iters", "lr_warmup_fraction"),
    ("dataset", "train_data_path", "mock_data"),
)
"""Keys that say one thing in different ways: one that is set replaces the others of what it overrides."""
