"""Check that NICs can access device memory directly: by a kernel module or DMA-BUF."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator

from primus.preflight.findings.finding import CheckFinding
from primus.preflight.findings.node import PreflightNode

NVIDIA_MODULES = ("nvidia_peermem", "nv_peer_mem", "efa_nv_peermem")
"""NVIDIA's module (GPUDirect RDMA documentation), its former name, and the module of Amazon's EFA NICs
(amzn-drivers)."""
AMD_PEERS = "sys/kernel/mm/memory_peers/amdkfd/version"
"""Created by amdgpu's peer memory client with MLNX_OFED (ROCm/rccl, net_ib)."""
AMD_SYMBOL = re.compile(r"\bib_register_peer_memory_client\b")
"""Symbol in /proc/kallsyms if the kernel has the peer memory interface (ROCm/rccl, net_ib)."""
DMABUF_OPTIONS = ("CONFIG_DMABUF_MOVE_NOTIFY", "CONFIG_PCI_P2PDMA")
"""Kernel options that RCCL needs to register device memory by DMA-BUF (ROCm/rccl, rocmwrap)."""
DMABUF_KERNEL = (5, 12)
"""First kernel whose RDMA core registers DMA-BUF memory (Linux 5.12, ibv_reg_dmabuf_mr)."""


def check_peer_memory(node: PreflightNode) -> Iterator[CheckFinding]:
    """Device memory can be registered with the RDMA NICs, if the node has both."""
    if not node.has_devices or not node.has_rdma:
        return
    is_amd = any(device.vendor == "amd" for device in node.facts.devices)
    ways = _find_amd_ways(node) if is_amd else _find_nvidia_ways(node)
    if not ways and is_amd and not _read_kernel_options(node):
        yield node.judge("network.peer_memory/unknown", False)
        return
    row = "network.peer_memory/amd" if is_amd else "network.peer_memory"
    yield node.judge(row, bool(ways), ", ".join(ways) or "none")


def _find_nvidia_ways(node: PreflightNode) -> list[str]:
    ways = [name for name in NVIDIA_MODULES if (node.tree.root / "sys/module" / name).is_dir()]
    is_open = "Open Kernel Module" in (node.tree.read_text("proc/driver/nvidia/version") or "")
    if is_open and _parse_kernel_version(node) >= DMABUF_KERNEL:
        ways.append("DMA-BUF with the open kernel modules")
    return ways


def _find_amd_ways(node: PreflightNode) -> list[str]:
    ways = ["amdkfd memory peer"] if (node.tree.root / AMD_PEERS).is_file() else []
    if not ways and _has_symbol(node):
        ways.append("ib_register_peer_memory_client")
    options = _read_kernel_options(node)
    if _parse_kernel_version(node) >= DMABUF_KERNEL and all(f"{option}=y" in options for option in DMABUF_OPTIONS):
        ways.append("DMA-BUF")
    return ways


def _has_symbol(node: PreflightNode) -> bool:
    """Whether the kernel has the symbol. The file is larger than `tree.MAX_BYTES` and is read line by line."""
    try:
        with (node.tree.root / "proc/kallsyms").open(errors="replace") as lines:
            return any(AMD_SYMBOL.search(line) for line in lines)
    except OSError:
        return False


def _read_kernel_options(node: PreflightNode) -> set[str]:
    kernel = node.facts.software.kernel
    for path in (f"boot/config-{kernel}", f"lib/modules/{kernel}/config"):
        if text := node.tree.read_text(path):
            return set(text.splitlines())
    try:
        with gzip.open(node.tree.root / "proc/config.gz", "rt", errors="replace") as lines:
            return {line.rstrip("\n") for line in lines}
    except (OSError, EOFError):
        return set()


def _parse_kernel_version(node: PreflightNode) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", node.facts.software.kernel or "")
    return (int(match[1]), int(match[2])) if match else (0, 0)


CHECKS = (check_peer_memory,)
