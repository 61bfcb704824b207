"""The contract of tuners of matrix products on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from msgspec import Struct


class GpuProblem(Protocol):
    """A matrix product that is tuned once."""

    @property
    def key(self) -> str:
        """Names the problem in files."""
        ...

    @property
    def shape(self) -> str:
        """Sizes, transposes and type, for users."""
        ...

    @property
    def count(self) -> int:
        """How often it was found."""
        ...


class TunedPart(Struct, frozen=True, kw_only=True):
    """The result for one problem, as it is kept on disk."""

    text: str
    version: str
    """Version of all that the solution depends on: parts of different versions are not merged."""
    us: str
    """Time of the solution in microseconds; empty if it is unknown."""
    solution: str


ProblemT = TypeVar("ProblemT", bound=GpuProblem)


class GpuTuner(Protocol[ProblemT]):
    """A library that knows solutions of matrix products, and how they are tuned and used."""

    @property
    def name(self) -> str:
        """The library, for users."""
        ...

    @property
    def kind(self) -> str:
        """The kind of its files in the store of tuned files."""
        ...

    @property
    def output(self) -> Path:
        """The merged file to write."""
        ...

    def collect_problems(self) -> Sequence[ProblemT]:
        """The distinct problems to tune.

        Raises:
            PrimusError: There are none.
        """
        ...

    def tune_problem(self, problem: ProblemT, gpu: str, folder: Path) -> str:
        """Tune one problem on one GPU; gives the text of its part. `folder` is for temporary files.

        Raises:
            UnfitError: The tuner is not installed: no problem can be tuned.
            PrimusError: This problem cannot be tuned.
        """
        ...

    def parse_part(self, text: str, place: str) -> TunedPart:
        """Read a part.

        Raises:
            PrimusError: It is damaged.
        """
        ...

    def write_output(self, parts: Sequence[TunedPart]) -> str:
        """Write the merged file, and give its text."""
        ...

    def list_variables(self) -> dict[str, str]:
        """Variables with which a run uses the written file."""
        ...

    def describe_validity(self) -> dict[str, str]:
        """What the solutions depend on, by name, as later runs know it."""
        ...
