"""Rejects device profiles whose figures contradict each other: sparse peaks, floors above a peak."""

from __future__ import annotations

from primus.errors import UsageError
from primus.machine.profiles.schema import Dtype, Profile

FORMULA_TOLERANCE = 0.002
"""Tolerance between a published AMD peak and units x clock x FLOP: the rounding of data sheets."""
RATIO_TOLERANCE = 0.02
"""Tolerance between dense fp8 and twice bf16 on NVIDIA, whose L40S data sheet lists 733 and 362; a sparse figure is off
by 100 %."""


def check_profile(profile: Profile, file: str) -> None:
    """Check that all figures of a profile can be true.

    Args:
        profile: The profile.
        file: What errors call its file.

    Raises:
        UsageError: Two figures contradict each other.
    """

    def refuse(problem: str) -> UsageError:
        return UsageError(f"{file}: {profile.model}: {problem}", "peaks are dense, of a whole GPU; see its data sheet")

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
    """Pairs of known peaks with the expected ratio between them."""
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
