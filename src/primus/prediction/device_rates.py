"""What a device and its links reach: from its profile, or from results of `benchmark` and `preflight --perf`."""

from __future__ import annotations

from msgspec import Struct

from primus.errors import UsageError
from primus.machine.profile import Dtype, Profile, format_typed_name

TYPICAL_SHARE = {"amd": 0.6, "nvidia": 0.78}
"""Best product in bf16 over the peak, where a profile has no measured one: the mean of those that have one (MI300X,
MI325X, MI355X: 0.51 to 0.62; A100 to GB200: 0.71 to 0.87; stas00/ml-engineering, MAMF)."""
PRODUCTS: tuple[Dtype, ...] = ("bf16", "fp8", "fp4")
LOWER_PRECISION = {"fp8": 1.8, "fp4": 2.8}
"""Best product in fp8 over that in bf16, where it is not measured (H100 1.77, B200 1.97, GB200 1.98; the same source);
in fp4 assumed, at half of the gain of the peaks."""
USABLE_NETWORK = 0.92
"""Of the line rate of a NIC: 46 of 50 GB/s (sendrecv of ROCm/cvs rccl_config.json: 47 to 48)."""
USABLE_PCIE = 0.8


class DeviceRates(Struct, frozen=True, kw_only=True):
    """Rates of one device as a process sees it: TFLOP/s of the best measured product, GB/s (1e9) of memory, links."""

    name: str
    tflops: dict[str, float]
    """Best product by precision."""
    peak_tflops: dict[str, float]
    """Dense peak by precision."""
    memory_bytes: int | None
    memory_gb_per_s: float
    link_gb_per_s: float
    """Bus bandwidth of a ring within a domain."""
    domain: int
    """Devices that are linked with each other."""
    network_gb_per_s: float
    """Of one device to other nodes."""
    power_w: int | None = None
    sources: dict[str, str] = {}
    """Where each number comes from."""
    assumptions: dict[str, str] = {}
    """What is assumed where the profile lacks a figure, by precision, `links` or `network`."""

    def list_assumptions(self, precision: str) -> list[str]:
        """Those that matter for products of a precision."""
        return [text for name, text in self.assumptions.items() if name not in LOWER_PRECISION or name == precision]


def read_rates(profile: Profile, devices_of_node: int) -> DeviceRates:
    """The rates of a device by its profile.

    Raises:
        UsageError: The profile lacks figures without which nothing can be predicted.
    """
    share = profile.devices_per_gpu
    name = format_typed_name(profile)
    missing = [
        key
        for key, value in {"peaks.bf16": profile.peaks.get("bf16"), "memory_gb_per_s": profile.memory_gb_per_s}.items()
        if not value
    ]
    if missing or profile.vendor == "cpu":
        lacking = ", ".join(missing) or "peaks.bf16, memory_gb_per_s"
        raise UsageError(
            f"the profile {name} lacks {lacking}: its step time cannot be predicted",
            f"put {name}.yaml with them into profiles/ of a folder of $PRIMUS_PLUGINS (extends: {name})",
        )
    assumptions: dict[str, str] = {}
    sources = {"peak": profile.source, "memory": profile.source}
    tflops = _choose_products(profile, sources, assumptions)
    link = _choose_link(profile, sources, assumptions)
    network = profile.network_gb_per_s
    if network is None:
        network = 50.0 / share
        assumptions["network"] = f"{name} has no network_gb_per_s: a NIC of 400 Gbit/s for each GPU"
    sources.setdefault("network", "profile: usual NIC of a server" if profile.network_gb_per_s else "assumed")
    return DeviceRates(
        name=name,
        tflops={dtype: rate / share for dtype, rate in tflops.items()},
        peak_tflops={dtype: rate / share for dtype, rate in profile.peaks.items()},
        memory_bytes=profile.memory_bytes // share if profile.memory_bytes else None,
        memory_gb_per_s=(profile.memory_gb_per_s or 0) / share,
        link_gb_per_s=link / share,
        domain=max(1, (profile.hive_size or devices_of_node) * share),
        network_gb_per_s=network * USABLE_NETWORK,
        power_w=profile.power_w,
        sources=sources,
        assumptions=assumptions,
    )


def _choose_products(profile: Profile, sources: dict[str, str], assumptions: dict[str, str]) -> dict[str, float]:
    name, peaks = format_typed_name(profile), profile.peaks
    measured: dict[str, float] = {dtype: profile.achieved[dtype] for dtype in PRODUCTS if dtype in profile.achieved}
    sources["products"] = "profile: best measured product (stas00/ml-engineering, MAMF)"
    if "bf16" not in measured:
        factor = TYPICAL_SHARE["amd" if profile.vendor == "amd" else "nvidia"]
        measured["bf16"] = factor * peaks["bf16"]
        assumptions["bf16"] = f"{name} has no measured product: {factor:.0%} of the peak in bf16"
    for dtype in PRODUCTS[1:]:
        factor = LOWER_PRECISION[dtype]
        if dtype in peaks and dtype not in measured:
            measured[dtype] = factor * measured["bf16"]
            assumptions[dtype] = f"{name} has no measured product in {dtype}: {factor} x bf16"
    measured["fp32"] = min(peaks.get("tf32") or peaks.get("fp32") or peaks["bf16"] / 8, measured["bf16"] / 2)
    return measured


def _choose_link(profile: Profile, sources: dict[str, str], assumptions: dict[str, str]) -> float:
    if profile.link_gb_per_s:
        sources["links"] = "profile: bus bandwidth of a large gather within a domain"
        return profile.link_gb_per_s
    name = format_typed_name(profile)
    speed, width = profile.pcie_gts or 32.0, profile.pcie_width or 16
    rate = USABLE_PCIE * speed * width / 8
    sources["links"] = "PCIe"
    assumptions["links"] = (
        f"{name} has no link_gb_per_s: its GPUs are taken to exchange over PCIe, {rate:.0f} GB/s; links are faster"
    )
    return rate
