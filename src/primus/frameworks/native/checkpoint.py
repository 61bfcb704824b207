"""Checkpoints of native: a folder of torch.distributed.checkpoint with `model.NAME` and `optimizer.MOMENT.NAME`."""

from __future__ import annotations

import re
from collections.abc import Collection
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

FORMATS = ("native",)
WEIGHT = "model."
"""Prefix of weights (engine/state.py)."""
STEPS = "optimizer.step"
STATE = re.compile(r"optimizer\.(?:(?P<kind>\w+)\..*|step)")
"""Names of the optimizer's tensors."""


def find_format(folder: Path, names: Collection[str]) -> str | None:
    """`native` if a folder has its embedding."""
    return "native" if f"{WEIGHT}embedding.weight" in names else None


def open_weights(found: FoundCheckpoint, spec: ModelSpec, trust_pickle: bool) -> WeightReader:
    """The weights in hub names."""
    from primus.checkpoint.formats.dcp import DcpFolder
    from primus.checkpoint.renaming import HubNames
    from primus.checkpoint.views import PrefixedWeights

    return HubNames(PrefixedWeights(DcpFolder(found.folder), WEIGHT), spec, "native", r"")


def read_training_state(found: FoundCheckpoint, spec: ModelSpec, weights: WeightReader) -> TrainingState | None:
    """The state of AdamW; None if there is none."""
    from primus.checkpoint.formats.optimizer_state import open_state_folder, read_position
    from primus.checkpoint.renaming import HubNames
    from primus.checkpoint.views import PrefixedWeights

    folder = open_state_folder(found, STATE, MOMENTS)
    if folder is None:
        return None
    moments = {
        moment: HubNames(PrefixedWeights(folder, f"optimizer.{moment}."), spec, "native", r"", trained_only=True)
        for moment in MOMENTS
    }
    return TrainingState(moments, float(folder.read(STEPS)), read_position(found))


def plan_output(
    weights: WeightReader, source: OpenedCheckpoint, settings: TargetSettings, training: TrainingState | None
) -> OutputPlan:
    """A checkpoint for `load:`; with `finetune: true` if it has no state of the optimizer.

    Raises:
        UsageError: native cannot hold this model.
    """
    return plan_checkpoint(weights, source.spec, source.step or 0, training)


def plan_checkpoint(
    weights: WeightReader, spec: ModelSpec, step: int, training: TrainingState | None = None
) -> OutputPlan:
    """A checkpoint of native for `load:`; with `finetune: true` if it has no state of the optimizer.

    Args:
        weights: In hub names.
        spec: The model.
        step: Optimizer steps that the weights were trained.
        training: The state of the optimizer.

    Raises:
        UsageError: native cannot hold this model.
    """
    import torch

    from primus.checkpoint.formats.dcp_folder import list_chunks, plan_folder
    from primus.checkpoint.formats.dcp_output import plan_files
    from primus.checkpoint.renaming import EngineNames
    from primus.checkpoint.training_state import SavedPosition
    from primus.checkpoint.weights import TensorDict

    chunks = list_chunks(EngineNames(weights, spec, "native"), WEIGHT + "{}")
    if training is not None:
        steps = TensorDict({STEPS: torch.tensor(training.num_updates)})
        moments = [
            list_chunks(EngineNames(source, spec, "native", trained_only=True), f"optimizer.{moment}.{{}}")
            for moment, source in training.moments.items()
        ]
        chunks = chain(chunks, *moments, list_chunks(steps))
    position = training.position if training else SavedPosition(step, 0)
    return plan_folder(plan_files(chunks), "native", spec, position)
