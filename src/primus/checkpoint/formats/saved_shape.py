"""The sizes that a checkpoint says of its model, to name the settings in which an experiment differs from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from primus.checkpoint.formats.open import FoundCheckpoint, find_checkpoint, find_spec, read_spec
from primus.checkpoint.shape import Shape, build_shape, check_same_shape, list_differences
from primus.config.schema import ModelSpec
from primus.errors import UsageError

WITHOUT_WEIGHTS = (
    *("rotary_base", "rotary_percent", "rope_type", "rotary_scaling_factor"),
    *("norm_epsilon", "ffn_activation", "window_size", "moe_router_topk"),
)
"""Fields of a ModelSpec that change what a model computes, and no weight's shape."""

ATTENTION_ARGUMENTS = ("num_query_groups", "kv_channels")
"""Without effect with latent attention."""
ARGUMENTS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", *ATTENTION_ARGUMENTS),
    *("untie_embeddings_and_output_weights", "add_qkv_bias", "qk_layernorm", "num_experts"),
)
"""Arguments of Megatron-LM that have the name of a model's field, and are set for every model. The vocabulary is
padded for the layout; the shape of the embedding shows whether it fits."""


def check_saved_shape(found: FoundCheckpoint, spec: ModelSpec) -> None:
    """Compare the sizes that a checkpoint says of its model with those of an experiment.

    Raises:
        UsageError: They differ; names every setting.
    """
    saved = _read_saved_shape(found)
    if saved:
        check_same_shape(saved, build_shape(spec), str(found.folder))


def list_other_settings(given: str, spec: ModelSpec) -> list[str]:
    """Settings without a weight in which the model of a checkpoint differs from that of an experiment, in words.

    They are allowed: a longer context needs another rotary embedding. By mistake the model computes something else.
    """
    found = find_checkpoint(given)
    saved = find_spec(found)
    if saved is None:
        return []
    own = {field: getattr(spec, field) for field in WITHOUT_WEIGHTS}
    return list_differences({field: getattr(saved, field) for field in WITHOUT_WEIGHTS}, own)


def _read_saved_shape(found: FoundCheckpoint) -> Shape | None:
    """None where the checkpoint does not say them; the shapes of its tensors are checked anyway."""
    if found.format in ("megatron", "megatron_torch"):
        shape = _read_arguments(found.folder)
        if shape is not None:
            return shape
    try:
        return build_shape(read_spec(found))
    except UsageError:
        return None


def _read_arguments(folder: Path) -> Shape | None:
    """Of the arguments that Megatron-LM saves with its weights (megatron/training/checkpointing.py)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from primus.checkpoint.formats.inert_pickle import load_inert_values

    file = next((path for path in (folder / "common.pt", *folder.glob("mp_rank_00*/*.pt")) if path.is_file()), None)
    if file is None:
        return None
    with FakeTensorMode():
        args: dict[str, Any] = vars(load_inert_values(file).get("args", _NoArguments()))
    unused = [*ATTENTION_ARGUMENTS] if args.get("multi_latent_attention") else []
    unused += ["ffn_hidden_size"] if args.get("num_experts") else []
    names = [name for name in ARGUMENTS if name not in unused]
    shape: Shape = {name: args[name] for name in names if args.get(name) is not None}
    if "num_query_groups" in shape and not args.get("group_query_attention"):
        shape["num_query_groups"] = args["num_attention_heads"]
    return shape or None


class _NoArguments:
    """A checkpoint without arguments."""
