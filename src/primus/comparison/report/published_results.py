"""Published results: a table with sources, drawn next to measured results and marked, never part of a ratio."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict

from primus.comparison.speed.efficiency import read_entries
from primus.errors import UsageError

FILE = Path(__file__).with_name("published_results.yaml")


class PublishedLayout(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a published run divides its model; what the devices leave is data parallel."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    """Stages of the pipeline in a process."""
    context: int = 1
    expert: int = 1
    is_sharded: bool = False
    """Whether the data-parallel processes shard weights and gradients too."""

    def __str__(self) -> str:
        sizes = [f"{name} {value}" for name, value in asdict(self).items() if value not in (1, False, True)]
        return ", ".join(sizes + ["sharded"] * self.is_sharded)


class PublishedResult(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A published speed."""

    device: str
    framework: str
    model: str
    """Name of the model's preset."""
    tokens_per_s_per_device: float
    precision: str
    """`not stated` where the source does not say it."""
    source: str
    settings_class: str = "published"
    """Class that the source states: `identical` or `tuned` only if it compares such cells."""
    seq_length: int | None = None
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    devices: int | None = None
    layout: PublishedLayout | None = None
    """None where the source does not state it."""
    tflops_per_device: float | None = None
    minutes_to_train: float | None = None
    """Time until the target loss of MLPerf."""
    version: str = ""
    note: str = ""

    @property
    def label(self) -> str:
        """How pictures call it."""
        return " ".join(part for part in (self.device, self.framework, self.precision) if part)


def read_published_results(path: Path = FILE) -> list[PublishedResult]:
    """The published results in a YAML file, by default those that come with primus.

    Raises:
        UsageError: The file cannot be read, is not a list of such results, or one has no source.
    """
    fields = "device, framework, model, tokens_per_s_per_device, precision, source"
    found = read_entries(path, PublishedResult, "published results", f"each entry has {fields}")
    bare = next((each for each in found if not each.source or not each.precision), None)
    if bare is not None:
        raise UsageError(f"{path}: the result of {bare.label} has no source or precision", "state both")
    return found
