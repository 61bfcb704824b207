"""What a device model is and what it needs: a profile over its architecture over its vendor's base.

A profile is a file of `machine/profiles`, an architecture (or a vendor's base) one of `machine/architectures`, a kind
of network adapter one of `machine/nics`. Sources are named in each file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Literal

from msgspec import Struct

from primus import registry
from primus.errors import PrimusError, UsageError, did_you_mean
from primus.machine.facts import Vendor

Dtype = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4"]
Library = Literal["transformer engine", "primus turbo"]
Condition = Literal[
    "always",
    "several processes",
    "several nodes",
    "rdma",
    "rocm 7.2.1",
    "rocm before 7.2.1",
    "torch before 2.8",
    "transformer engine",
    "primus turbo",
]
"""`rdma` is several nodes that use RDMA; `rocm 7.2.1` is that version or a newer one; a library is one that the job's
backend computes with (see `primus.machine.framework`)."""

LinkLayout = Literal["mesh", "partial", "bridge"]
"""How the cards of a hive are linked: `mesh` links every two, by the board or a switch; `partial` links each to some of
the others, as on an MI250 board; `bridge` is an optional bridge over neighbouring cards."""

CORES_PER_PROCESS = "{cores per process}"
"""A setting's value that is known on the node only."""

MIB = 1 << 20
FORMULA_TOLERANCE = 0.002
"""Between a published AMD peak and units x clock x FLOP: the rounding of data sheets."""
RATIO_TOLERANCE = 0.02
"""Between dense fp8 and twice bf16 on NVIDIA, whose L40S sheet says 733 and 362; a sparse figure is off by 100 %."""


class Setting(Struct, frozen=True, kw_only=True):
    """A variable's value, and why."""

    value: str | None
    """None leaves the variable unset, whatever a lower layer says."""
    reason: str
    source: str
    """Public origin: ``AMD-AGI/Primus base_env.sh``, ``AMD-AGI/Primus#1178``."""
    when: Condition = "always"
    alternatives: dict[Condition, str] = {}
    """Values under other conditions, where `when` does not hold."""


class Floor(Struct, frozen=True, kw_only=True):
    """What a healthy device reaches at least."""

    value: float
    unit: str
    """``TFLOP/s``, ``GB/s``."""
    source: str


class Profile(Struct, frozen=True, kw_only=True):
    """One device model; figures are those of a whole card, peaks are dense."""

    model: str
    vendor: Vendor | Literal["cpu"]
    architecture: str
    """Plug-in of `architectures`: ``gfx942``, ``sm90``."""
    source: str
    """Where the figures come from."""
    device_ids: tuple[int, ...] = ()
    """PCI device ids, physical and virtual functions."""
    names: tuple[str, ...] = ()
    """Parts of the name that tools give it, where no id is at hand; the model itself always counts."""
    compute_units: int | None = None
    xcds: int = 1
    """Accelerator dies: the largest number of compute partitions."""
    devices_per_card: int = 1
    """Devices that an undivided card is to a process: 2 on MI250 and MI250X."""
    clock_mhz: int | None = None
    flop_per_clock: dict[Dtype, int] = {}
    """FLOP per compute unit and clock, for AMD: peak = compute_units x clock x this."""
    memory_bytes: int | None = None
    """As tools show it, which is a little less than the nominal size."""
    memory_gb_per_s: float | None = None
    """Peak memory bandwidth, 1e9 B/s."""
    last_level_cache_bytes: int | None = None
    power_w: int | None = None
    pcie_gts: float | None = None
    pcie_width: int | None = None
    hive_size: int | None = None
    """Cards of a usual system that are linked to each other."""
    link_layout: LinkLayout = "mesh"
    server_sizes: tuple[int, ...] = ()
    """Cards of the servers that are sold, smallest first; empty where any number is usual."""
    fp8_format: str | None = None
    """``e4m3fnuz`` or ``e4m3fn``."""
    peaks: dict[Dtype, float] = {}
    """Dense TFLOP/s of the matrix units, of the vector units for fp32."""
    achieved: dict[Dtype, float] = {}
    """Best measured TFLOP/s of a matrix product."""
    floors: dict[str, Floor] = {}
    """By test: ``gemm_bf16``, ``memory_copy``, ``all_reduce`` (bus bandwidth of 8 cards at 8 GiB), ``all_reduce_64m``;
    one above the peak is refused when the profile is loaded."""
    settings: dict[str, Setting] = {}


class ProfileLayer(Struct, frozen=True, kw_only=True):
    """Settings that several models share."""

    name: str
    parent: str | None = None
    """Layer below this one."""
    settings: dict[str, Setting] = {}


class Nic(Struct, frozen=True, kw_only=True):
    """A kind of network adapter."""

    kind: str
    title: str
    vendor_ids: tuple[int, ...]
    name_prefixes: tuple[str, ...] = ()
    """Beginnings of its RDMA devices' names."""
    link_layer: Literal["InfiniBand", "Ethernet", "Slingshot"] = "Ethernet"
    """Usual link layer of its ports."""
    is_verbs: bool = True
    """Whether NCCL and RCCL reach it by verbs themselves, so that NCCL_IB_HCA names it; others need a plug-in."""
    plugins: tuple[str, ...] = ()
    """Libraries one of which NCCL or RCCL must find to use it, where it is not reached by verbs."""
    settings: dict[str, Setting] = {}


@cache
def load_all_profiles() -> tuple[Profile, ...]:
    """Every known device model, checked.

    Raises:
        PrimusError: A profile's figures contradict each other.
    """
    return tuple(profile for name in registry.list_plug_ins("profiles") for profile in _load_profiles(name))


@cache
def _load_profiles(name: str) -> tuple[Profile, ...]:
    """The models in one file, checked."""
    found: tuple[Profile, ...] = registry.load_plug_in("profiles", name).PROFILES
    for profile in found:
        _check_profile(profile, str(registry.find_plug_in_file("profiles", name) or name))
    return found


def find_profile_by_id(vendor: Vendor, device_id: int) -> Profile | None:
    """The model of a PCI device, whatever its maker calls it; None where it is not known."""
    return _index_by_id().get((vendor, device_id))


def find_profile_by_name(text: str) -> Profile | None:
    """The model that a driver's or tool's name holds as whole words, the longest name first; None where it is none.

    `H20` is not in ``NVIDIA H200``, nor `B200` in ``GB200``; ``AMD Radeon Graphics`` says nothing.
    """
    words = f" {_normalize_name(text)} "
    return next((profile for name, profile in _index_by_name() if f" {name} " in words), None)


def find_profile(word: str) -> Profile:
    """The model that a person types: ``mi355x``, ``a100-40gb``.

    Raises:
        UsageError: There is none; the message names the nearest.
    """
    is_file = _format_typed_name(word) in registry.list_plug_ins("profiles")
    models = {
        _format_typed_name(profile.model): profile
        for profile in (_load_profiles(_format_typed_name(word)) if is_file else load_all_profiles())
    }
    if _format_typed_name(word) in models:
        return models[_format_typed_name(word)]
    raise UsageError(f"no GPU model '{word}'", did_you_mean(_format_typed_name(word), models))


def format_typed_name(profile: Profile) -> str:
    """The model as it is typed: lower case without spaces."""
    return _format_typed_name(profile.model)


def list_layers(profile: Profile) -> list[tuple[str, Mapping[str, Setting]]]:
    """Settings of the model by layer, lowest first: base, gpu, vendor, architecture, model."""
    own = (format_typed_name(profile), profile.settings)
    return [*list_architecture_layers(profile.architecture), own]


def list_architecture_layers(name: str) -> list[tuple[str, Mapping[str, Setting]]]:
    """Settings of an architecture by layer, lowest first; none where it is not known.

    Raises:
        PrimusError: The layers' parents form a ring.
    """
    found: list[tuple[str, Mapping[str, Setting]]] = []
    parent: str | None = name
    while parent and parent in registry.list_plug_ins("architectures"):
        if parent in [label for label, _ in found]:
            raise PrimusError(f"architecture '{parent}' stands above itself", "a parent is the layer below")
        layer: ProfileLayer = registry.load_plug_in("architectures", parent).LAYER
        found.insert(0, (layer.name, layer.settings))
        parent = layer.parent
    return found


def load_nic(kind: str) -> Nic | None:
    """The kind of network adapter of that name; None where it is not known."""
    if kind not in registry.list_plug_ins("nics"):
        return None
    adapter: Nic = registry.load_plug_in("nics", kind).NIC
    return adapter


def find_peak_tflops(device_name: str, dtype: Dtype) -> float | None:
    """Dense peak of an undivided device by the name that torch gives it: one die of an MI250X; None if not known."""
    profile = None if "MIG" in _normalize_name(device_name).split() else find_profile_by_name(device_name)
    if profile is None or dtype not in profile.peaks:
        return None
    return profile.peaks[dtype] / profile.devices_per_card


@cache
def _index_by_id() -> dict[tuple[str, int], Profile]:
    return {(profile.vendor, number): profile for profile in load_all_profiles() for number in profile.device_ids}


@cache
def _index_by_name() -> list[tuple[str, Profile]]:
    """Names in upper case with their models, the longest first."""
    devices = [profile for profile in load_all_profiles() if profile.vendor != "cpu"]
    pairs = [(_normalize_name(name), profile) for profile in devices for name in (profile.model, *profile.names)]
    return sorted(pairs, key=lambda pair: -len(pair[0]))


def _normalize_name(text: str) -> str:
    return " ".join(re.split(r"[^A-Z0-9]+", text.upper())).strip()


def _format_typed_name(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _check_profile(profile: Profile, file: str) -> None:
    """Refuse a profile whose figures cannot all be true."""

    def refuse(problem: str) -> PrimusError:
        return PrimusError(
            f"{file}: {profile.model}: {problem}", "peaks are dense, of a whole card; see its data sheet"
        )

    for dtype, flop in profile.flop_per_clock.items():
        computed = (profile.compute_units or 0) * (profile.clock_mhz or 0) * flop / 1e6
        if not _is_near(profile.peaks.get(dtype, 0), computed, FORMULA_TOLERANCE):
            raise refuse(f"peak {dtype} is {profile.peaks.get(dtype)}, units x clock x FLOP is {computed:.1f} TFLOP/s")
    for dtype, reference, factor, tolerance in _list_peak_ratios(profile):
        if not _is_near(profile.peaks[dtype], factor * profile.peaks[reference], tolerance):
            raise refuse(
                f"peak {dtype} is {profile.peaks[dtype]}, not {factor} x {reference} {profile.peaks[reference]}"
            )
    for what, value, peak in _list_bounded_figures(profile):
        if value > peak:
            raise refuse(f"{what} {value} is above the peak {peak}")


def _is_near(value: float, expected: float, tolerance: float) -> bool:
    return abs(value - expected) <= tolerance * expected


def _list_peak_ratios(profile: Profile) -> list[tuple[Dtype, Dtype, int, float]]:
    """Which peak is how many times which other, where both are known."""
    is_amd = profile.vendor == "amd"
    clocked = profile.flop_per_clock
    if is_amd and clocked.get("bf16") != clocked.get("fp16"):
        return []  # the formula of each decides
    ratios: list[tuple[Dtype, Dtype, int, float]] = [
        ("fp16", "bf16", 1, FORMULA_TOLERANCE),
        ("fp8", "bf16", 2, FORMULA_TOLERANCE if is_amd else RATIO_TOLERANCE),
    ]
    if is_amd:
        ratios.append(("fp4", "fp8", 2, FORMULA_TOLERANCE))
    return [ratio for ratio in ratios if ratio[0] in profile.peaks and ratio[1] in profile.peaks]


def _list_bounded_figures(profile: Profile) -> list[tuple[str, float, float]]:
    """Figures with the peak that they cannot exceed: what, value, peak."""
    peaks: dict[str, float] = {f"gemm_{dtype}": peak for dtype, peak in profile.peaks.items()}
    if profile.memory_gb_per_s:
        peaks |= dict.fromkeys(("memory_copy", "memory_triad"), profile.memory_gb_per_s)
    floors = [(f"floor {test}", floor.value, peaks[test]) for test, floor in profile.floors.items() if test in peaks]
    achieved = [
        (f"achieved {dtype}", value, profile.peaks[dtype])
        for dtype, value in profile.achieved.items()
        if dtype in profile.peaks
    ]
    return floors + achieved
