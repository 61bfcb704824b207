"""Cells of a comparison with the results of their runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct, structs

from primus.comparison.archive import LoadedResults
from primus.comparison.result import ComparisonResult

CellKey = tuple[str, str, str, str, str, int | None]
"""Platform, framework, model, class, device and number of devices."""
ResultGroups = dict[CellKey, list[ComparisonResult]]
TPRIMAT_NAME = re.compile(r"train_(?P<platform>amd|nvd|cpu)_(?P<framework>[a-z]+)_(?P<model>[a-z]+)")
TPRIMAT_MODELS = {"llama": "llama3.1_8B", "qwen": "qwen2.5_7B"}
"""Names of models in the files of tprimat: its README."""


class ComparisonCell(Struct, frozen=True, kw_only=True):
    """The results of one platform, framework, model and class of settings on devices of one kind and number."""

    platform: str
    framework: str
    model: str
    settings_class: str
    device: str
    devices: int | None
    runs: list[ComparisonResult]
    """With steps, in order of their repetitions."""
    failed: list[ComparisonResult]

    @property
    def names(self) -> tuple[str, str, str]:
        """Platform, framework and model."""
        return self.platform, self.framework, self.model


def group_cells(loaded: LoadedResults) -> dict[str, ComparisonCell]:
    """The cells by label, in the order in which their first results were found.

    A label contains what distinguishes the cells. A platform or model that all share is omitted; class and device are
    added only where the rest is ambiguous.
    """
    groups: ResultGroups = {}
    for result, file in zip(loaded.results, loaded.files, strict=True):
        named = _add_name_parts(result, file)
        cell, info = named.cell, named.gpu_info
        devices = info.device_count or named.training_config.num_gpus
        key = (cell.platform, cell.framework, cell.model, cell.settings_class, info.device_name, devices)
        members = groups.setdefault(key, [])
        if named not in members:  # a folder and its archive
            members.append(named)
    return _label_cells([_build_cell(key, members) for key, members in _merge_failed(groups).items()])


def _merge_failed(groups: ResultGroups) -> ResultGroups:
    """Runs that failed before they knew their device join the cell that has one."""
    merged: ResultGroups = {}
    for key, members in groups.items():
        known = [each for each in groups if each[:4] == key[:4] and each[4]]
        merged.setdefault(known[0] if known and not key[4] else key, []).extend(members)
    return merged


def _build_cell(key: CellKey, members: Sequence[ComparisonResult]) -> ComparisonCell:
    platform, framework, model, settings_class, device, devices = key
    return ComparisonCell(
        platform=platform,
        framework=framework,
        model=model,
        settings_class=settings_class,
        device=device,
        devices=devices,
        runs=sorted((each for each in members if _has_speed(each)), key=lambda each: each.cell.repetition),
        failed=[each for each in members if not _has_speed(each)],
    )


def _label_cells(cells: Sequence[ComparisonCell]) -> dict[str, ComparisonCell]:
    differing = [len(set(column)) > 1 for column in zip(*(cell.names for cell in cells), strict=True)]
    parts = differing if any(differing) else [True, True, True]
    names = [
        " ".join(name for name, is_part in zip(cell.names, parts, strict=True) if name and is_part)
        or " ".join(filter(None, cell.names))
        for cell in cells
    ]
    classes: dict[str, set[str]] = {}
    for name, cell in zip(names, cells, strict=True):
        classes.setdefault(name, set()).add(cell.settings_class)
    labels = [
        f"{name} ({cell.settings_class})" if len(classes[name]) > 1 else name
        for name, cell in zip(names, cells, strict=True)
    ]
    return {
        f"{label} on {cell.devices or '?'} x {cell.device}" if labels.count(label) > 1 else label: cell
        for label, cell in zip(labels, cells, strict=True)
    }


def _has_speed(result: ComparisonResult) -> bool:
    return result.state == "done" and bool(result.steps.number or result.performance_metrics.tokens_per_second_per_gpu)


def _add_name_parts(result: ComparisonResult, file: str) -> ComparisonResult:
    """Framework and model of a file of tprimat, which states them in its name only."""
    found = TPRIMAT_NAME.search(Path(file).name)
    if result.source != "tprimat" or result.cell.framework or not found or found["platform"] != result.platform:
        return result
    model = TPRIMAT_MODELS.get(found["model"], found["model"])
    cell = structs.replace(result.cell, framework=found["framework"], model=model)
    return structs.replace(result, cell=cell, notes=[*result.notes, "framework and model are those of the file's name"])
