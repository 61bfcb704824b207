"""Facts of nodes as they are built by the vendors, made up for tests that need no kernel's files."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

from primus.machine.facts import Cpu, Device, Link, MachineFacts, Partition, PcieLink, RdmaDevice, RdmaPort

FULL_LINK = PcieLink(speed_gts=32, width=16, max_speed_gts=32, max_width=16)


def node(
    num_cards: int = 8,
    model: str = "MI300X",
    *,
    num_hives: int = 1,
    num_partitions: int = 1,
    num_adapters: int = 8,
    num_links: int | None = None,
    numa_of: Callable[[int], int | None] = lambda i: i // 4,
    has_paths: bool = True,
) -> MachineFacts:
    """A node whose cards are linked within each hive; by NVLink where `num_links` is given.

    Card and adapter of one number share a PCIe switch where `has_paths`.
    """
    kind = "xgmi" if num_links is None else "nvlink"
    devices = tuple(
        Device(
            index=i,
            vendor="amd" if kind == "xgmi" else "nvidia",
            model=model,
            bdf=f"0000:{5 + 16 * i:02x}:00.0",
            memory_bytes=192 << 30,
            partitions=tuple(Partition(index=i * num_partitions + part) for part in range(num_partitions)),
            partition_mode=None if kind == "nvlink" else "SPX" if num_partitions == 1 else "CPX",
            hive=str(i * num_hives // num_cards) if kind == "xgmi" and num_cards > 1 else None,
            numa_node=numa_of(i),
            pci_path=(*_switch(i), f"port-{i}-1", f"0000:{5 + 16 * i:02x}:00.0") if has_paths else (),
            pcie=FULL_LINK,
        )
        for i in range(num_cards)
    )
    return MachineFacts(
        host="node-17",
        devices=devices,
        links=tuple(
            Link(kind="xgmi" if num_links is None else "nvlink", first=a, second=b, num_links=num_links)
            for a, b in combinations(range(num_cards), 2)
            if a * num_hives // num_cards == b * num_hives // num_cards
        ),
        rdma=tuple(
            RdmaDevice(
                name=f"mlx5_{i}",
                numa_node=numa_of(i),
                bdf=f"0000:{6 + 16 * i:02x}:00.0",
                pci_path=(*_switch(i), f"port-{i}-2", f"0000:{6 + 16 * i:02x}:00.0") if has_paths else (),
                ports=(RdmaPort(state="ACTIVE", physical_state="LinkUp", rate_gbps=400, link_layer="InfiniBand"),),
            )
            for i in range(num_adapters)
        ),
        cpu=Cpu(model="AMD EPYC 9654 96-Core Processor", numa_nodes=len({numa_of(i) for i in range(num_cards)})),
    )


def _switch(number: int) -> tuple[str, ...]:
    return (f"pci0000:{number:02x}", f"root-port-{number}", f"switch-{number}")
