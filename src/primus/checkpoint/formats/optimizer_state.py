"""Read the state of AdamW from checkpoints: each framework names its tensors otherwise (its `checkpoint.py`)."""

from __future__ import annotations

import re
from typing import Any

from primus.checkpoint import manifest
from primus.checkpoint.formats.dcp import DcpFolder
from primus.checkpoint.formats.open import FoundCheckpoint, OpenedCheckpoint, find_framework
from primus.checkpoint.training_state import MOMENTS, AdamSettings, SavedPosition, TrainingState
from primus.errors import UsageError

STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.(?!param_groups\.).*")
FLAT_STATE = re.compile(r"optimizer\.state\..*\.(?P<kind>\w+)")
"""In torch's flat form (torch.distributed.checkpoint.state_dict)."""
WEIGHTS_ONLY = "--no-optimizer converts the weights only"


def open_training_state(opened: OpenedCheckpoint) -> TrainingState | None:
    """The state of a checkpoint's optimizer; None if it has none.

    Raises:
        UsageError: It is of another optimizer than AdamW, or in a form that depends on the layout of its processes.
        PrimusError: It is damaged, or lacks a tensor.
    """
    found = opened.found
    if found.format == "huggingface":
        return None
    return find_framework(found.format).read_training_state(found, opened.spec, opened.weights)


def open_state_folder(found: FoundCheckpoint, pattern: re.Pattern[str], kinds: tuple[str, ...]) -> DcpFolder | None:
    """The folder with the state of the optimizer; None if there is none.

    Args:
        found: The checkpoint.
        pattern: Names of the optimizer's tensors, with the group `kind`.
        kinds: Kinds of tensors that AdamW has.

    Raises:
        UsageError: It is of another optimizer than AdamW.
    """
    folder = DcpFolder(found.folder)
    names = [name for name in folder.list_tensors() if STATE.fullmatch(name)]
    for name in names:
        match = pattern.fullmatch(name)
        kind = match["kind"] if match else name
        if kind is not None and kind not in kinds:
            raise UsageError(
                f"{found.folder}: its optimizer has {kind}, which AdamW does not have: only AdamW's state is converted",
                WEIGHTS_ONLY,
            )
    return folder if names else None


def open_flat_state(found: FoundCheckpoint) -> DcpFolder | None:
    """The folder with a state in torch's flat form; None if there is none."""
    return open_state_folder(found, FLAT_STATE, (*MOMENTS, "step"))


def read_position(found: FoundCheckpoint) -> SavedPosition:
    """The position of the run that saved a checkpoint."""
    saved = manifest.read_manifest(found.folder)
    if saved is None:
        return SavedPosition(found.step or 0)
    return SavedPosition(
        step=saved.step,
        consumed_samples=saved.consumed_samples,
        run=saved.run,
        data_fingerprint=saved.data_fingerprint,
        recent_losses=tuple(saved.recent_losses),
        callbacks=saved.callbacks,
    )


def read_updates(folder: DcpFolder) -> float:
    """Updates of the first parameter; all have the same number."""
    names = folder.list_tensors()
    return float(folder.read(next(name for name in names if FLAT_STATE.fullmatch(name) and name.endswith(".step"))))


def read_param_groups(folder: DcpFolder) -> AdamSettings:
    """Settings of the optimizer in torch's flat form: of each parameter, or of numbered groups."""
    groups: dict[str, dict[str, Any]] = {}
    for name in folder.values:
        if name.startswith("optimizer.param_groups."):
            parameter, key = name.removeprefix("optimizer.param_groups.").rsplit(".", 1)
            if key in ("lr", "betas", "eps", "weight_decay"):
                groups.setdefault(parameter, {})[key] = folder.read_value(name)
    return choose_settings(list(groups.values()))


def choose_settings(groups: list[dict[str, Any]]) -> AdamSettings:
    """Settings of the parameter group that decays."""
    if not groups:
        return AdamSettings()
    group = max(groups, key=lambda each: float(each.get("weight_decay") or 0))
    known = {name: group[name] for name in AdamSettings._fields if group.get(name) is not None}
    return AdamSettings(**known)
