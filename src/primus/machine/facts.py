"""Facts about a machine: values that were read, and problems with what could not be read."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Vendor = Literal["amd", "nvidia"]
DeviceKind = Literal["auto", "cpu", "cuda"]
"""Device of a job: `auto` selects the accelerators of the machine, or the CPU if there are none; `cuda` includes AMD
accelerators, as in PyTorch."""
LinkKind = Literal["xgmi", "nvlink", "pcie"]


class MachineProblem(Struct, frozen=True):
    """A value that could not be read, is missing, or differs between two sources."""

    where: str
    """File, tool or device: ``/sys/class/kfd/.../nodes/3/properties``, ``amd-smi``, ``GPU 6``."""
    problem: str


class PcieLink(Struct, frozen=True, kw_only=True):
    """The slowest PCIe link between the root port and a device: its current state, and the best that the ports on the
    path support."""

    speed_gts: float | None = None
    """GT/s per lane."""
    width: int | None = None
    """Lanes."""
    max_speed_gts: float | None = None
    max_width: int | None = None
    port: str | None = None
    """Address of the port that reports the link; None for the device itself."""


class Partition(Struct, frozen=True, kw_only=True):
    """A partition of a GPU that a process sees as a device: an MI300X in CPX mode has 8, an MI250X always 2 (its
    dies)."""

    index: int
    """Index among the devices of the node in the driver's order, from 0."""
    node: int | None = None
    """KFD node number."""
    bdf: str | None = None
    """Address as the driver numbers it; its function may not exist on the bus."""
    compute_units: int | None = None
    memory_bytes: int | None = None
    render_minor: int | None = None
    """Number of /dev/dri/renderD<minor>."""
    uuid: str | None = None
    """Unique id as in visibility variables, without prefix; partitions of a GPU share it."""


class Device(Struct, frozen=True, kw_only=True):
    """One GPU."""

    index: int
    """Index among the GPUs of the node, from 0, in the driver's order."""
    vendor: Vendor
    model: str | None = None
    """Name of its profile: ``MI300X``; None if the device id is unknown."""
    name: str = ""
    """Name reported by the driver or a tool; may be an OEM's."""
    device_id: int | None = None
    """PCI device id."""
    bdf: str | None = None
    """PCI address with a domain of four digits: ``0000:05:00.0``."""
    uuid: str | None = None
    """Unique id of the GPU, as its driver writes it."""
    architecture: str | None = None
    """``gfx942``, ``sm90``."""
    compute_units: int | None = None
    """Compute units or streaming multiprocessors of the whole GPU."""
    memory_bytes: int | None = None
    """Memory of the whole GPU, as reported by the driver."""
    partitions: tuple[Partition, ...] = ()
    """Devices that processes see; one entry for a GPU without partitions."""
    partition_mode: str | None = None
    """SPX, DPX, TPX, QPX or CPX on AMD, MIG on NVIDIA; None if the GPU has no such mode."""
    memory_mode: str | None = None
    """NPS1, NPS2, NPS4; None if it is not known."""
    hive: str | None = None
    """Id of the xGMI hive: GPUs of one hive are linked directly."""
    fabric: str | None = None
    """Id of the NVLink domain that the GPU shares with GPUs of other nodes (GB200 NVL72). AMD has none today: xGMI
    connects the GPUs of one node."""
    numa_node: int | None = None
    pci_path: tuple[str, ...] = ()
    """Host bridge, bridges and the device (see `pci.find_pci_path`); empty if unknown."""
    pcie: PcieLink = PcieLink()
    firmware: dict[str, str] = {}
    """Version by firmware: ``vbios``, ``mec``, ``sdma``."""
    failure: str | None = None
    """Why no process can use the GPU, as its files on the PCI bus show it (see `pci.find_failure`)."""
    sources: dict[str, str] = {}
    """Source of each value, by field: ``kfd``, ``pci``, ``nvml``, ``amd-smi``."""


class Link(Struct, frozen=True, kw_only=True):
    """A connection of two GPUs."""

    kind: LinkKind
    first: int
    """Index of a GPU."""
    second: int
    weight: int | None = None
    """The kernel's distance; smaller is nearer."""
    bandwidth_mb_per_s: int | None = None
    """As reported by the kernel; None if it reports none (0 is not a fault)."""
    num_links: int | None = None
    """Physical links of a direct connection (NVLinks, xGMI links); None if unknown."""
    hops: int = 1
    """Number of hops: 1 is a direct connection, 2 goes through another GPU of the hive."""


class Interface(Struct, frozen=True, kw_only=True):
    """A network interface."""

    name: str
    kind: Literal["loopback", "ethernet", "infiniband", "bond", "bridge", "virtual"] = "ethernet"
    """Bonds and bridges are masters; virtual interfaces have no device (veth, docker, cni, tun)."""
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
    """A host channel NIC."""

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
    """Host bridge, bridges and the device (see `pci.find_pci_path`); empty if unknown."""
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
    """Number of processors by frequency governor; empty if the kernel has none."""


class Memory(Struct, frozen=True, kw_only=True):
    """Host memory, in bytes."""

    total_bytes: int | None = None
    available_bytes: int | None = None
    swap_bytes: int | None = None
    limit_bytes: int | None = None
    """Limit of the control group; None without a limit."""


class Limits(Struct, frozen=True, kw_only=True):
    """Resource limits of a process; None is unlimited."""

    memlock_bytes: int | None = None
    nofile: int | None = None
    shm_bytes: int | None = None
    """Size of /dev/shm; None if missing or unknown (see problems)."""


class Software(Struct, frozen=True, kw_only=True):
    """Versions; None if not installed or unknown."""

    os: str | None = None
    kernel: str | None = None
    boot_arguments: str | None = None
    python: str | None = None
    amd_driver: str | None = None
    nvidia_driver: str | None = None
    rocm: str | None = None
    cuda: str | None = None


class MachineFacts(Struct, frozen=True, kw_only=True):
    """Everything known about a machine."""

    host: str = ""
    assumed: bool = False
    """Whether the machine is assumed (`--assume`)."""
    files_only: bool = False
    """Whether only files were read, as for a dry run: no tool, library or name server."""
    devices: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    master_interface: str | None = None
    """Interface by which this node reaches the master of the launch; None if unknown or not requested."""
    rdma: tuple[RdmaDevice, ...] = ()
    traffic_classes: tuple[int, int] | None = None
    """Traffic class of data and of control messages, as the NICs are configured; None if not reported."""
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
        """The devices as processes see them, in the driver's order."""
        return tuple(sorted((p for device in self.devices for p in device.partitions), key=lambda p: p.index))

    @property
    def model(self) -> str | None:
        """Model of the devices if all are of one model."""
        models = {device.model for device in self.devices}
        return models.pop() if len(models) == 1 else None
