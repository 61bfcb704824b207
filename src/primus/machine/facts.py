"""What a machine is: values that were read, never changed, and what could not be read."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Vendor = Literal["amd", "nvidia"]
DeviceKind = Literal["auto", "cpu", "cuda"]
"""What a job computes on: `auto` is the accelerators of the machine, and the CPU only where there is none; `cuda` is
accelerators of AMD as well, which PyTorch calls so."""
LinkKind = Literal["xgmi", "nvlink", "pcie"]


class MachineProblem(Struct, frozen=True):
    """Something that could not be read, that is missing, or on which two sources disagree."""

    where: str
    """File, tool or device: ``/sys/class/kfd/.../nodes/3/properties``, ``amd-smi``, ``GPU 6``."""
    problem: str


class PcieLink(Struct, frozen=True, kw_only=True):
    """The slowest PCIe link between the root port and a device: as it is now, and as the ports on the path allow."""

    speed_gts: float | None = None
    """GT/s per lane."""
    width: int | None = None
    """Lanes."""
    max_speed_gts: float | None = None
    max_width: int | None = None
    port: str | None = None
    """Address of the port that reports the link; None where the device itself does."""


class Partition(Struct, frozen=True, kw_only=True):
    """A part of a card that a process sees as a device: an MI300X in CPX has 8, an MI250X always has 2 (its dies)."""

    index: int
    """Number among the devices of the node in the order of the driver, from 0."""
    node: int | None = None
    """KFD node number."""
    bdf: str | None = None
    """Address as the driver numbers it; its function may exist for the driver only."""
    compute_units: int | None = None
    memory_bytes: int | None = None
    render_minor: int | None = None
    """Number of /dev/dri/renderD<minor>."""
    uuid: str | None = None
    """Unique id by which visibility variables name it, without their prefix; partitions of a card share it."""


class Device(Struct, frozen=True, kw_only=True):
    """One card."""

    index: int
    """Number among the cards of the node, from 0, in the order of the driver."""
    vendor: Vendor
    model: str | None = None
    """Name of the profile that describes it: ``MI300X``; None where the device id is not known."""
    name: str = ""
    """Name as the driver or a tool gives it, which may be an OEM's."""
    device_id: int | None = None
    """PCI device id."""
    bdf: str | None = None
    """PCI address with a domain of four digits: ``0000:05:00.0``."""
    uuid: str | None = None
    """Unique id of the card, as its driver writes it."""
    architecture: str | None = None
    """``gfx942``, ``sm90``."""
    compute_units: int | None = None
    """Compute units or streaming multiprocessors of the whole card."""
    memory_bytes: int | None = None
    """Memory of the whole card, as the driver counts it."""
    partitions: tuple[Partition, ...] = ()
    """What processes see; one entry for an undivided card."""
    partition_mode: str | None = None
    """SPX, DPX, TPX, QPX or CPX on AMD, MIG on NVIDIA; None where there is no such thing."""
    memory_mode: str | None = None
    """NPS1, NPS2, NPS4; None where it is not known."""
    hive: str | None = None
    """Id of the xGMI hive: cards of one hive are linked directly."""
    numa_node: int | None = None
    pci_path: tuple[str, ...] = ()
    """Host bridge, bridges and the device itself (see `pci.path`); empty where it is not known."""
    pcie: PcieLink = PcieLink()
    firmware: dict[str, str] = {}
    """Version by firmware: ``vbios``, ``mec``, ``sdma``."""
    sources: dict[str, str] = {}
    """Where each value came from, by field: ``kfd``, ``pci``, ``nvml``, ``amd-smi``."""


class Link(Struct, frozen=True, kw_only=True):
    """A connection of two cards."""

    kind: LinkKind
    first: int
    """Index of a card."""
    second: int
    weight: int | None = None
    """The kernel's distance: smaller is nearer."""
    bandwidth_mb_per_s: int | None = None
    """As the kernel states it; None where it states nothing (0 is no fault)."""
    num_links: int | None = None
    """Physical links of a direct connection (NVLinks, xGMI links); None where their number is not known."""
    hops: int = 1
    """Links in a row: 1 is a direct connection, 2 leads through another GPU of the hive."""


class Interface(Struct, frozen=True, kw_only=True):
    """A network interface."""

    name: str
    kind: Literal["loopback", "ethernet", "infiniband", "bond", "bridge", "virtual"] = "ethernet"
    """Bond and bridge are masters; virtual has no device behind it (veth, docker, cni, tun)."""
    state: str = "unknown"
    """operstate: ``up``, ``down``, ``unknown``."""
    speed_mbps: int | None = None
    """Megabit/s."""
    mtu: int | None = None
    addresses: tuple[str, ...] = ()
    """IPv4 and IPv6 addresses without a prefix length."""
    master: str | None = None
    """Bond or bridge that it belongs to."""
    bdf: str | None = None
    driver: str | None = None
    numa_node: int | None = None


class Gid(Struct, frozen=True):
    """An entry of a port's GID table."""

    index: int
    gid: str
    kind: str
    """``RoCE v1``, ``RoCE v2``, ``IB/RoCE v1``."""


class RdmaPort(Struct, frozen=True, kw_only=True):
    """A port of an RDMA device."""

    number: int = 1
    state: str = "unknown"
    """``ACTIVE``, ``DOWN``, ``INIT``, without the kernel's number."""
    physical_state: str = "unknown"
    """``LinkUp``, ``Polling``, ``Disabled``."""
    rate_gbps: float | None = None
    """Gigabit/s."""
    link_layer: str = "unknown"
    """``InfiniBand`` or ``Ethernet``."""
    gids: tuple[Gid, ...] = ()
    """Entries that are not empty."""

    @property
    def is_active(self) -> bool:
        return self.state == "ACTIVE" and self.physical_state == "LinkUp"


class RdmaDevice(Struct, frozen=True, kw_only=True):
    """A host channel adapter."""

    name: str
    """``mlx5_0``."""
    kind: str | None = None
    """Name of the NIC profile that describes it: ``mellanox``, ``broadcom``, ``ainic``."""
    vendor_id: int | None = None
    hca_type: str | None = None
    firmware: str | None = None
    interface: str | None = None
    """Network interface of the same function."""
    bdf: str | None = None
    numa_node: int | None = None
    pci_path: tuple[str, ...] = ()
    """Host bridge, bridges and the device itself (see `pci.path`); empty where it is not known."""
    pcie: PcieLink = PcieLink()
    ports: tuple[RdmaPort, ...] = ()


class Cpu(Struct, frozen=True, kw_only=True):
    """The processors."""

    model: str = "unknown"
    architecture: str = "unknown"
    sockets: int | None = None
    cores: int | None = None
    """Physical cores."""
    threads: int | None = None
    """Logical processors that are online."""
    usable: int | None = None
    """Logical processors that this process may use."""
    numa_nodes: int | None = None
    governors: dict[str, int] = {}
    """Number of processors by frequency governor; empty where the kernel offers none."""


class Memory(Struct, frozen=True, kw_only=True):
    """Host memory, in bytes."""

    total_bytes: int | None = None
    available_bytes: int | None = None
    swap_bytes: int | None = None
    limit_bytes: int | None = None
    """What the control group allows; None without a limit."""


class Limits(Struct, frozen=True, kw_only=True):
    """Limits of a process; None is unlimited."""

    memlock_bytes: int | None = None
    nofile: int | None = None
    shm_bytes: int | None = None
    """Size of /dev/shm; None where there is none or it is unknown (see problems)."""


class Software(Struct, frozen=True, kw_only=True):
    """Versions; None where it is not installed or not known."""

    os: str | None = None
    kernel: str | None = None
    boot_arguments: str | None = None
    python: str | None = None
    amd_driver: str | None = None
    nvidia_driver: str | None = None
    rocm: str | None = None
    cuda: str | None = None


class MachineFacts(Struct, frozen=True, kw_only=True):
    """All that is known of a machine."""

    host: str = ""
    assumed: bool = False
    """Whether this is a machine that was only named (`--assume`)."""
    files_only: bool = False
    """Whether nothing but files was asked, as for a dry run: no tool, no library, no name server."""
    devices: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    master_interface: str | None = None
    """Interface by which this node reaches the master of the launch; None where that is unknown or nobody asked."""
    rdma: tuple[RdmaDevice, ...] = ()
    traffic_classes: tuple[int, int] | None = None
    """Traffic class of data and of control messages, as the adapters are configured; None where nobody told."""
    cpu: Cpu = Cpu()
    memory: Memory = Memory()
    limits: Limits = Limits()
    software: Software = Software()
    container: str | None = None
    """``docker``, ``podman``, ``kubernetes``, ``apptainer``, ``enroot``, ... around this process."""
    scheduler: str | None = None
    """``slurm``, ``kubernetes``, ... that started this process."""
    problems: tuple[MachineProblem, ...] = ()

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """What processes see as devices, in the order of the driver."""
        return tuple(sorted((p for device in self.devices for p in device.partitions), key=lambda p: p.index))

    @property
    def model(self) -> str | None:
        """Model of the devices where all have the same one."""
        models = {device.model for device in self.devices}
        return models.pop() if len(models) == 1 else None
