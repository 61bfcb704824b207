"""Checkpoints of Megatron: `torch_dist`, and the older `torch` with a file for each rank.

The optimizer of `torch_dist` is `optimizer.state.exp_avg.NAME` ..., `optimizer.state.param.NAME` or fp32_param;
common.pt has the rest. Its tensors have names with `fully_reshardable`, `fully_sharded_model_space`, or without the
distributed optimizer; the buckets of `dp_reshardable` depend on the layout of its processes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primus.checkpoint.shape import Shape
from primus.checkpoint.training_state import MOMENTS, SavedPosition, TrainingState
from primus.checkpoint.weights import WeightReader
from primus.config.schema import ModelSpec
from primus.errors import UsageError

if TYPE_CHECKING:
    from primus.checkpoint.convert import TargetSettings
    from primus.checkpoint.formats.dcp import DcpFolder
    from primus.checkpoint.formats.open import FoundCheckpoint, OpenedCheckpoint
    from primus.checkpoint.output import OutputPlan

RANKS = "megatron_torch"
FORMATS = ("megatron", RANKS)
"""torch_dist, and the older format of a file for each rank."""
IGNORED = r".*_extra_state.*|(optimizer|chained_\d+|rng_state|rerun_state_machine_state)\b.*"
"""Tensors that are not weights."""
BUCKET = "optimizer.distributed."
"""In names of the distributed optimizer's state where it is not saved by weight (distrib_optimizer.py)."""
STATE = re.compile(r"optimizer\.state\.(?P<kind>\w+)\..*")
MASTERS = ("param", "fp32_param")
"""Names of float32 weights, of Megatron's distributed optimizer and of the one without (distrib_optimizer.py,
optimizer.py in megatron/core/optimizer)."""
ATTENTION_ARGUMENTS = ("num_query_groups", "kv_channels")
"""Without effect with latent attention."""
ARGUMENTS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", *ATTENTION_ARGUMENTS),
    *("untie_embeddings_and_output_weights", "add_qkv_bias", "qk_layernorm", "num_experts"),
)
"""Arguments of Megatron-LM that have the name of a model's field, and are set for every model. The vocabulary is
padded for the layout; the shape of the embedding shows whether it fits."""


def find_format(folder: Path, names: Collection[str]) -> str | None:
    """`megatron` if a folder has its embedding, `megatron_torch` if it has files of ranks."""
    if names:
        return "megatron" if "embedding.word_embeddings.weight" in names else None
    return RANKS if any(folder.glob("mp_rank_00*/*.pt")) else None


def open_weights(found: FoundCheckpoint, spec: ModelSpec, trust_pickle: bool) -> WeightReader:
    """The weights in hub names."""
    from primus.checkpoint.renaming import HubNames

    weights: WeightReader
    if found.format == RANKS:
        from primus.frameworks.megatron.torch_ranks import MegatronRanks

        weights = MegatronRanks(found.folder, spec, trust_pickle)
    else:
        from primus.frameworks.megatron.torch_dist import MegatronLayers

        weights = MegatronLayers(found.folder)
    return HubNames(weights, spec, "megatron", IGNORED)


def read_shape(found: FoundCheckpoint) -> Shape | None:
    """By the arguments that Megatron-LM saves with its weights (megatron/training/checkpointing.py)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from primus.checkpoint.formats.inert_pickle import load_inert_values
    from primus.frameworks.megatron.torch_dist import COMMON

    file = next(
        (path for path in (found.folder / COMMON, *found.folder.glob("mp_rank_00*/*.pt")) if path.is_file()), None
    )
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


def read_training_state(found: FoundCheckpoint, spec: ModelSpec, weights: WeightReader) -> TrainingState | None:
    """The state of AdamW; None if there is none.

    Raises:
        UsageError: It is saved by number, or in a form that depends on the layout of its processes.
    """
    from primus.checkpoint.formats.dcp import DcpFolder
    from primus.checkpoint.formats.inert_pickle import load_inert_values
    from primus.checkpoint.formats.optimizer_state import (
        WEIGHTS_ONLY,
        choose_settings,
        open_state_folder,
        read_position,
    )
    from primus.checkpoint.renaming import HubNames
    from primus.checkpoint.views import FilledWeights
    from primus.frameworks.megatron.torch_dist import COMMON, MegatronLayers

    if found.format == RANKS:
        raise UsageError(
            f"{found.folder}: the optimizer of Megatron's format `torch` is saved by number, not by name",
            f"{WEIGHTS_ONLY}; or save it with --ckpt-format torch_dist",
        )
    _check_form(DcpFolder(found.folder), WEIGHTS_ONLY)
    if open_state_folder(found, STATE, (*MOMENTS, *MASTERS)) is None:
        return None
    by_kind: dict[str, WeightReader] = {}
    for kind in (*MOMENTS, *MASTERS):
        layers = MegatronLayers(found.folder, f"optimizer.state.{kind}.")
        if layers.list_tensors():
            by_kind[kind] = HubNames(layers, spec, "megatron", r"", trained_only=True)
    common = load_inert_values(found.folder / COMMON)
    state = common.get("optimizer", {})
    groups = find_param_groups(state)
    updates = _find_common_step(state) or max((float(group.get("step") or 0) for group in groups), default=0)
    masters = next((FilledWeights(by_kind[kind], weights) for kind in MASTERS if kind in by_kind), None)
    return TrainingState(
        {moment: by_kind[moment] for moment in MOMENTS},
        updates or float(common.get("iteration", 0)),
        _complete_position(read_position(found), common),
        choose_settings(groups),
        masters,
    )


def _check_form(folder: DcpFolder, remedy: str) -> None:
    """Refuse what Megatron's distributed optimizer saves otherwise than by weight: tensors, or objects of a process.

    Raises:
        UsageError: It did.
    """
    for names, form in ((folder.list_tensors(), "dp_reshardable"), (folder.values, "dp_zero_gather_scatter")):
        if any(BUCKET in name for name in names):
            raise UsageError(
                f"{folder.folder}: its optimizer is saved in buckets of its processes ({form}), not by weight",
                f"save it with --dist-ckpt-optim-fully-reshardable; or {remedy}",
            )


def find_param_groups(state: Any) -> list[dict[str, Any]]:
    """The parameter groups in Megatron's state dict: nested by optimizer, or not."""
    if not isinstance(state, Mapping):
        return []
    found = [dict(group) for group in state.get("param_groups", [])]
    for value in state.values():
        found += find_param_groups(value)
    return found


def _find_common_step(state: Any) -> float:
    if not isinstance(state, Mapping):
        return 0.0
    if "common_step" in state:
        return float(state["common_step"])
    return max((_find_common_step(value) for value in state.values()), default=0.0)


def _complete_position(position: SavedPosition, common: Mapping[str, Any]) -> SavedPosition:
    """With what Megatron-LM's common.pt says (megatron/training/checkpointing.py, generate_state_dict)."""
    samples = position.consumed_samples
    if samples is None:
        samples = getattr(common.get("args"), "consumed_train_samples", None)
    return position._replace(step=int(common.get("iteration") or position.step), consumed_samples=samples)


def plan_output(
    weights: WeightReader, source: OpenedCheckpoint, settings: TargetSettings, training: TrainingState | None
) -> OutputPlan:
    """A folder in `torch_dist`, or in the format `torch` for the layout of the settings.

    Raises:
        UsageError: Megatron has no names for this model.
    """
    if settings.format == "torch":
        from primus.frameworks.megatron.torch_ranks import plan_ranks

        return plan_ranks(weights, source.spec, source.step, settings.layout)
    from primus.frameworks.megatron.torch_dist import plan_torch_dist

    return plan_torch_dist(weights, source.spec, source.step, training)
