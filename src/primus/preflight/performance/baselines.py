"""Reference values for the measurements of devices and of groups of devices."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from msgspec import Struct, structs

from primus.machine.facts import MachineFacts
from primus.machine.measurements import Collective, MeasurementResults, RankResult
from primus.machine.profile import Floor, Profile
from primus.preflight.performance import fault_localization
from primus.report import table

MIB = 2**20
GIB = 2**30
FLOOR_RANKS = 8
"""Number of devices of the collectives to which the profiles' floors apply."""
SMALL_BYTES, LARGE_BYTES, LARGEST_BYTES = 64 * MIB, GIB, 8 * GIB
"""Sizes with floors: 64 MiB, and 8 GiB and above; from 1 GiB on the floor is `LARGE_SHARE` of that at 8 GiB."""
LARGE_SHARE = 0.9
"""Share of the floor at 8 GiB that applies to 1 GiB, and to all_gather and reduce_scatter of any large size: on 8 H100
they reach 361 and 363 GB/s where all_reduce reaches 367 (stas00/ml-engineering)."""
RING_OPERATIONS = ("all_gather", "reduce_scatter")
NETWORK_SHARE = 0.7
"""Share of the rate of a node's RDMA ports that a collective between nodes must reach at 8 GiB: of 400 GB/s (8 ports of
400 Gb/s) ROCm/cvs demands 330 and AMD-AGI/Primus-SaFE 288 between two nodes."""


class Demands(Struct, frozen=True, kw_only=True):
    """The user's demands on every device; None uses the device's profile."""

    gemm_tflops_min: float | None = None
    hbm_gbs_min: float | None = None
    """Rate of memory copies."""
    rccl_gbs_min: float | None = None
    """Bus bandwidth of a node's all_reduce of `rccl_size_mb`."""
    rccl_size_mb: int = 64
    """Size in MiB."""
    free_memory_gb_min: float = 1.0
    """Free memory of each device, 1e9 B (AMD-AGI/Primus, PRIMUS_PREFLIGHT_MIN_FREE_MEM_GB)."""
    best_figures: Mapping[str, Mapping[str, float]] = {}
    """Best values of `benchmark` on this machine by device and test; they are shown, and are no demand."""
    floors: Mapping[str, float] = {}
    """Floors by test, which override the profile's: ``gemm_bf16`` in TFLOP/s, ``memory_copy`` in GB/s."""
    host_gb_per_s_min: Floor | None = None
    """Triad bandwidth of a whole host."""
    outlier_percent: float = 100 * fault_localization.BELOW_MEDIAN
    """Relative distance below the median at which a device is reported."""


class PerformanceBaseline:
    """The results of one run with the reference values of its devices.

    Args:
        results: The measurements.
        facts: Facts of one node; all nodes are assumed to be alike.
        profile: Profile of its devices; None if they are unknown or there are none.
        demands: The user's demands.
    """

    def __init__(
        self, results: MeasurementResults, facts: MachineFacts, profile: Profile | None, demands: Demands
    ) -> None:
        self.results = results
        self.demands = demands
        self.ranks = {rank.rank: rank for rank in results.ranks}
        self.on_gpu = any(rank.device.startswith("cuda") for rank in results.ranks) or bool(facts.devices)
        self._profile = profile
        self._facts = facts
        self._of_card = len(facts.devices) / len(facts.partitions) if facts.partitions else 1.0
        """Fraction of a GPU that a process uses."""

    def find_unit(self, test: str) -> str:
        """Unit of a test's figures."""
        figures = (figure for rank in self.results.ranks for figure in rank.figures)
        return next((figure.unit for figure in figures if figure.test == test and figure.unit), "GB/s")

    def find_floor(self, test: str) -> Floor | None:
        """The floor of a device in a test, from the user or the profile."""
        demands = self.demands
        wanted = {
            f"gemm_{self.results.asked.dtype}": demands.gemm_tflops_min,
            "memory_copy": demands.hbm_gbs_min,
            "sanity": demands.free_memory_gb_min if self.on_gpu else None,
        }.get(test)
        if wanted is not None:
            return Floor(value=wanted, unit=self.find_unit(test), source="as demanded")
        return self._find_known_floor(test)

    def _find_known_floor(self, test: str) -> Floor | None:
        """The floor of the thresholds file, or else of the profile."""
        floor = self._profile.floors.get(test) if self._profile else None
        if test in self.demands.floors:
            floor = Floor(value=self.demands.floors[test], unit=self.find_unit(test), source="thresholds file")
        return structs.replace(floor, value=floor.value * self._of_card) if floor else None

    def find_peak(self, test: str) -> float | None:
        """The theoretical maximum of a device in a test."""
        if self._profile is None:
            return None
        peaks: Mapping[Any, float] = self._profile.peaks
        peak = self._profile.memory_gb_per_s if test.startswith("memory_") else peaks.get(test.removeprefix("gemm_"))
        return peak * self._of_card if peak else None

    def find_best(self, test: str) -> float | None:
        """The best known measurement of a test: of this machine, or else of its profile."""
        device = next((rank.device_name for rank in self.results.ranks), "")
        own = self.demands.best_figures.get(device, {}).get(test)
        if own is not None:
            return own
        achieved: Mapping[Any, float] = self._profile.achieved if self._profile else {}
        best = achieved.get(test.removeprefix("gemm_")) if test.startswith("gemm_") else None
        return best * self._of_card if best else None

    def find_collective_floor(self, found: Collective) -> Floor | None:
        """The floor of a collective's bus bandwidth, if one is known for its size and node type."""
        demands = self.demands
        is_own = found.scope == "node" and found.operation == "all_reduce"
        if is_own and demands.rccl_gbs_min is not None and _is_near(found.size_bytes, demands.rccl_size_mb * MIB):
            return Floor(value=demands.rccl_gbs_min, unit="GB/s", source="as demanded")
        if found.operation not in ("all_reduce", *RING_OPERATIONS) or self._of_card != 1:
            return None
        if found.scope == "all":
            return self._find_inter_node_floor(found)
        return self._find_intra_node_floor(found) if len(found.ranks) == FLOOR_RANKS else None

    def _find_intra_node_floor(self, found: Collective) -> Floor | None:
        if _is_near(found.size_bytes, SMALL_BYTES):
            return self._find_known_floor("all_reduce_64m") if found.operation == "all_reduce" else None
        floor = self._find_known_floor("all_reduce")
        if floor is None or _is_below(found.size_bytes, LARGE_BYTES):
            return None
        if found.operation == "all_reduce" and not _is_below(found.size_bytes, LARGEST_BYTES):
            return floor
        source = f"{LARGE_SHARE:.0%} of the floor of all_reduce at 8 GiB: {floor.source}"
        return structs.replace(floor, value=floor.value * LARGE_SHARE, source=source)

    def _find_inter_node_floor(self, found: Collective) -> Floor | None:
        """Floor from the NICs of each node, unless the links inside a node are slower; for whole nodes of 8 devices."""
        nodes = {rank.node for rank in self.ranks.values() if rank.rank in found.ranks}
        is_whole = len(nodes) > 1 and len(found.ranks) == FLOOR_RANKS * len(nodes)
        inside, network = self._find_known_floor("all_reduce"), self._compute_network_gb_per_s()
        if not is_whole or inside is None or not network or _is_below(found.size_bytes, LARGEST_BYTES):
            return None
        value = min(NETWORK_SHARE * network, LARGE_SHARE * inside.value)
        source = (
            f"{NETWORK_SHARE:.0%} of {network:g} GB/s of the RDMA ports, at most {LARGE_SHARE:.0%} of a node's floor"
        )
        return Floor(value=value, unit="GB/s", source=f"{source} (ROCm/cvs rccl_config.json)")

    def _compute_network_gb_per_s(self) -> float:
        """Sum of the active RDMA ports of the fastest kind; slower ports are management ports."""
        rates = [port.rate_gbps for device in self._facts.rdma for port in device.ports if port.is_active]
        known = [rate for rate in rates if rate]
        return sum(rate for rate in known if rate == max(known)) / 8

    def find_host(self, rank: Hashable) -> str:
        """Short host name of a rank as in the report; empty if the rank did not respond."""
        found = self.ranks.get(rank) if isinstance(rank, int) else None
        return found.host.partition(".")[0] if found else ""

    def format_rank_name(self, rank: Hashable) -> str:
        """A rank and its host."""
        return f"rank {rank} on {self.find_host(rank)}" if self.find_host(rank) else f"rank {rank}"


def format_floor(floor: Floor) -> str:
    """A floor as text."""
    return f"at least {table.format_number(floor.value)} {floor.unit}"


def format_device_name(rank: RankResult) -> str:
    """A rank's device as findings name it."""
    kind, _, number = rank.device.partition(":")
    return f"rank {rank.rank} (GPU {number})" if kind == "cuda" else f"rank {rank.rank}"


def _is_near(size_bytes: int, wanted_bytes: int) -> bool:
    """Whether a size equals the wanted one, rounded to whole elements for each rank."""
    return abs(size_bytes - wanted_bytes) <= wanted_bytes // 1000


def _is_below(size_bytes: int, wanted_bytes: int) -> bool:
    """Whether a size is smaller than the wanted one, rounded to whole elements."""
    return size_bytes < wanted_bytes and not _is_near(size_bytes, wanted_bytes)
