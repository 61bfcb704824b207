"""Convert a checkpoint into another format, and compare the weights of two."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch

from primus import registry
from primus.checkpoint import conversion
from primus.checkpoint.formats import huggingface
from primus.checkpoint.formats.huggingface import CONFIG, check_copies
from primus.checkpoint.formats.model_config import list_lost_settings, read_config_file, read_model_config
from primus.checkpoint.formats.open import (
    MODEL_FILE,
    NAME_MODEL,
    TOKENIZER_FOLDER,
    OpenedCheckpoint,
    find_checkpoint,
    open_checkpoint,
)
from primus.checkpoint.output import OutputPlan, RankGrid, split_rows
from primus.checkpoint.training_state import TrainingState
from primus.checkpoint.views import CastWeights, FiniteWeights, count_nonfinite
from primus.checkpoint.weights import TensorInfo, WeightReader
from primus.config.schema import ModelSpec
from primus.errors import UsageError
from primus.framework import CHECKPOINTS

TargetFormat = Literal["huggingface", "native", "megatron", "torchtitan"]
MegatronFormat = Literal["torch_dist", "torch"]
DtypeName = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

RECORD_VERSION = 2
"""Of what writers record about files, by which an interrupted conversion continues."""


class TargetSettings(NamedTuple):
    """What is written."""

    to: TargetFormat
    dtype: DtypeName | None = None
    """Type of floating-point weights; the source's when None."""
    format: MegatronFormat = "torch_dist"
    """For megatron."""
    layout: RankGrid = RankGrid()
    """For the format `torch`, which has a file for each rank."""
    hub_files: Mapping[str, bytes] = {}
    """Files beside the weights in the format of Hugging Face by name: tokenizer, ids of special tokens, model card.
    Other formats keep them in a folder, for a later conversion."""
    optimizer: bool = False
    """Whether the state of the optimizer is written, too, where the source has one and the format holds one."""
    nonfinite: bool = False
    """Whether NaN and infinite values are written; otherwise they are an error."""


class PlannedConversion(NamedTuple):
    """A conversion that can be written."""

    weights: WeightReader
    """In hub names, as they will be in the target."""
    plan: OutputPlan
    fingerprint: str
    training: TrainingState | None = None
    """The state of the optimizer that is written."""
    optimizer_note: str = ""
    """What is done with the state of the optimizer, in words."""
    lost: Sequence[str] = ()
    """What the source says of its model and the target does not."""


def plan_conversion(opened: OpenedCheckpoint, settings: TargetSettings) -> PlannedConversion:
    """The files of a checkpoint in another format.

    Raises:
        UsageError: The target format cannot hold this model.
    """
    if opened.has_sizes_only:
        raise UsageError(
            f"{opened.found.folder}: the checkpoint has the sizes of its tensors, not its whole model", NAME_MODEL
        )
    weights: WeightReader = opened.weights
    training, note = _open_training_state(opened, settings)
    if not settings.nonfinite:
        weights, training = _refuse_nonfinite(weights, training, str(opened.found.folder))
    if training and training.masters and settings.to != "megatron":
        weights = training.masters  # native and torchtitan update the weights that they save
    if settings.dtype is not None:
        weights = CastWeights(weights, DTYPES[settings.dtype])
    folder = _find_config_folder(opened)
    config = _read_own_config(folder, opened.spec) if folder and settings.to == "huggingface" else None
    plan = _plan_files(weights, opened, settings, training, config)

    def finish(folder: Path, records: Mapping[str, Any]) -> None:
        if settings.to != "huggingface":
            write_model(folder, opened.spec)
            huggingface.write_files(folder / TOKENIZER_FOLDER, settings.hub_files)
        plan.finish(folder, records)

    fingerprint = _compute_fingerprint(opened, settings)
    lost = list_lost_settings(folder) if folder and config is None else ()
    return PlannedConversion(weights, plan._replace(finish=finish), fingerprint, training, note, lost)


def _refuse_nonfinite(
    weights: WeightReader, training: TrainingState | None, where: str
) -> tuple[WeightReader, TrainingState | None]:
    """Readers in which a value that is not finite is an error."""

    def check(reader: WeightReader, part: str = "") -> FiniteWeights:
        return FiniteWeights(reader, where + part, "convert another checkpoint, or add --allow-nonfinite")

    if training is not None:
        training = training._replace(
            moments={moment: check(reader, f", {moment}") for moment, reader in training.moments.items()},
            masters=training.masters and check(training.masters),
        )
    return check(weights), training


def _find_config_folder(opened: OpenedCheckpoint) -> Path | None:
    """The folder with the config.json of a checkpoint, or of the model that its adapter changes, if they have one."""
    found = opened.found
    if found.format == "peft":
        from primus.checkpoint.formats.adapter import find_base

        found = find_checkpoint(find_base(found.folder))
    if found.format not in ("huggingface", "transformers"):
        return None
    folder = found.folder if found.folder.is_dir() else found.folder.parent
    return folder if (folder / CONFIG).is_file() else None


def _read_own_config(folder: Path, spec: ModelSpec) -> dict[str, Any] | None:
    """The config.json of a source, if it describes the model that is written, and no other parts of it."""
    _, values = read_config_file(folder)
    return values if "text_config" not in values and read_model_config(folder) == spec else None


def _open_training_state(opened: OpenedCheckpoint, settings: TargetSettings) -> tuple[TrainingState | None, str]:
    """The state of the optimizer that is to be written, and in words what is done with it."""
    if not settings.optimizer:
        return None, "weights only: --no-optimizer"
    if opened.found.format == "peft":
        return None, "weights only: that of an adapter does not fit the merged model"
    if settings.to == "huggingface" or opened.found.format == "huggingface":
        return None, "weights only: the format of Hugging Face has no optimizer state"
    from primus.checkpoint.formats.optimizer_state import open_training_state  # with torch.distributed.checkpoint

    training = open_training_state(opened)
    if training is None:
        return None, "weights only: the source has no optimizer state"
    if settings.format == "torch":
        raise UsageError(
            "--format torch: optimizer state can be written in torch_dist only",
            "remove --format; or add --no-optimizer to convert the weights only",
        )
    samples = training.position.consumed_samples
    where = "at the first sample, as the source does not say its samples" if samples is None else f"{samples:,} samples"
    return training, f"AdamW state of {training.num_updates:,.0f} updates, step {training.position.step:,}, {where}"


def _plan_files(
    weights: WeightReader,
    opened: OpenedCheckpoint,
    settings: TargetSettings,
    training: TrainingState | None,
    config: Mapping[str, Any] | None,
) -> OutputPlan:
    if settings.format != "torch_dist" and settings.to != "megatron":
        raise UsageError(f"--format {settings.format} is a format of Megatron", "use --to megatron, or remove --format")
    if settings.to == "huggingface":
        return huggingface.plan_output(weights, opened.spec, settings.hub_files, config)
    return registry.load_plug_in(CHECKPOINTS, settings.to).plan_output(weights, opened, settings, training)


def write_conversion(planned: PlannedConversion, target: Path, report: conversion.Report) -> int:
    """Write a conversion, or what an interrupted one has left to write; returns the number of files it had written.

    Raises:
        UsageError: The target exists.
        PrimusError: The source is damaged, or the target cannot be written.
    """
    num_threads = torch.get_num_threads()
    # Copying rows is bound by memory: threads of OpenMP would only wait for each other between two copies.
    torch.set_num_threads(1)
    try:
        return conversion.write_checkpoint(target, planned.plan, planned.fingerprint, report)
    finally:
        torch.set_num_threads(num_threads)


def write_model(folder: Path, spec: ModelSpec) -> None:
    """Write the model's file, by which the folder is read again."""
    from primus.config.source import dump_yaml

    defaults = {field.name: field.default for field in msgspec.structs.fields(ModelSpec)}
    settings = {name: value for name, value in msgspec.to_builtins(spec).items() if value != defaults[name]}
    (folder / MODEL_FILE).write_text(dump_yaml(settings), encoding="utf-8")


def _compute_fingerprint(opened: OpenedCheckpoint, settings: TargetSettings) -> str:
    """Identity of source files and settings, so that files of another conversion are not kept."""
    sources = [_describe_files(folder) for folder in (opened.found.folder, *opened.others)]
    files = {name: hashlib.blake2b(content).hexdigest() for name, content in settings.hub_files.items()}
    wanted = repr(settings._replace(hub_files={}))
    text = json.dumps([RECORD_VERSION, sources, wanted, files, msgspec.to_builtins(opened.spec)])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _describe_files(folder: Path) -> list[Any]:
    paths = sorted(folder.rglob("*")) if folder.is_dir() else [folder]
    # By size and time: to hash the content would read every weight twice. Resolved: the hub's cache has links to files
    # with the content's hash as name.
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths if path.is_file()]
    return [os.path.realpath(folder), files]


# Comparison


class TensorDifference(msgspec.Struct, frozen=True, kw_only=True):
    """How a tensor differs between two checkpoints."""

    name: str
    """In the hub."""
    kind: Literal["missing", "added", "shape", "values", "not finite"]
    max_difference: float = 0.0
    """Largest absolute difference of two elements."""
    largest: float = 0.0
    """Largest absolute value in the first checkpoint."""
    different: int = 0
    """Elements that differ, or are NaN or infinite."""
    text: str = ""
    """The shapes, where they differ."""


def compare_weights(
    first: WeightReader, second: WeightReader, report: conversion.Report = lambda _: None
) -> list[TensorDifference]:
    """Every tensor of two sources that differs, in the order of the first one; values are compared in float32.

    Raises:
        PrimusError: A source is damaged.
    """
    ours, theirs = first.list_tensors(), second.list_tensors()
    found = []
    for name, info in ours.items():
        if name not in theirs:
            found.append(TensorDifference(name=name, kind="missing"))
        elif tuple(theirs[name].shape) != tuple(info.shape):
            text = f"{list(info.shape)} and {list(theirs[name].shape)}"
            found.append(TensorDifference(name=name, kind="shape", text=text))
        else:
            found += _compare_tensor(name, info, first, second, report)
    return found + [TensorDifference(name=name, kind="added") for name in theirs if name not in ours]


def _compare_tensor(
    name: str, info: TensorInfo, first: WeightReader, second: WeightReader, report: conversion.Report
) -> list[TensorDifference]:
    different, difference, largest = 0, 0.0, 0.0
    for rows in split_rows(info):
        ours, theirs = first.read(name, rows), second.read(name, rows)
        report(ours.numel() * ours.element_size())
        if ours.dtype == theirs.dtype and torch.equal(ours, theirs):
            continue
        ours, theirs = ours.float(), theirs.float()
        unequal = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
        count = int(unequal.sum())
        if count:
            different += count
            # A NaN on one side only is an infinite difference; on both sides the elements are equal.
            difference = max(difference, float((ours - theirs)[unequal].abs().nan_to_num(float("inf")).max()))
            largest = max(largest, float(ours.abs().max()))
    if not different:
        return []
    return [TensorDifference(name=name, kind="values", max_difference=difference, largest=largest, different=different)]


def find_nonfinite(weights: WeightReader, report: conversion.Report = lambda _: None) -> list[TensorDifference]:
    """Every tensor with NaN or infinite elements; reads all of them.

    Raises:
        PrimusError: The source is damaged.
    """
    found = []
    for name, info in weights.list_tensors().items():
        count = 0
        for rows in split_rows(info):
            tensor = weights.read(name, rows)
            report(tensor.numel() * tensor.element_size())
            count += count_nonfinite(tensor)
        if count:
            found.append(TensorDifference(name=name, kind="not finite", different=count))
    return found


class AveragedWeights:
    """The mean of the weights of several checkpoints, computed in float32 when it is read.

    Raises:
        UsageError: They are not of the same model.
    """

    def __init__(self, sources: Sequence[WeightReader]) -> None:
        self._sources = sources
        self._tensors = sources[0].list_tensors()
        shapes = [{name: info.shape for name, info in source.list_tensors().items()} for source in sources]
        if any(each != shapes[0] for each in shapes):
            raise UsageError("the checkpoints are not of the same model", "average checkpoints of one run")

    def list_tensors(self):
        return self._tensors

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        # Summed in the order of the sources: float32 sums depend on it, and a resumed average must have equal bytes.
        total = self._sources[0].read(name, rows).float()
        for source in self._sources[1:]:
            total = total + source.read(name, rows).float()
        return (total / len(self._sources)).to(self._tensors[name].dtype)


def open_average(
    given: Sequence[str], spec: ModelSpec | None, trust_pickle: bool, say: Callable[[str], None]
) -> OpenedCheckpoint:
    """The mean of several checkpoints as one, whose place and step are those of the last.

    Raises:
        UsageError: They are not of the same model.
    """
    opened = [open_checkpoint(each, spec, trust_pickle) for each in given]
    for each in opened:
        say(f"averaging {each.found.folder}{f', step {each.step}' if each.step else ''}")
        check_copies(each.weights, str(each.found.folder))
    sources = [FiniteWeights(each.weights, str(each.found.folder)) for each in opened]
    others = tuple(each.found.folder for each in opened[:-1])
    return opened[-1]._replace(weights=AveragedWeights(sources), others=others)
