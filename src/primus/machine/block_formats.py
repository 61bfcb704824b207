"""The number formats whose elements share scales in blocks, and which GPUs multiply them: MXFP8, MXFP4, NVFP4."""

from __future__ import annotations

from primus.machine.profile import Profile

NVIDIA_ONLY = ("nvfp4",)


def find_format_problem(block_format: str, profile: Profile) -> str:
    """Why a GPU does not multiply numbers of a block format; empty if it does.

    The matrix units of AMD's CDNA 4 have MXFP8 and MXFP4, those of NVIDIA's Blackwell also NVFP4; earlier ones have no
    scales of blocks (AMD CDNA 4 and CDNA 3 instruction sets, MFMA; NVIDIA PTX ISA, tcgen05.mma). All of them and no
    others have a peak of 4-bit products.
    """
    if "fp4" not in profile.peaks:
        return f"the matrix units of {profile.model} have no scales of blocks"
    if block_format in NVIDIA_ONLY and profile.vendor != "nvidia":
        return f"a format of NVIDIA; {profile.model} has mxfp8 and mxfp4"
    return ""
