"""The processes that train together, as the session sees them; `torch_processes` has those of torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Processes(Protocol):
    """This process among those that train together. Every process makes the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int:
        """Number of processes."""
        ...

    @property
    def is_first(self) -> bool: ...

    def all_reduce_max(self, value: int) -> int:
        """The largest `value` of all processes."""
        ...

    def broadcast_from_first(self, value: Any) -> Any:
        """The first process's `value`, in every process."""
        ...

    def all_gather_values(self, value: Any, group: Any = None) -> list[Any]:
        """Every process's `value` by rank, in every process."""
        ...

    @property
    def writer_group(self) -> Any:
        """What a thread that writes checkpoints passes as `group`, so that its collectives do not mix with those of
        training; None for a single process."""
        ...


@dataclass(frozen=True)
class OneProcess:
    """A run of a single process, which drives all its devices."""

    rank: int = 0
    world: int = 1
    is_first: bool = True
    writer_group: None = None

    def all_reduce_max(self, value: int) -> int:
        return value

    def broadcast_from_first(self, value: Any) -> Any:
        return value

    def all_gather_values(self, value: Any, group: Any = None) -> list[Any]:
        return [value]


def find_first_problem(problems: Sequence[str]) -> str:
    """The problem of the lowest rank that has one; empty if there is none."""
    return next((problem for problem in problems if problem), "")
