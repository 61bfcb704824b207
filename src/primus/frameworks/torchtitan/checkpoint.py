"""Checkpoints of torchtitan: a folder of torch.distributed.checkpoint with its names of weights.

The state of the optimizer is `optimizer.state.NAME.exp_avg`, `optimizer.param_groups.NAME.betas` and the like.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from primus.checkpoint.training_state import MOMENTS, TrainingState
from primus.checkpoint.weights import WeightReader
from primus.config.schema import ModelSpec

if TYPE_CHECKING:
    from primus.checkpoint.convert import TargetSettings
    from primus.checkpoint.formats.open import FoundCheckpoint, OpenedCheckpoint
    from primus.checkpoint.output import OutputPlan

FORMATS = ("torchtitan",)
IGNORED = r"(optimizer|lr_scheduler|dataloader|train_state|random)\..*"
"""Tensors that are not weights."""
STATE = "optimizer.state."
"""Prefix of the optimizer's tensors."""


def find_format(folder: Path, names: Collection[str]) -> str | None:
    """`torchtitan` if a folder has its embedding."""
    return "torchtitan" if "tok_embeddings.weight" in names else None


def open_weights(found: FoundCheckpoint, spec: ModelSpec, trust_pickle: bool) -> WeightReader:
    """The weights in hub names."""
    from primus.checkpoint.formats.dcp import DcpFolder
    from primus.checkpoint.renaming import HubNames

    return HubNames(DcpFolder(found.folder), spec, "torchtitan", IGNORED)


def read_training_state(found: FoundCheckpoint, spec: ModelSpec, weights: WeightReader) -> TrainingState | None:
    """The state of AdamW; None if there is none."""
    from primus.checkpoint.formats.optimizer_state import (
        open_flat_state,
        read_param_groups,
        read_position,
        read_updates,
    )
    from primus.checkpoint.renaming import HubNames
    from primus.checkpoint.views import PrefixedWeights

    folder = open_flat_state(found)
    if folder is None:
        return None
    moments: dict[str, WeightReader] = {}
    for moment in MOMENTS:
        named: WeightReader = PrefixedWeights(folder, STATE, f".{moment}")
        # Without fused projections the parameters have the names of the weights.
        is_fused = any(".wqkv." in name for name in named.list_tensors())
        has_separate = any(".qkv_linear.wq." in name for name in named.list_tensors())
        moments[moment] = HubNames(named, spec, "torchtitan", r"", trained_only=is_fused or not has_separate)
    position = read_position(found)
    if "train_state.step" in folder.values:
        position = position._replace(step=int(folder.read_value("train_state.step")))
    return TrainingState(moments, read_updates(folder), position, read_param_groups(folder))


def plan_output(
    weights: WeightReader, source: OpenedCheckpoint, settings: TargetSettings, training: TrainingState | None
) -> OutputPlan:
    """A DCP folder for torchtitan's `checkpoint.initial_load_path`.

    Raises:
        UsageError: torchtitan has no names for this model.
    """
    import torch

    from primus.checkpoint.formats.dcp_folder import list_chunks, plan_folder
    from primus.checkpoint.formats.dcp_output import plan_files
    from primus.checkpoint.renaming import EngineNames
    from primus.checkpoint.weights import TensorDict

    spec = source.spec
    if training is None:
        return plan_folder(plan_files(list_chunks(EngineNames(weights, spec, "torchtitan"))))
    moments = {
        moment: EngineNames(source, spec, "torchtitan", trained_only=True)
        for moment, source in training.moments.items()
    }
    parameters = moments["exp_avg"].list_tensors()
    steps = TensorDict({f"{name}.step": torch.tensor(training.num_updates) for name in parameters})
    chunks = chain(
        list_chunks(EngineNames(weights, spec, "torchtitan")),
        list_chunks(steps, STATE + "{}"),
        *(list_chunks(named, f"{STATE}{{}}.{moment}") for moment, named in moments.items()),
    )
    values = _list_titan_values({name: len(info.shape) for name, info in parameters.items()}, training)
    return plan_folder(plan_files(chunks, values=values), "torchtitan", spec, training.position)


def _list_titan_values(num_axes: Mapping[str, int], training: TrainingState) -> dict[str, object]:
    """What torchtitan saves besides tensors (torchtitan/components/optimizer/utils.py, get_flat_optim_state_dict)."""
    settings, step = training.settings, training.position.step
    values: dict[str, object] = {
        "train_state.step": step,
        "train_state.ntokens_seen": 0,
        "lr_scheduler.last_epoch": step,
    }
    for name, axes in num_axes.items():
        group = {
            "lr": settings.lr,
            "betas": settings.betas,
            "eps": settings.eps,
            "weight_decay": settings.weight_decay if axes > 1 else 0.0,
            "decoupled_weight_decay": True,
            "fused": True,
            "foreach": False,
            "amsgrad": False,
            "maximize": False,
            "capturable": False,
            "differentiable": False,
            "initial_lr": settings.lr,
        }
        values |= {f"optimizer.param_groups.{name}.{key}": value for key, value in group.items()}
    return values
