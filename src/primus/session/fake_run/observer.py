"""Memory, exchanges and operations of a step, observed below the engine that executes it.

The observer is a mode of torch's dispatcher: it sees each operator with its tensors, whoever calls it. It works above
`FakeTensorMode`, whose tensors have sizes and no memory, as well as on real tensors.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from primus.prediction.rank_record import Exchange, MemoryMoment, MemoryParts, PassMark, Phase, Work

aten = torch.ops.aten
OPERATIONS = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "reduce_": "reduce",
    "send": "send",
    "recv_": "receive",
    "recv_any_source_": "receive",
}
"""Names of collectives by those of torch's operators, in the namespaces c10d and _c10d_functional."""
BUFFERED = ("all_gather", "reduce_scatter", "receive")
"""Collectives into a buffer that exists for them."""
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: (2, 4),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (5, 7),
}
"""Products of attention that torch's own table lacks: how many, and which argument says that it is causal."""
GROUPED_PRODUCT = aten._grouped_mm
"""torch's own product of several experts, which its table lacks, too."""
GROUPED = ("grouped_product", "grouped_outer_product")
"""Names of native's products of several experts."""
NUM_MOMENTS = 160
"""Moments of a timeline: about as many as a page of 400 to 1200 pixels shows."""

Counts = dict[tuple[Any, ...], tuple[int, int, int]]


class _Allocation:
    """A block of memory and what it is for, which may be known later only."""

    __slots__ = ("label", "reference", "size")

    def __init__(self, size: int, label: str) -> None:
        self.size, self.label = size, label
        self.reference: Any = None


class _Mark(NamedTuple):
    """From an operator on, which phase and micro batch it is."""

    operator: int
    phase: Phase
    micro_batch: int


class StepObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Observes what runs within it.

    Args:
        group_names: What the ranks of a process group share, by the group's name.
        devices_per_node: Consecutive ranks on each node.
        is_fake: Whether values do not exist: 1, or True, is then what the host reads from the device.
    """

    def __init__(self, group_names: Mapping[str, str], devices_per_node: int, *, is_fake: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._devices, self._is_fake = group_names, devices_per_node, is_fake
        self._live: dict[int, _Allocation] = {}
        self._log: list[tuple[_Allocation, int, int]] = []
        """(block, change of its size in bytes, operators before)."""
        self._marks: list[_Mark] = [_Mark(0, "setup", 0)]
        self._passes: list[PassMark] = []
        self._last_end = 0
        """Operators before what follows the passes."""
        self._num_operators = 0
        self._phase: Phase = "setup"
        self._micro_batch = 0
        self._end = 0
        """Entries of the log before what a checkpoint takes."""
        self._in_flight = 0
        self.most_in_flight = 0
        """Most micro batches (or groups of layers of one) whose backward pass was still to come."""
        self._counts: Counts = {}
        self._counts_before: list[Counts] = []
        """Before the forward pass of each micro batch."""
        self._resize: Callable[..., Any] | None = None
        self._propagate: Callable[..., Any] | None = None
        self._is_paused = False
        self._groups: dict[str, tuple[str, int, int, int]] = {}
        self._mutable: dict[Any, bool] = {}

    def __enter__(self) -> StepObserver:
        self._resize = torch.UntypedStorage.resize_
        # FSDP2 frees and allocates gathered weights there, below the dispatcher.
        torch.UntypedStorage.resize_ = self._build_resize(self._resize)  # type: ignore[method-assign]
        # DTensor finds the shapes of results by fake tensors of whole weights, which a run has not.
        self._propagate = ShardingPropagator._propagate_tensor_meta_non_cached
        ShardingPropagator._propagate_tensor_meta_non_cached = self._build_pause(self._propagate)  # type: ignore[method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        ShardingPropagator._propagate_tensor_meta_non_cached = self._propagate  # type: ignore[method-assign,assignment]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign,assignment]

    def name_groups(self, names: Mapping[str, str]) -> None:
        """What the ranks of groups share, where it is known only after some of them were used."""
        self._names = names
        self._groups.clear()

    def begin(self, phase: Phase) -> None:
        """All until the next phase is of this one."""
        if phase == "save":
            self._end = len(self._log)
        if phase == "clip":
            self._last_end = self._num_operators
        self._phase = phase

    def begin_micro_batch(self) -> None:
        """A forward pass begins."""
        self._phase = "forward"
        self._passes.append(PassMark(operator=self._num_operators, phase="forward"))
        self._micro_batch += 1
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        self._counts_before.append(dict(self._counts))

    def begin_backward(self) -> None:
        """The backward pass of a micro batch begins."""
        self._phase = "backward"
        self._passes.append(PassMark(operator=self._num_operators, phase="backward"))
        self._in_flight -= 1

    def label(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Say what the memory of `tensors` is for: a field of `MemoryParts`."""
        for tensor in tensors:
            found = self._live.get(tensor.untyped_storage()._cdata)
            if found is not None:
                found.label = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_fake and func is aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor then calls operators on its parts, which are observed
        result = func(*args, **(kwargs or {}))
        if not self._is_paused:
            self._observe(func, args, kwargs or {}, result)
        return result

    def _observe(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        phase = self._find_phase()
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count_exchange(func, args, result, phase)
            self._track(result)
            return
        changes = self._track(result)
        if func not in self._mutable:
            self._mutable[func] = func._schema.is_mutable
        # Views compute nothing, and empty tensors are only memory.
        if not (changes or self._mutable[func]) or func.overloadpacket.__name__.startswith(("empty", "new_empty")):
            return
        self._num_operators += 1
        kind, flops = _count_flops(func, args, kwargs, result)
        moved = _count_bytes((args, kwargs, result))
        self._add(("work", kind, phase), flops, moved)

    def _find_phase(self) -> Phase:
        phase, last = self._phase, self._marks[-1]
        if (phase, self._micro_batch) != last[1:]:
            self._marks.append(_Mark(self._num_operators, phase, self._micro_batch))
        return phase

    def _add(self, key: tuple[Any, ...], second: int, third: int) -> None:
        count, flops, moved = self._counts.get(key, (0, 0, 0))
        self._counts[key] = (count + 1, flops + second, moved + third)

    def _track(self, result: Any) -> bool:
        """Whether `result` has memory that was not there before."""
        is_new = False
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._live:
                    self._begin_allocation(storage, "activations")
                    is_new = True
        return is_new

    def _begin_allocation(self, storage: torch.UntypedStorage, label: str) -> _Allocation:
        key, allocation = storage._cdata, _Allocation(storage.nbytes(), label)
        self._live[key] = allocation
        allocation.reference = weakref.ref(storage, partial(self._end_allocation, key))
        self._log.append((allocation, allocation.size, self._num_operators))
        return allocation

    def _end_allocation(self, key: int, _: Any) -> None:
        allocation = self._live.pop(key, None)
        if allocation is not None and allocation.size:
            self._log.append((allocation, -allocation.size, self._num_operators))

    def _build_resize(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        def resize_and_note(storage: torch.UntypedStorage, size: int) -> Any:
            self._find_phase()
            found = self._live.get(storage._cdata) or self._begin_allocation(storage, "gathered")
            answer = resize(storage, size)
            found.label = "gathered"
            self._log.append((found, size - found.size, self._num_operators))
            found.size = size
            return answer

        return resize_and_note

    def _build_pause(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call_unobserved(*args: Any, **kwargs: Any) -> Any:
            self._is_paused = True
            try:
                return function(*args, **kwargs)
            finally:
                self._is_paused = False

        return call_unobserved

    def _count_exchange(self, func: Any, args: Any, result: Any, phase: Phase) -> None:
        operation = OPERATIONS.get(func.overloadpacket.__name__)
        if operation is None:
            return
        sizes = [_count_bytes(each) for each in (*args, result)]
        if operation in BUFFERED:
            tensors = [each for each in tree_iter(args) if isinstance(each, Tensor)]
            self.label(
                "communication", [each for each in tensors if self._get_label(each) in ("activations", "communication")]
            )
        group = _find_group(args)
        if group is None:
            return
        self._add(("exchange", operation, phase, *self._describe_group(group)), 0, max(sizes))

    def _get_label(self, tensor: Tensor) -> str:
        found = self._live.get(tensor.untyped_storage()._cdata)
        return found.label if found else ""

    def _describe_group(self, group: dist.ProcessGroup) -> tuple[str, int, int, int]:
        """What it shares, its size, the number of its nodes, and of its ranks on the node of this rank."""
        name = group.group_name
        if name not in self._groups:
            ranks = dist.get_process_group_ranks(group)
            own = dist.get_rank() // self._devices
            nodes = [rank // self._devices for rank in ranks]
            self._groups[name] = (self._names.get(name, "other"), len(ranks), len(set(nodes)), nodes.count(own))
        return self._groups[name]

    # -- results

    def list_exchanges(self, missing: int = 0, window: int = 1, groups: int = 1) -> tuple[Exchange, ...]:
        """Those of a step.

        Args:
            missing: Micro batches of the step that were not executed; each adds what those of the window did.
            window: Number of the last micro batches that are alike.
            groups: Forward passes of each micro batch.
        """
        return tuple(
            Exchange(
                operation=key[1],
                phase=key[2],
                group=key[3],
                size=key[4],
                num_nodes=key[5],
                ranks_per_node=key[6],
                count=count,
                total_bytes=moved,
            )
            for key, (count, _, moved) in self._extend_counts(missing, window, groups).items()
            if key[0] == "exchange" and key[2] != "setup"
        )

    def list_work(self, missing: int = 0, window: int = 1, groups: int = 1) -> tuple[Work, ...]:
        """As `list_exchanges`."""
        return tuple(
            Work(kind=key[1], phase=key[2], count=count, flops=flops, moved_bytes=moved)
            for key, (count, flops, moved) in self._extend_counts(missing, window, groups).items()
            if key[0] == "work" and key[2] != "setup"
        )

    def _extend_counts(self, missing: int, window: int, groups: int) -> Counts:
        size = window * groups
        if not missing or len(self._counts_before) <= size:
            return self._counts
        before, after = self._counts_before[-1 - size], self._counts_before[-1]
        extended = dict(self._counts)
        for key, values in after.items():
            was, now = before.get(key, (0, 0, 0)), self._counts[key]
            count, flops, moved = (n + missing * (a - b) // window for n, a, b in zip(now, values, was, strict=True))
            extended[key] = (count, flops, moved)
        return extended

    def list_passes(self) -> tuple[PassMark, ...]:
        """See `RankRecord`."""
        return (*self._passes, PassMark(operator=self._last_end, phase="clip"))

    def find_moments(self) -> tuple[MemoryMoment, tuple[MemoryMoment, ...], MemoryParts]:
        """The peak, the timeline, and what is kept between steps."""
        totals: list[int] = []
        total = 0
        kept = max(self._end - 1, 0)
        for _, change, _ in self._log:
            total += change
            totals.append(total)
        first = next((n for n, each in enumerate(self._log) if self._find_mark(each[2]).phase != "setup"), 0)
        peak = max(range(len(totals)), key=totals.__getitem__)
        step = max(1, (len(totals) - first) // NUM_MOMENTS)
        chosen = {
            max(range(begin, min(begin + step, len(totals))), key=totals.__getitem__)
            for begin in range(first, len(totals), step)
        }
        moments = dict(self._build_moments(chosen | {peak, kept}))
        timeline = tuple(moments[index] for index in sorted(chosen))
        return moments[peak], timeline, moments[kept].parts

    def _build_moments(self, chosen: set[int]) -> Iterator[tuple[int, MemoryMoment]]:
        sums: dict[str, int] = {}
        for index, (allocation, change, operator) in enumerate(self._log):
            sums[allocation.label] = sums.get(allocation.label, 0) + change
            if index in chosen:
                mark = self._find_mark(operator)
                yield (
                    index,
                    MemoryMoment(
                        operator=operator,
                        phase=mark.phase,
                        micro_batch=mark.micro_batch,
                        parts=MemoryParts(**sums),
                    ),
                )

    def _find_mark(self, operator: int) -> _Mark:
        place = bisect_right(self._marks, operator, key=lambda mark: mark.operator)
        return self._marks[max(place - 1, 0)]


def _count_bytes(value: Any) -> int:
    return sum(
        each.numel() * each.element_size()
        for each in tree_iter(value)
        if isinstance(each, Tensor) and each.layout is torch.strided
    )


def _count_flops(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[str, int]:
    """The kind of an operator and its multiplications and additions; those of causal attention are a half."""
    packet = func.overloadpacket
    if packet in ATTENTION:
        num_products, causal_index = ATTENTION[packet]
        query, key, value = args[1:4] if num_products == 5 else args[:3]
        batch, heads, rows, channels = query.shape
        products = num_products // 2 * (channels + value.shape[-1]) + (channels if num_products == 5 else 0)
        flops = 2 * batch * heads * rows * key.shape[2] * products
        is_causal = args[causal_index] if len(args) > causal_index else kwargs.get("is_causal", False)
        return "attention", flops // 2 if is_causal else flops
    if packet is GROUPED_PRODUCT or (func.namespace == "primus" and packet.__name__.rpartition("::")[2] in GROUPED):
        rows, other = args[:2]
        return "grouped_product", 2 * rows.shape[0] * rows.shape[1] * other.shape[-1]
    formula = flop_registry.get(packet)
    if formula is None:
        return "other", 0
    kind = "attention" if "attention" in packet.__name__ else "product"
    return kind, int(formula(*args, **kwargs, out_val=result))


def _find_group(args: Any) -> dist.ProcessGroup | None:
    """The process group of a collective: an argument, or named by the last one."""
    for each in args:
        if isinstance(each, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(each)
            except (RuntimeError, TypeError):
                continue
    names = [each for each in args if isinstance(each, str)]
    resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return resolve(names[-1]) if names else None
