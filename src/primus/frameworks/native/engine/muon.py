"""Muon over sharded weights: each matrix is gathered once to an owner, computed there, and its parts are sent back.

A matrix is one as Hugging Face has it: queries, keys and values apart, gate and up apart, each expert for itself. So
the result does not depend on how they are packed or divided.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import prod, sqrt
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from primus.config.schema import ModelSpec
from primus.frameworks.native.engine.layout import ALONE, Axis
from primus.frameworks.native.engine.placement import EXPERT_STACKS, PlacedWeight, find_division
from primus.frameworks.native.training_settings import TrainingSettings

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the Newton-Schulz iteration (github.com/KellerJordan/Muon; torch.optim.Muon has the same)."""
EPSILON = 1e-7
"""Added to the norm of a matrix before it is divided by it."""


class Region(NamedTuple):
    """A rectangle of a weight."""

    name: str
    begins: tuple[int, ...]
    sizes: tuple[int, ...]

    def intersect(self, begins: Sequence[int], sizes: Sequence[int]) -> Region | None:
        """What it shares with another rectangle of the same weight."""
        low = tuple(map(max, self.begins, begins))
        high = tuple(min(b + s, c + t) for b, s, c, t in zip(self.begins, self.sizes, begins, sizes, strict=True))
        sizes = tuple(end - begin for begin, end in zip(low, high, strict=True))
        return Region(self.name, low, sizes) if min(sizes) > 0 else None

    def cut(self, tensor: Tensor, begins: Sequence[int]) -> Tensor:
        """This rectangle of `tensor`, which begins at `begins`."""
        spans = zip(self.begins, begins, self.sizes, strict=True)
        return tensor[tuple(slice(own - first, own - first + size) for own, first, size in spans)]


class Round(NamedTuple):
    """Matrices that are computed at the same time, one by each process."""

    matrices: list[Region]
    """By owner."""
    held: list[list[list[Region]]]
    """By process and owner, the parts of its matrix that the process has."""
    sent: list[list[list[Region]]]
    """The same without those that an earlier process has as well."""


class Muon(torch.optim.Optimizer):
    """Muon for matrices, and another optimizer for the rest (kellerjordan.github.io/posts/muon, arXiv 2502.16982).

    Like a fused optimizer it divides gradients by `grad_scale`, and changes nothing if `found_inf` is 1.

    Args:
        matrices: The weights by name, of all layers of this process.
        spec: The model.
        rest: Updates all other weights; its state and its groups are a part of this one's.
        settings: Momentum, scale and iterations.
        dtype: In which a matrix is computed; that of the weight when None.
        stage: The processes with the same layers.
        lr, weight_decay: See `OptimizerConfig`.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self,
        matrices: Mapping[str, PlacedWeight],
        spec: ModelSpec,
        rest: torch.optim.Optimizer,
        settings: TrainingSettings,
        *,
        dtype: torch.dtype | None,
        stage: Axis = ALONE.stage,
        lr: float,
        weight_decay: float,
    ) -> None:
        group = {"params": [weight.tensor for weight in matrices.values()], "lr": lr, "weight_decay": weight_decay}
        super().__init__([group, *rest.param_groups], {})
        # One state for both, so that a checkpoint need not know which weight belongs to which optimizer.
        self.state = rest.state
        self._matrices, self._rest, self._settings = matrices, rest, settings
        self._dtype, self._stage = dtype, stage
        self._rounds = list(_plan_rounds(matrices, spec, stage))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for name in ("grad_scale", "found_inf"):
            setattr(self._rest, name, getattr(self, name))
        self._rest.step()
        inputs = {name: self._add_momentum(weight) for name, weight in self._matrices.items()}
        group = self.param_groups[0]
        rate = group["lr"] if self.found_inf is None else group["lr"] * (1 - self.found_inf.double())
        for each in self._rounds:
            updates = self._exchange_updates(each, inputs)
            for region, update in updates:
                for piece in self._matrices[region.name].list_pieces():
                    part = region.intersect(piece.offsets, piece.local.shape)
                    if part is not None:
                        weight = part.cut(piece.local, piece.offsets)
                        weight.mul_(1 - rate * group["weight_decay"]).sub_(update.view(weight.shape) * rate)

    def _add_momentum(self, weight: PlacedWeight) -> Tensor:
        """The local part of a gradient with momentum, in the dtype of the weight."""
        momentum = weight.place(self.state[weight.tensor]["momentum_buffer"]).local
        assert weight.tensor.grad is not None, "every matrix has a gradient"
        gradient = weight.place(weight.tensor.grad).local
        if self.grad_scale is not None:
            gradient = gradient / self.grad_scale
        added = momentum * self._settings.muon_momentum + gradient
        if self.found_inf is not None:
            added = torch.where(self.found_inf > 0, momentum, added)
            gradient = torch.where(self.found_inf > 0, 0.0, gradient)
        momentum.copy_(added)
        return gradient + self._settings.muon_momentum * added if self._settings.muon_use_nesterov else added

    def _exchange_updates(self, turn: Round, inputs: Mapping[str, Tensor]) -> Iterator[tuple[Region, Tensor]]:
        """The parts of the updates of a round that belong to this process."""
        rank, world = self._stage.rank, self._stage.size
        whole, sources = None, [turn.sent[each][rank] if rank < len(turn.matrices) else [] for each in range(world)]
        parts = [self._cut_parts(region, inputs) for regions in turn.sent[rank] for region in regions]
        received = self._exchange(parts, turn.sent[rank], sources, next(iter(inputs.values())))
        if rank < len(turn.matrices):
            matrix = turn.matrices[rank]
            whole = received.new_empty(matrix.sizes)
            for region, part in zip(chain(*sources), _split(received, sources), strict=True):
                region.cut(whole, matrix.begins).copy_(part.view(region.sizes))
            whole = self._compute_update(whole)
        wanted = [turn.held[each][rank] if whole is not None else [] for each in range(world)]
        parts = [
            region.cut(whole, turn.matrices[rank].begins).flatten()
            for regions in wanted
            for region in regions
            if whole is not None
        ]
        returned = self._exchange(parts, wanted, turn.held[rank], received)
        return zip(chain(*turn.held[rank]), _split(returned, turn.held[rank]), strict=True)

    def _cut_parts(self, region: Region, inputs: Mapping[str, Tensor]) -> Tensor:
        weight = self._matrices[region.name]
        for piece in weight.place(inputs[region.name]).list_pieces():
            if region.intersect(piece.offsets, piece.local.shape) == region:
                return region.cut(piece.local, piece.offsets).flatten()
        raise AssertionError(f"{region} is in a piece of this process")

    def _exchange(
        self, parts: list[Tensor], sent: list[list[Region]], received: list[list[Region]], like: Tensor
    ) -> Tensor:
        """`parts` joined, of which those in `sent[i]` go to process i, for those in `received[i]` of process i."""
        joined = torch.cat(parts) if parts else like.new_empty(0)
        if self._stage.group is None:
            return joined
        incoming, outgoing = ([sum(prod(each.sizes) for each in few) for few in way] for way in (received, sent))
        found = like.new_empty(sum(incoming))
        dist.all_to_all_single(found, joined, incoming, outgoing, group=self._stage.group)
        return found

    def _compute_update(self, whole: Tensor) -> Tensor:
        rows, columns = whole.shape[-2:]
        factor = {
            "spectral": max(rows, columns),
            "unit_rms_norm": rows / columns,
            "shape_scaling": max(1.0, rows / columns),
        }[self._settings.muon_scale_mode]
        matrix = whole.view(rows, columns).to(self._dtype or whole.dtype)
        update = orthogonalize(matrix, self._settings.muon_num_ns_steps).to(whole.dtype).view(whole.shape)
        return update * (sqrt(factor) * self._settings.muon_extra_scale_factor)


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Nearly the nearest matrix whose singular values are 1, by Newton-Schulz iterations."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if is_tall else matrix
    x = x / (x.norm() + EPSILON)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


def _split(joined: Tensor, regions: list[list[Region]]) -> tuple[Tensor, ...]:
    return joined.split([prod(each.sizes) for few in regions for each in few])


def _plan_rounds(matrices: Mapping[str, PlacedWeight], spec: ModelSpec, stage: Axis) -> Iterator[Round]:
    """Who computes which matrix, and who has which part of it; every process of a stage makes the same plan."""
    regions = [each for name, weight in matrices.items() for each in _list_matrices(name, weight.shape, spec)]
    # Matrices of about the same size in one round, since its processes wait for each other.
    regions.sort(key=lambda region: (-prod(region.sizes), region))
    own = [
        [part for piece in matrices[each.name].list_pieces() if (part := each.intersect(*_describe(piece)))]
        for each in regions
    ]
    by_process = [own]
    if stage.group is not None:
        by_process = [[] for _ in range(stage.size)]
        dist.all_gather_object(by_process, own, group=stage.group)
    for start in range(0, len(regions), stage.size):
        chosen = range(start, min(start + stage.size, len(regions)))
        nothing: list[list[Region]] = [[] for _ in range(stage.size - len(chosen))]
        held = [[parts[number] for number in chosen] + nothing for parts in by_process]
        seen: set[Region] = set()
        sent = []
        for parts in held:
            sent.append([[each for each in few if each not in seen] for few in parts])
            seen.update(chain(*parts))
        yield Round([regions[number] for number in chosen], held, sent)


def _describe(piece: Any) -> tuple[Sequence[int], Sequence[int]]:
    return piece.offsets, piece.local.shape


def _list_matrices(name: str, shape: Sequence[int], spec: ModelSpec) -> Iterator[Region]:
    rows = shape[-2]
    if name.endswith(EXPERT_STACKS):
        halves = 2 if name.endswith("gate_up") else 1
        for expert in range(shape[0]):
            for half in range(halves):
                yield Region(name, (expert, half * rows // halves, 0), (1, rows // halves, shape[2]))
        return
    division = find_division(name, spec, ALONE)
    begin = 0
    for size in division.blocks if division.dim == 0 and division.blocks else (rows,):
        yield Region(name, (begin, 0), (size, shape[1]))
        begin += size
