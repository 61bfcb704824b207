"""Weights under other names: hub names as those of an engine, and back. Only what is read is converted."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import reduce
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from primus.checkpoint.family import (
    NameRule,
    TensorPart,
    list_hub_shapes,
    list_parameter_rules,
    list_rules,
    list_trained_shapes,
)
from primus.checkpoint.row_orders import HeadSizes, RowRun, find_runs, index_rows
from primus.checkpoint.weights import TensorInfo, WeightReader, get_bounds
from primus.config.schema import ModelSpec
from primus.errors import PrimusError
from primus.models import counts

KEEPING = ("keep", "keep_padded")
"""Values of `rows` in `families/` for rows in the same order; padding has no place in the hub."""

SHORTEST_RUN = 8
"""Average number of rows that follow each other from which on they are copied together instead of one by one."""


class TensorPlace(NamedTuple):
    """Where the rows of one part of a tensor come from: a rule, and in hub direction which of its hub parts."""

    rule: NameRule
    position: int


class EngineNames:
    """Weights in hub names, read by the names of an engine.

    Args:
        weights: The source, in hub names.
        spec: The model.
        engine: An engine of `families/`.
        trained_only: By the names of its parameters, which an optimizer has, instead of those in its files.

    Raises:
        UsageError: The engine has no names for such a model.
        PrimusError: The source lacks a tensor, or has one of another shape.
    """

    def __init__(self, weights: WeightReader, spec: ModelSpec, engine: str, trained_only: bool = False) -> None:
        shapes, rules = _list_names(spec, engine, trained_only)
        self._source = PartReader(weights, shapes, "this model")
        self._sizes = HeadSizes(counts.head_dim(spec), counts.num_query_groups(spec))
        self._rules = _group_parts((rule.engine, TensorPlace(rule, 0)) for rule in rules)
        self._tensors = {
            name: TensorInfo(shape, self._choose_dtype(self._rules[name]))
            for name, shape in compute_engine_shapes(rules, shapes).items()
        }

    def list_tensors(self) -> dict[str, TensorInfo]:
        return self._tensors

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        info = self._tensors[name]
        return read_parts(self._rules[name], info.shape, rows, self._read_part).to(info.dtype)

    def _choose_dtype(self, parts: PartPlaces) -> torch.dtype:
        """A type that holds the values of all hub parts, which may differ in a file of several types."""
        hub = self._source.tensors
        dtypes = {hub[part.name].dtype for _, place in parts.values() for part in place.rule.hub}
        return reduce(torch.promote_types, dtypes)

    def _read_part(self, place: TensorPlace, rows: slice | None) -> Tensor:
        rule = place.rule
        sizes = tuple(self._source.count_rows(part) for part in rule.hub)
        start, stop = get_bounds(rows, sum(sizes))
        if rule.rows == "zeros":
            return torch.zeros(stop - start)
        if rule.rows in KEEPING:
            return self._source.read(rule.hub[0], slice(start, stop))
        index = index_rows(rule.rows, sizes, self._sizes).engine
        parts_R, rows_R = index.parts_R[start:stop], index.rows_R[start:stop]
        runs = find_runs(parts_R, rows_R)
        if runs and len(runs) * SHORTEST_RUN <= stop - start:
            return self._join_runs(rule, runs)
        found = [
            (parts_R == number, self._source.read_rows(part, rows_R[parts_R == number]))
            for number, part in enumerate(rule.hub)
        ]
        return _assemble_rows([(mask, block) for mask, block in found if len(block)] or found[:1], stop - start)

    def _join_runs(self, rule: NameRule, runs: list[RowRun]) -> Tensor:
        """Runs of the hub parts one after the other; a single one is not copied."""
        firsts, blocks = {}, {}
        for number in {run.part for run in runs}:
            own = [run for run in runs if run.part == number]
            firsts[number] = min(run.first for run in own)
            end = max(run.first + run.num_rows for run in own)
            blocks[number] = self._source.read(rule.hub[number], slice(firsts[number], end))
        found = [blocks[run.part].narrow(0, run.first - firsts[run.part], run.num_rows) for run in runs]
        return found[0] if len(found) == 1 else torch.cat(found)

    def list_borders(self, name: str) -> list[int]:
        """Rows of a tensor at which those of another hub tensor begin: rows between two of them are read uncopied."""
        parts = self._rules[name]
        if None not in parts:
            return []
        part, (rule, _) = parts[None]
        if rule.rows != "concatenate" or part.transposed:
            return []
        return list(accumulate(self._source.count_rows(part) for part in rule.hub))[:-1]


class HubNames:
    """Weights in the names of an engine, read by hub names.

    Args:
        weights: The source, in the names of `engine`.
        spec: The model.
        engine: An engine of `families/`.
        others: Pattern of names that are no weights; None accepts any further tensors.
        trained_only: The source has the names of parameters, those of an optimizer.

    Raises:
        UsageError: The engine has no names for such a model.
        PrimusError: The source lacks a tensor, has one of another shape, or one that is not part of the model.
    """

    def __init__(
        self,
        weights: WeightReader,
        spec: ModelSpec,
        engine: str,
        others: str | None = None,
        trained_only: bool = False,
    ) -> None:
        self._shapes, rules = _list_names(spec, engine, trained_only)
        self._sizes = HeadSizes(counts.head_dim(spec), counts.num_query_groups(spec))
        engine_shapes = compute_engine_shapes(rules, self._shapes)
        primary = _choose_primary_rules(rules, weights.list_tensors().keys())
        needed = {rule.engine.name: engine_shapes[rule.engine.name] for rule in primary}
        if others is not None:
            _check_surplus(weights.list_tensors().keys() - engine_shapes.keys(), others, f"this model of {engine}")
        padded = {rule.engine.name for rule in primary if rule.rows == "keep_padded"}
        self._source = PartReader(weights, needed, f"this model of {engine}", padded)
        self._rules = _group_parts(
            (part, TensorPlace(rule, position)) for rule in primary for position, part in enumerate(rule.hub)
        )

    def list_tensors(self) -> dict[str, TensorInfo]:
        engine = self._source.tensors
        return {
            name: TensorInfo(shape, engine[next(iter(self._rules[name].values()))[1].rule.engine.name].dtype)
            for name, shape in self._shapes.items()
        }

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        return read_parts(self._rules[name], self._shapes[name], rows, self._read_part)

    def _read_part(self, place: TensorPlace, rows: slice | None) -> Tensor:
        rule = place.rule
        if rule.rows in KEEPING:
            start, stop = get_bounds(rows, _count_rows(rule.hub[0], self._shapes[rule.hub[0].name]))
            return self._source.read(rule.engine, slice(start, stop))
        sizes = tuple(_count_rows(part, self._shapes[part.name]) for part in rule.hub)
        wanted_R = index_rows(rule.rows, sizes, self._sizes).hub[place.position]
        return self._source.read_rows(rule.engine, wanted_R if rows is None else wanted_R[rows])


PartPlaces = dict[int | None, tuple[TensorPart, TensorPlace]]
"""The parts of one tensor: by expert for a stack, else one by None."""


class PartReader:
    """Parts of the tensors of a source, whose names and shapes are checked.

    Args:
        weights: The source.
        shapes: Tensors that it must have.
        owner: What has these tensors, for messages.
        padded: Those that may have more rows.
    """

    def __init__(
        self,
        weights: WeightReader,
        shapes: Mapping[str, tuple[int, ...]],
        owner: str,
        padded: Collection[str] = (),
    ) -> None:
        self._weights = weights
        self.tensors = weights.list_tensors()
        missing = sorted(shapes.keys() - self.tensors.keys())
        if missing:
            more = f" and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
            raise PrimusError(f"the weights lack {missing[0]}{more}", f"{owner} has {len(shapes)} tensors")
        for name, shape in shapes.items():
            found = tuple(self.tensors[name].shape)
            if name in padded and found[0] > shape[0]:
                found = (shape[0], *found[1:])
            if found != shape:
                raise PrimusError(f"{name} has shape {list(found)}, and {list(shape)} in {owner}")

    def count_rows(self, part: TensorPart) -> int:
        return _count_rows(part, tuple(self.tensors[part.name].shape))

    def read(self, part: TensorPart, rows: slice | None) -> Tensor:
        """A part, or some of its rows."""
        if part.expert is None and not part.transposed:
            return self._weights.read(part.name, rows)
        if part.expert is None:
            tensor = self._weights.read(part.name)
        else:
            tensor = self._weights.read(part.name, slice(part.expert, part.expert + 1))[0]
        tensor = tensor.T if part.transposed else tensor
        return tensor if rows is None else tensor[rows]

    def read_rows(self, part: TensorPart, rows_R: Tensor) -> Tensor:
        """Rows in any order; reads the range that they span."""
        if not len(rows_R):
            return self.read(part, slice(0, 0))
        start, stop = int(rows_R.min()), int(rows_R.max()) + 1
        block = self.read(part, slice(start, stop))
        if len(rows_R) == stop - start and _is_ascending(rows_R):
            return block
        return block.index_select(0, rows_R - start)


def _list_names(spec: ModelSpec, engine: str, trained_only: bool) -> tuple[dict[str, tuple[int, ...]], list[NameRule]]:
    if trained_only:
        return list_trained_shapes(spec), list_parameter_rules(spec, engine)
    return list_hub_shapes(spec), list_rules(spec, engine)


def compute_engine_shapes(
    rules: list[NameRule], hub_shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of an engine."""
    shapes: dict[str, tuple[int, ...]] = {}
    stacked: dict[str, int] = {}
    for rule in rules:
        rows = sum(_count_rows(part, hub_shapes[part.name]) for part in rule.hub)
        columns = _get_part_shape(rule.hub[0], hub_shapes[rule.hub[0].name])[1:]
        shape = (rows,) if rule.rows == "zeros" else (rows, *columns)
        shapes[rule.engine.name] = shape[::-1] if rule.engine.transposed else shape
        if rule.engine.expert is not None:
            stacked[rule.engine.name] = stacked.get(rule.engine.name, 0) + 1
    return {name: (stacked[name], *shape) if name in stacked else shape for name, shape in shapes.items()}


def read_parts(parts: PartPlaces, shape: tuple[int, ...], rows: slice | None, read_part) -> Tensor:
    """A tensor, or rows of it, from its parts; the rows of a stack are experts."""
    if None in parts:
        part, place = parts[None]
        if not part.transposed:
            return read_part(place, rows)
        whole = read_part(place, None).T
        return whole if rows is None else whole[rows]
    start, stop = get_bounds(rows, shape[0])
    blocks = []
    for expert in range(start, stop) or [0]:
        part, place = parts[expert]
        block = read_part(place, None)
        blocks.append(block.T if part.transposed else block)
    return (blocks[0].unsqueeze(0) if len(blocks) == 1 else torch.stack(blocks))[: stop - start]


def _assemble_rows(blocks: list[tuple[Tensor, Tensor]], num_rows: int) -> Tensor:
    """Rows from several tensors, each at the places of its mask."""
    if len(blocks) == 1:
        return blocks[0][1]
    first = blocks[0][1]
    dtype = reduce(torch.promote_types, (block.dtype for _, block in blocks))
    result = first.new_empty(num_rows, *first.shape[1:], dtype=dtype)
    for mask_R, block in blocks:
        result[mask_R.nonzero().flatten()] = block.to(dtype)
    return result


def _choose_primary_rules(rules: list[NameRule], available: Collection[str]) -> list[NameRule]:
    """One rule for each hub part; where an engine has several names for it, the first that is available."""
    chosen: dict[TensorPart, NameRule] = {}
    for rule in rules:
        if rule.rows == "zeros":
            continue
        for part in rule.hub:
            if part not in chosen or (chosen[part].engine.name not in available and rule.engine.name in available):
                chosen[part] = rule
    return list(dict.fromkeys(chosen.values()))


def _check_surplus(names: Collection[str], others: str, owner: str) -> None:
    surplus = sorted(name for name in names if not re.fullmatch(others, name))
    if surplus:
        more = f" and {len(surplus) - 1} more tensors" if len(surplus) > 1 else ""
        raise PrimusError(f"{surplus[0]}{more} are not part of {owner}", "check that it is a checkpoint of this model")


def _group_parts(places) -> dict[str, PartPlaces]:
    grouped: dict[str, PartPlaces] = {}
    for part, place in places:
        grouped.setdefault(part.name, {})[part.expert] = (part, place)
    return grouped


def _get_part_shape(part: TensorPart, shape: tuple[int, ...]) -> tuple[int, ...]:
    inner = shape if part.expert is None else shape[1:]
    return inner[::-1] if part.transposed else inner


def _count_rows(part: TensorPart, shape: tuple[int, ...]) -> int:
    return _get_part_shape(part, shape)[0]


def _is_ascending(rows_R: Tensor) -> bool:
    return bool((rows_R[1:] - rows_R[:-1] == 1).all())
