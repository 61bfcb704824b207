"""Read the state of AdamW from the folders of native, torchtitan, Transformers and Megatron (torch_dist).

    native        optimizer.exp_avg.NAME, optimizer.exp_avg_sq.NAME, optimizer.step
    torchtitan    optimizer.state.NAME.exp_avg ..., optimizer.param_groups.NAME.betas ..., train_state.step
    Transformers  optimizer.state.NAME.exp_avg ..., optimizer.param_groups.NUMBER.betas ...; hub names
    Megatron      optimizer.state.exp_avg.NAME ..., optimizer.state.param.NAME or fp32_param; common.pt has the rest

Names are those of parameters. Megatron has them with `fully_reshardable`, `fully_sharded_model_space`, or without its
distributed optimizer; the buckets of `dp_reshardable` depend on the layout of its processes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from primus.checkpoint import manifest
from primus.checkpoint.formats.dcp import DcpFolder
from primus.checkpoint.formats.inert_pickle import load_inert_values
from primus.checkpoint.formats.megatron import COMMON, MegatronLayers
from primus.checkpoint.formats.open import CheckpointFormat, FoundCheckpoint, OpenedCheckpoint
from primus.checkpoint.renaming import HubNames
from primus.checkpoint.training_state import MOMENTS, AdamSettings, SavedPosition, TrainingState
from primus.checkpoint.views import FilledWeights, PrefixedWeights
from primus.checkpoint.weights import WeightReader
from primus.config.schema import ModelSpec
from primus.errors import UsageError

BUCKET = "optimizer.distributed."
"""In names of the distributed optimizer's state where it is not saved by weight (distrib_optimizer.py)."""
STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.(?!param_groups\.).*")
NATIVE_NAME = re.compile(r"optimizer\.(?:(?P<kind>\w+)\..*|step)")
PARAMETER_NAME = re.compile(r"optimizer\.state\..*\.(?P<kind>\w+)")
MEGATRON_NAME = re.compile(r"optimizer\.state\.(?P<kind>\w+)\..*")
MASTERS = ("param", "fp32_param")
"""Names of float32 weights, of Megatron's distributed optimizer and of the one without (distrib_optimizer.py,
optimizer.py in megatron/core/optimizer)."""
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
    if found.format == "megatron_torch":
        raise UsageError(
            f"{found.folder}: the optimizer of Megatron's format `torch` is saved by number, not by name",
            f"{WEIGHTS_ONLY}; or save it with --ckpt-format torch_dist",
        )
    folder = DcpFolder(found.folder)
    _check_form(folder)
    if not any(STATE.fullmatch(name) for name in folder.list_tensors()):
        return None
    return _READERS[found.format](found, opened.spec, opened.weights)


def _check_form(folder: DcpFolder) -> None:
    """Refuse what Megatron's distributed optimizer saves otherwise than by weight: tensors, or objects of a process.

    Raises:
        UsageError: It did.
    """
    for names, form in ((folder.list_tensors(), "dp_reshardable"), (folder.values, "dp_zero_gather_scatter")):
        if any(BUCKET in name for name in names):
            raise UsageError(
                f"{folder.folder}: its optimizer is saved in buckets of its processes ({form}), not by weight",
                f"save it with --dist-ckpt-optim-fully-reshardable; or {WEIGHTS_ONLY}",
            )


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


def _read_native(found: FoundCheckpoint, spec: ModelSpec, _: WeightReader) -> TrainingState:
    folder = DcpFolder(found.folder)
    _check_names(folder, NATIVE_NAME, MOMENTS, found)
    moments = {
        moment: HubNames(PrefixedWeights(folder, f"optimizer.{moment}."), spec, "native", r"", trained_only=True)
        for moment in MOMENTS
    }
    return TrainingState(moments, float(folder.read("optimizer.step")), read_position(found))


def _read_torchtitan(found: FoundCheckpoint, spec: ModelSpec, _: WeightReader) -> TrainingState:
    folder = DcpFolder(found.folder)
    _check_names(folder, PARAMETER_NAME, (*MOMENTS, "step"), found)
    moments: dict[str, WeightReader] = {}
    for moment in MOMENTS:
        named: WeightReader = PrefixedWeights(folder, "optimizer.state.", f".{moment}")
        # Without fused projections the parameters have the names of the weights.
        is_fused = any(".wqkv." in name for name in named.list_tensors())
        has_separate = any(".qkv_linear.wq." in name for name in named.list_tensors())
        moments[moment] = HubNames(named, spec, "torchtitan", r"", trained_only=is_fused or not has_separate)
    position = read_position(found)
    if "train_state.step" in folder.values:
        position = position._replace(step=int(folder.read_value("train_state.step")))
    return TrainingState(moments, _read_updates(folder), position, _read_param_groups(folder))


def _read_transformers(found: FoundCheckpoint, spec: ModelSpec, _: WeightReader) -> TrainingState:
    folder = DcpFolder(found.folder)
    _check_names(folder, PARAMETER_NAME, (*MOMENTS, "step"), found)
    moments: dict[str, WeightReader] = {
        moment: PrefixedWeights(folder, "optimizer.state.", f".{moment}") for moment in MOMENTS
    }
    return TrainingState(moments, _read_updates(folder), read_position(found), _read_param_groups(folder))


def _read_updates(folder: DcpFolder) -> float:
    """Updates of the first parameter; all have the same number."""
    names = folder.list_tensors()
    return float(folder.read(next(name for name in names if PARAMETER_NAME.fullmatch(name) and name.endswith(".step"))))


def _read_param_groups(folder: DcpFolder) -> AdamSettings:
    """Settings of the optimizer in torch's flat form: of each parameter, or of numbered groups."""
    groups: dict[str, dict[str, Any]] = {}
    for name in folder.values:
        if name.startswith("optimizer.param_groups."):
            parameter, key = name.removeprefix("optimizer.param_groups.").rsplit(".", 1)
            if key in ("lr", "betas", "eps", "weight_decay"):
                groups.setdefault(parameter, {})[key] = folder.read_value(name)
    return _choose_settings(list(groups.values()))


def _read_megatron(found: FoundCheckpoint, spec: ModelSpec, weights: WeightReader) -> TrainingState:
    folder = DcpFolder(found.folder)
    _check_names(folder, MEGATRON_NAME, (*MOMENTS, *MASTERS), found)
    by_kind: dict[str, WeightReader] = {}
    for kind in (*MOMENTS, *MASTERS):
        layers = MegatronLayers(found.folder, f"optimizer.state.{kind}.")
        if layers.list_tensors():
            by_kind[kind] = HubNames(layers, spec, "megatron", r"", trained_only=True)
    common = load_inert_values(found.folder / COMMON)
    state = common.get("optimizer", {})
    groups = _find_param_groups(state)
    updates = _find_common_step(state) or max((float(group.get("step") or 0) for group in groups), default=0)
    masters = next((FilledWeights(by_kind[kind], weights) for kind in MASTERS if kind in by_kind), None)
    return TrainingState(
        {moment: by_kind[moment] for moment in MOMENTS},
        updates or float(common.get("iteration", 0)),
        _complete_position(read_position(found), common),
        _choose_settings(groups),
        masters,
    )


_READERS: dict[CheckpointFormat, Callable[[FoundCheckpoint, ModelSpec, WeightReader], TrainingState]] = {
    "native": _read_native,
    "torchtitan": _read_torchtitan,
    "transformers": _read_transformers,
    "megatron": _read_megatron,
}


def _check_names(folder: DcpFolder, pattern: re.Pattern[str], kinds: tuple[str, ...], found: FoundCheckpoint) -> None:
    """Every tensor of the optimizer is one of AdamW."""
    for name in folder.list_tensors():
        if not STATE.fullmatch(name):
            continue
        match = pattern.fullmatch(name)
        kind = match["kind"] if match else name
        if kind is not None and kind not in kinds:
            raise UsageError(
                f"{found.folder}: its optimizer has {kind}, which AdamW does not have: only AdamW's state is converted",
                WEIGHTS_ONLY,
            )


def _choose_settings(groups: list[dict[str, Any]]) -> AdamSettings:
    """Settings of the parameter group that decays."""
    if not groups:
        return AdamSettings()
    group = max(groups, key=lambda each: float(each.get("weight_decay") or 0))
    known = {name: group[name] for name in AdamSettings._fields if group.get(name) is not None}
    return AdamSettings(**known)


def _find_param_groups(state: Any) -> list[dict[str, Any]]:
    """The parameter groups in Megatron's state dict: nested by optimizer, or not."""
    if not isinstance(state, Mapping):
        return []
    found = [dict(group) for group in state.get("param_groups", [])]
    for value in state.values():
        found += _find_param_groups(value)
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
