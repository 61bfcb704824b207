"""Cells of a comparison with the results of their runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from primus.comparison.fairness.evidence import FairnessEvidence, collect_evidence
from primus.comparison.fairness.fact_checks import SHOWN_DIGITS, check_tokens, check_weights
from primus.comparison.fairness.setting_checks import SETTING, compare_settings
from primus.comparison.folder.archive import LoadedResults
from primus.comparison.results.result import ComparisonResult

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
    variant: str
    """Settings by which it differs from other cells of these names, such as `micro_batch_size 4`; mostly empty."""
    runs: list[ComparisonResult]
    """Results with steps, in order of their repetitions."""
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
    return _label_cells([cell for key, members in _merge_failed(groups).items() for cell in _build_cells(key, members)])


def _merge_failed(groups: ResultGroups) -> ResultGroups:
    """Runs that failed before they knew their device join the cell that has one."""
    merged: ResultGroups = {}
    for key, members in groups.items():
        known = [each for each in groups if each[:4] == key[:4] and each[4]]
        merged.setdefault(known[0] if known and not key[4] else key, []).extend(members)
    return merged


def _build_cells(key: CellKey, members: Sequence[ComparisonResult]) -> list[ComparisonCell]:
    """A cell, or several if the runs have different settings: other matrices, and logs of others, share names."""
    platform, framework, model, settings_class, device, devices = key
    groups, keys = _split_by_settings([each for each in members if _has_speed(each)])
    failed = [each for each in members if not _has_speed(each)]
    return [
        ComparisonCell(
            platform=platform,
            framework=framework,
            model=model,
            settings_class=settings_class,
            device=device,
            devices=devices,
            variant=", ".join(f"{name} {_find_value(group[0][0], name)}" for name in keys),
            runs=sorted((run for _, run in group), key=lambda each: each.cell.repetition),
            failed=[] if number else failed,
        )
        for number, group in enumerate(groups or [[]])
    ]


def _find_value(evidence: FairnessEvidence, name: str) -> Any:
    inputs = {"tokens": next(iter(evidence.tokens.values()), ""), "initial weights": evidence.weights or ""}
    return inputs[name][:SHOWN_DIGITS] if name in inputs else evidence.settings.get(name)


def _split_by_settings(
    runs: Sequence[ComparisonResult],
) -> tuple[list[list[tuple[FairnessEvidence, ComparisonResult]]], list[str]]:
    """The runs with equal settings, and the first setting by which each group differs from an earlier one."""
    groups: list[list[tuple[FairnessEvidence, ComparisonResult]]] = []
    keys: dict[str, None] = {}
    for run in runs:
        evidence, found = collect_evidence(run, ""), None
        for group in groups:
            seed = evidence.settings.get("seed")
            partner = next((each for each, _ in group if each.settings.get("seed") == seed), group[0][0])
            other = _find_difference(partner, evidence)
            if other is None:
                found = group
                break
            keys[other] = None
        if found is None:
            groups.append(found := [])
        found.append((evidence, run))
    return groups, list(keys)


def _find_difference(a: FairnessEvidence, b: FairnessEvidence) -> str | None:
    """The first setting besides the seed, or input of the same seed, that makes two runs of one cell unequal."""
    checks = [*compare_settings(a, b, "identical", has_equal_rates=False)]
    if a.settings.get("seed") == b.settings.get("seed"):
        checks += [check_tokens(a, b), check_weights(a, b)]
    unfair = (check.rule.removeprefix(SETTING) for check in checks if check.judgement == "unfair")
    return next((name for name in unfair if name != "seed"), None)


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
    names = [
        f"{name} ({cell.settings_class})" if len(classes[name]) > 1 else name
        for name, cell in zip(names, cells, strict=True)
    ]
    names = _add_where_equal(names, [f" on {cell.devices or '?'} x {cell.device}" for cell in cells])
    names = _add_where_equal(names, [f", {cell.variant}" for cell in cells])
    return dict(zip(names, cells, strict=True))


def _add_where_equal(names: Sequence[str], parts: Sequence[str]) -> list[str]:
    """The names, of which equal ones have their part added, unless that is equal too."""
    same = {name: {part for other, part in zip(names, parts, strict=True) if other == name} for name in names}
    return [f"{name}{part}" if len(same[name]) > 1 else name for name, part in zip(names, parts, strict=True)]


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
