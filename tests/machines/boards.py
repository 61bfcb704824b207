"""Trees of machines whose connections RCCL's topology files record: facts from them, in files as the kernel has them.

Source of the facts: ROCm/rccl tools/topo_expl/models, the file that each board names: addresses, ids and classes of PCI
functions, the bridges above them, speeds and widths, the number of xGMI links between two GPUs, NUMA nodes, adapters.
Constructed: root ports and the downstream ports of switches, which those files leave out, unique ids, what the ports
could do at best, and the xGMI links in KFD's form (Linux kfd_crat.c): every two GPUs of a hive are listed, those that
are not linked directly with a weight of 15 for each link on the way.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

KFD = "sys/class/kfd/kfd/topology/nodes"
PCI = "sys/bus/pci/devices"
LINK_MB_PER_S = 50_000
"""Of one xGMI link of 16 lanes at 25 GT/s (Linux amdgpu_amdkfd.c)."""
Link = tuple[float, int]
"""Speed in GT/s, and lanes."""


@dataclass(frozen=True, kw_only=True)
class Board:
    """A machine. A GPU is `NUMA-node buses links`: buses from the root down, separated by `/`, of upstream ports and at
    last of the GPU; links are `bus:number` for each GPU that it is linked to. An adapter is `name NUMA-node buses`."""

    source: str
    device: int
    gfx: int
    compute_units: int
    gpus: str
    adapters: str = ""
    adapter_ids: tuple[int, int, int] = (0x15B3, 0x101B, 0x020700)
    """Vendor, device and class."""
    adapter_gbps: int = 200
    gpu_class: int = 0x038000
    dies: int = 1
    """Accelerator dies in each KFD node."""
    package_port: tuple[int, int] | None = None
    """Vendor and device of the port right above a GPU."""
    slot: Link = (16.0, 16)
    """Link of the package or GPU to the port above it."""
    inner: Link = (32.0, 16)
    """Link that a GPU below a package port reports."""
    has_hive: bool = True
    slots: dict[str, Link] = field(default_factory=dict)
    """Links now, by bus, where they are slower than they could be."""


class _Builder:
    def __init__(self, board: Board, root: Path, lost: frozenset[frozenset[str]]) -> None:
        self.board, self.root = board, root
        self.gpus = [line.split() for line in board.gpus.strip().splitlines()]
        self.numbers = {self.bus(gpu): number for number, gpu in enumerate(self.gpus, start=2)}
        self.links = {
            frozenset((self.bus(gpu), word.partition(":")[0])): int(word.partition(":")[2])
            for gpu in self.gpus
            for word in gpu[2:]
        }
        for pair in lost:
            del self.links[pair]

    @staticmethod
    def bus(gpu: list[str]) -> str:
        return gpu[1].rpartition("/")[2]

    def write(self, path: str, **files: object) -> None:
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (folder / name).write_text(f"{value}\n")

    def build(self) -> None:
        self.write(f"{KFD}/0", gpu_id=0, name="", properties="cpu_cores_count 64\nsimd_count 0")
        self.write(f"{KFD}/1", gpu_id=0, name="", properties="cpu_cores_count 64\nsimd_count 0")
        for gpu in self.gpus:
            self.gpu(gpu)
        for line in self.board.adapters.strip().splitlines():
            self.adapter(*line.split())

    def gpu(self, gpu: list[str]) -> None:
        board, bus = self.board, self.bus(gpu)
        number = self.numbers[bus]
        values = {
            "simd_count": board.compute_units * 4,
            "simd_per_cu": 4,
            "vendor_id": 0x1002,
            "device_id": board.device,
            "gfx_target_version": board.gfx,
            "location_id": int(bus, 16) << 8,
            "domain": 0,
            "drm_render_minor": 126 + number,
            "hive_id": self.hive(bus),
            "unique_id": 7_000_000_000 + number,
            "num_xcc": board.dies,
        }
        text = "\n".join(f"{key} {value}" for key, value in values.items())
        self.write(f"{KFD}/{number}", gpu_id=40_000 + number, name="ip discovery", properties=text)
        for index, (other, hops) in enumerate(self.reached(bus).items()):
            count = self.links.get(frozenset((bus, other)), 0)
            link = f"type 11\nnode_from {number}\nnode_to {self.numbers[other]}\nweight {15 * hops}"
            least = LINK_MB_PER_S if count else 0
            link += f"\nmin_bandwidth {least}\nmax_bandwidth {count * LINK_MB_PER_S}\nflags 1"
            self.write(f"{KFD}/{number}/io_links/{index}", properties=link)
        ids = (0x1002, board.device, board.gpu_class)
        has_package = board.package_port is not None
        self.function(gpu[0], gpu[1].split("/"), ids, board.inner if has_package else board.slot, board.package_port)

    def reached(self, bus: str) -> dict[str, int]:
        """GPUs of the hive with the number of links on the way."""
        hops, edge = {bus: 0}, [bus]
        while edge:
            near = edge.pop(0)
            for pair in self.links:
                for other in pair - {near} if near in pair else ():
                    if other not in hops:
                        hops[other] = hops[near] + 1
                        edge.append(other)
        del hops[bus]
        return hops

    def hive(self, bus: str) -> int:
        members = [bus, *self.reached(bus)]
        return 9_000_000_000 + min(int(member, 16) for member in members) if self.board.has_hive else 0

    def adapter(self, name: str, numa: str, buses: str) -> None:
        board = self.board
        folder = self.function(numa, buses.split("/"), board.adapter_ids, (board.slot[0], 16), None)
        bdf = folder.rpartition("/")[2]
        if name.startswith("cxi"):
            self.write(folder, uevent=f"DRIVER=cxi_ss1\nPCI_SLOT_NAME={bdf}")
            self.write(f"{folder}/properties", speed=board.adapter_gbps * 1000, link=1)
            self.link(f"sys/class/cxi/{name}/device", folder)
            return
        self.write(folder, uevent=f"DRIVER=mlx5_core\nPCI_SLOT_NAME={bdf}")
        self.write(f"sys/class/infiniband/{name}", hca_type="MT4123", fw_ver="20.39.1002")
        self.link(f"sys/class/infiniband/{name}/device", folder)
        port = f"sys/class/infiniband/{name}/ports/1"
        self.write(port, state="4: ACTIVE", phys_state="5: LinkUp", link_layer="InfiniBand")
        self.write(port, rate=f"{board.adapter_gbps} Gb/sec (4X HDR)")
        self.write(f"{port}/gids", **{"0": "fe80:0000:0000:0000:d041:bb00:03f6:ceb8"})

    def function(
        self, numa: str, buses: list[str], ids: tuple[int, int, int], link: Link, package: tuple[int, int] | None
    ) -> str:
        """A function at the end of a chain of bridges; each upstream port is below a port of the host or a switch."""
        board = self.board
        folder = f"sys/devices/pci0000:{int(buses[0], 16) - 1:02x}"
        for depth, bus in enumerate(buses):
            is_last, is_package = depth == len(buses) - 1, bool(package) and depth == len(buses) - 2
            fast = link if is_last else board.slot if is_package else (board.slot[0], 16)
            now = board.slots.get(bus, fast)
            above, own = f"0000:{int(bus, 16) - 1:02x}:{int(bus, 16) % 32:02x}.0", f"0000:{bus}:00.0"
            bridge = package if package and is_package else (0x1000, 0xC010)
            vendor, device, kind = ids if is_last else (*bridge, 0x060400)
            self.port(f"{folder}/{above}", (0x1022, 0x1483, 0x060400), numa, now, fast)
            folder = f"{folder}/{above}/{own}"
            self.port(folder, (vendor, device, kind), numa, now, fast)
        return folder

    def port(self, folder: str, ids: tuple[int, int, int], numa: str, now: Link, best: Link) -> None:
        self.write(
            folder,
            **{"vendor": f"0x{ids[0]:04x}", "device": f"0x{ids[1]:04x}", "class": f"0x{ids[2]:06x}", "numa_node": numa},
            current_link_speed=f"{now[0]} GT/s PCIe",
            current_link_width=now[1],
            max_link_speed=f"{best[0]} GT/s PCIe",
            max_link_width=best[1],
        )
        self.link(f"{PCI}/{folder.rpartition('/')[2]}", folder)

    def link(self, name: str, target: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_symlink():
            path.symlink_to(os.path.relpath(self.root / target, path.parent))


def grow(board: Board, root: Path, *, lost: tuple[tuple[str, str], ...] = ()) -> Path:
    """Write `board` under `root`, without the xGMI links between the pairs of buses that are `lost`."""
    _Builder(board, root, frozenset(map(frozenset, lost))).build()
    return root


MI250_8 = Board(
    source="topo_16p1h.xml",
    device=0x740C,
    gfx=90010,
    compute_units=104,
    package_port=(0x1022, 0x14C7),
    slot=(16.0, 8),
    gpus="""
0 41/49/4c/4e 51:4 56:1 0e:2
0 41/49/4f/51 4e:4 56:1 59:1 11:1
0 41/52/54/56 4e:1 51:1 59:4 16:1
0 41/52/57/59 51:1 56:4 19:2
1 01/09/0c/0e 4e:2 11:4 8f:1
1 01/09/0f/11 51:1 0e:4 92:1 97:1
1 01/12/14/16 56:1 19:4 92:1 97:1
1 01/12/17/19 59:2 16:4 9a:1
2 c2/ca/cd/cf d2:4 d7:1 8f:2
2 c2/ca/d0/d2 cf:4 d7:1 da:1 92:1
2 c2/d3/d5/d7 cf:1 d2:1 da:4 97:1
2 c2/d3/d8/da d2:1 d7:4 9a:2
3 82/8a/8d/8f 0e:1 cf:2 92:4
3 82/8a/90/92 11:1 16:1 d2:1 8f:4
3 82/93/95/97 11:1 16:1 d7:1 9a:4
3 82/93/98/9a 19:1 da:2 97:4
""",
    adapters="""
mlx5_0 0 41/49/4b
mlx5_1 0 41/52/5a
mlx5_2 1 01/09/0b
mlx5_3 1 01/12/1a
mlx5_4 2 c2/ca/cc
mlx5_5 2 c2/d3/db
mlx5_7 3 82/8a/8c
mlx5_8 3 82/93/9b
""",
)
"""Eight MI250 in one hive, two switches deep."""

MI250X_4 = Board(
    source="topo_8p1h_3.xml",
    device=0x7408,
    gfx=90010,
    compute_units=110,
    adapter_ids=(0x17DB, 0x0501, 0x020000),
    gpus="""
3 c1 c6:4 c9:1 d9:2
3 c6 c1:4 ce:1 d6:1
1 c9 c1:1 ce:4 d1:2
1 ce c6:1 c9:4 de:1
0 d1 c9:2 d6:4 d9:1
0 d6 c6:1 d1:4 de:1
2 d9 c1:2 d1:1 de:4
2 de ce:1 d6:1 d9:4
""",
    adapters="""
cxi0 3 c5
cxi1 1 cd
cxi2 0 d5
cxi3 2 dd
""",
)
"""A node of Frontier's kind: four MI250X, each with a Slingshot adapter; the file counts 104 units of each die."""

MI300A_4 = Board(
    source="topo_4p_940.xml",
    device=0x74A0,
    gfx=90402,
    compute_units=228,
    gpu_class=0x120000,
    dies=6,
    adapter_ids=(0x17DB, 0x0501, 0x020000),
    gpus="""
2 82 c2:1 02:1 42:1
3 c2 82:1 02:1 42:1
0 02 82:1 c2:1 42:1
1 42 82:1 c2:1 02:1
""",
    adapters="""
cxi0 2 81
cxi1 3 c1
cxi2 0 01
cxi3 1 41
""",
)
"""A node of El Capitan's kind."""

MI300X_8 = Board(
    source="topo_8p_940.xml",
    device=0x74A1,
    gfx=90402,
    compute_units=304,
    gpu_class=0x120000,
    dies=8,
    package_port=(0x1022, 0x1500),
    slot=(32.0, 16),
    adapter_ids=(0x15B3, 0x1021, 0x020700),
    adapter_gbps=400,
    gpus="""
0 05/08/0a/0c 15:1 1e:1 69:1 9f:1 af:1 bf:1 df:1
0 0e/11/13/15 0c:1 1e:1 69:1 9f:1 af:1 bf:1 df:1
0 17/1a/1c/1e 0c:1 15:1 69:1 9f:1 af:1 bf:1 df:1
0 62/65/67/69 0c:1 15:1 1e:1 9f:1 af:1 bf:1 df:1
1 98/9b/9d/9f 0c:1 15:1 1e:1 69:1 af:1 bf:1 df:1
1 a8/ab/ad/af 0c:1 15:1 1e:1 69:1 9f:1 bf:1 df:1
1 b8/bb/bd/bf 0c:1 15:1 1e:1 69:1 9f:1 af:1 df:1
1 d8/db/dd/df 0c:1 15:1 1e:1 69:1 9f:1 af:1 bf:1
""",
    adapters="""
mlx5_0 0 05/07
mlx5_1 0 0e/10
mlx5_2 0 17/19
mlx5_3 0 62/64
mlx5_4 1 98/9a
mlx5_5 1 a8/aa
mlx5_6 1 b8/ba
mlx5_7 1 d8/da
""",
)
"""Eight MI300X."""

MI100_8 = Board(
    source="topo_8p6l.xml",
    device=0x738C,
    gfx=90008,
    compute_units=120,
    gpus="""
0 61/63 43:1 24:1 03:1 e3:1 a3:1 83:1
0 41/43 63:1 24:1 03:1 c3:1 a3:1 83:1
0 22/24 63:1 43:1 03:1 e3:1 c3:1 a3:1
0 01/03 63:1 43:1 24:1 e3:1 c3:1 83:1
1 e1/e3 63:1 24:1 03:1 c3:1 a3:1 83:1
1 c1/c3 43:1 24:1 03:1 e3:1 a3:1 83:1
1 a1/a3 63:1 43:1 24:1 e3:1 c3:1 83:1
1 81/83 63:1 43:1 03:1 e3:1 c3:1 a3:1
""",
    adapters="""
mlx5_0 1 9a
""",
)
"""Eight MI100 with six links each."""

MI210_3 = Board(
    source="topo_3p_pcie.xml",
    device=0x740F,
    gfx=90010,
    compute_units=104,
    package_port=(0x1022, 0x14C7),
    has_hive=False,
    gpus="""
0 21/23
1 81/83
1 e2/e4
""",
    adapters="""
mlx5_0 0 41
""",
)
"""Three MI210 without a bridge."""

BOARDS = {
    "mi250-8": MI250_8,
    "mi250x-4": MI250X_4,
    "mi300a-4": MI300A_4,
    "mi300x-8": MI300X_8,
    "mi100-8": MI100_8,
    "mi210-3": MI210_3,
}
