"""Schema of the data files in `machine/profiles`, `machine/architectures` and `machine/nics`."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

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
framework computes with (see `primus.framework`)."""

LinkLayout = Literal["mesh", "partial", "bridge"]
"""How the GPUs of a hive are linked: `mesh` links every two, by the board or a switch; `partial` links each to some of
the others, as on an MI250 board; `bridge` is an optional bridge over neighboring GPUs."""

CORES_PER_PROCESS = "{cores per process}"
"""A setting's value that is known on the node only."""

MIB = 1 << 20


class Setting(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A variable's value, and why."""

    value: str | None
    """None leaves the variable unset, whatever a lower layer says."""
    reason: str
    source: str
    """Public origin: ``AMD-AGI/Primus base_env.sh``, ``AMD-AGI/Primus#1178``."""
    when: Condition = "always"
    alternatives: dict[Condition, str] = {}
    """Values under other conditions, where `when` does not hold."""


class Floor(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a healthy device reaches at least."""

    value: float
    unit: str
    """``TFLOP/s``, ``GB/s``."""
    source: str


class Profile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device model; figures are those of a whole GPU, peaks are dense."""

    model: str
    vendor: Vendor | Literal["cpu"]
    architecture: str
    """Plug-in of `architectures`: ``gfx942``, ``sm90``."""
    source: str
    """Where the figures come from."""
    device_ids: tuple[int, ...] = ()
    """PCI device ids, physical and virtual functions."""
    names: tuple[str, ...] = ()
    """Parts of the name that tools give it, for devices without a known id; the model name itself always counts."""
    compute_units: int | None = None
    xcds: int = 1
    """Accelerator dies: the largest number of compute partitions."""
    devices_per_gpu: int = 1
    """Devices that an undivided GPU is to a process: 2 on MI250 and MI250X."""
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
    """GPUs of a usual system that are linked to each other."""
    link_layout: LinkLayout = "mesh"
    link_gb_per_s: float | None = None
    """Measured bus bandwidth of a large all-gather over the GPUs of a hive, 1e9 B/s."""
    network_gb_per_s: float | None = None
    """Line rate of the NICs that a usual server has for one GPU, 1e9 B/s."""
    server_sizes: tuple[int, ...] = ()
    """GPUs of the servers that are sold, smallest first; empty where any number is usual."""
    fp8_format: str | None = None
    """``e4m3fnuz`` or ``e4m3fn``."""
    peaks: dict[Dtype, float] = {}
    """Dense TFLOP/s of the matrix units, of the vector units for fp32."""
    achieved: dict[Dtype, float] = {}
    """Best measured TFLOP/s of a matrix product."""
    floors: dict[str, Floor] = {}
    """By test: ``gemm_bf16``, ``memory_copy``, ``all_reduce`` (bus bandwidth of 8 GPUs at 8 GiB), ``all_reduce_64m``;
    one above the peak is refused when the profile is loaded."""
    settings: dict[str, Setting] = {}


class ProfileLayer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that several models share."""

    name: str
    parent: str | None = None
    """Layer below this one; `extends:` in a file."""
    source: str = ""
    """Origin of the settings that name none."""
    settings: dict[str, Setting] = {}


class Nic(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of NIC."""

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
    source: str = ""
    """Origin of the settings that name none."""
    settings: dict[str, Setting] = {}
