"""Peak rates of devices, for MFU."""

from __future__ import annotations

PEAK_BF16_TFLOPS: dict[str, float | None] = {
    "A100": 312.0,  # NVIDIA A100 data sheet
    "H100 PCIe": 756.0,  # NVIDIA H100 data sheet, half of the figure with sparsity
    "H100 NVL": None,  # slower than the SXM module; no dense figure at hand
    "H100": 989.4,
    "H200 NVL": None,  # likewise
    "H200": 989.4,  # NVIDIA H200 data sheet
    "MI300X": 1307.4,  # 304 CU x 2100 MHz x 2048 FLOP; AMD MI300X data sheet
    "MI325X": 1307.4,  # the same; AMD MI325X data sheet
    "MI355X": 2516.6,  # 256 CU x 2400 MHz x 4096 FLOP; AMD MI355X data sheet
}
"""Dense bfloat16 matrix TFLOP/s by a part of the name that torch gives the device."""


def peak_tflops(device_name: str, bf16: bool) -> float | None:
    """Dense peak of the training precision; None where it is not known, as MFU then is."""
    if not bf16:
        return None
    known = [name for name in PEAK_BF16_TFLOPS if name in device_name.replace("_", " ")]
    return PEAK_BF16_TFLOPS[max(known, key=len)] if known else None
