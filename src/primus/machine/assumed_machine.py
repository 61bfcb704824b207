"""An assumed machine (`--assume mi355x:8`), to plan for a machine that you do not have access to."""

from __future__ import annotations

from itertools import combinations

from primus import registry
from primus.errors import UsageError, did_you_mean
from primus.machine import profile
from primus.machine.facts import Device, Link, LinkKind, MachineFacts, Partition, PcieLink, RdmaDevice, RdmaPort
from primus.machine.profile import Nic, Profile

USUAL_DEVICES = 8
"""Devices of a node if no number is given."""
MAX_GPUS = 72
"""GPUs of the largest NVLink domain: NVL72."""


def build_assumed_machine(text: str, nics: str | None = None) -> MachineFacts:
    """The machine that ``MODEL[:GPUS]`` or ``cpu`` names, as its profile describes it.

    Args:
        text: The machine.
        nics: Kind of its NICs, one for each GPU.

    Raises:
        UsageError: The model or kind does not exist, or the number is not in 1 to 72.
    """
    word, colon, number = text.partition(":")
    model = _find_model(word)
    nic = _find_nic(nics) if nics is not None else None
    if model.vendor == "cpu":
        return MachineFacts(assumed=True, rdma=_build_rdma_devices(nic, 1))
    usual = max(model.server_sizes, default=max(1, USUAL_DEVICES // model.devices_per_gpu))
    gpus = _parse_gpu_count(text, number) if colon else usual
    devices = tuple(_build_device(model, index) for index in range(gpus))
    return MachineFacts(
        assumed=True, devices=devices, links=_build_links(model, devices), rdma=_build_rdma_devices(nic, gpus)
    )


def _find_model(word: str) -> Profile:
    try:
        return profile.find_profile(word)
    except UsageError:
        models = [profile.format_typed_name(known) for known in profile.load_all_profiles()]
        raise UsageError(f"--assume: unknown GPU model '{word}'", did_you_mean(word, models)) from None


def _find_nic(kind: str) -> Nic:
    found = profile.load_nic(kind.lower())
    if found is None:
        known = registry.list_plug_ins("nics")
        raise UsageError(f"--assume-nic: unknown NIC kind '{kind}'", did_you_mean(kind.lower(), known))
    return found


def _build_rdma_devices(nic: Nic | None, number: int) -> tuple[RdmaDevice, ...]:
    """NICs with one active port each, named as their driver names them."""
    if nic is None:
        return ()
    prefix = nic.name_prefixes[0] if nic.name_prefixes else nic.kind
    prefix = prefix if prefix.endswith("_") or nic.link_layer == "Slingshot" else f"{prefix}_"
    port = RdmaPort(state="ACTIVE", physical_state="LinkUp", link_layer=nic.link_layer)
    return tuple(RdmaDevice(name=f"{prefix}{index}", kind=nic.kind, ports=(port,)) for index in range(number))


def _parse_gpu_count(text: str, number: str) -> int:
    if not number.isdecimal() or not 1 <= int(number) <= MAX_GPUS:
        raise UsageError(f"--assume {text}: invalid number of GPUs: {number!r}", f"use 1 to {MAX_GPUS}")
    return int(number)


def _build_device(model: Profile, index: int) -> Device:
    assert model.vendor != "cpu"
    maker = "AMD Instinct" if model.vendor == "amd" else "NVIDIA"
    return Device(
        index=index,
        vendor=model.vendor,
        model=model.model,
        name=f"{maker} {model.model}",
        device_id=model.device_ids[0] if model.device_ids else None,
        architecture=model.architecture,
        compute_units=model.compute_units,
        memory_bytes=model.memory_bytes,
        partitions=tuple(_build_partition(model, index, die) for die in range(model.devices_per_gpu)),
        partition_mode="SPX" if model.xcds > model.devices_per_gpu else None,
        hive=str(index // model.hive_size) if model.hive_size else None,
        pcie=PcieLink(
            speed_gts=model.pcie_gts, width=model.pcie_width, max_speed_gts=model.pcie_gts, max_width=model.pcie_width
        ),
        sources={"model": "assumed"},
    )


def _build_partition(model: Profile, gpu: int, die: int) -> Partition:
    share = model.devices_per_gpu
    return Partition(
        index=gpu * share + die,
        compute_units=model.compute_units // share if model.compute_units else None,
        memory_bytes=model.memory_bytes // share if model.memory_bytes else None,
    )


def _build_links(model: Profile, devices: tuple[Device, ...]) -> tuple[Link, ...]:
    """Links between all GPUs of a hive."""
    kind: LinkKind = "xgmi" if model.vendor == "amd" else "nvlink"
    return tuple(
        Link(kind=kind, first=a.index, second=b.index)
        for a, b in combinations(devices, 2)
        if a.hive is not None and a.hive == b.hive
    )
