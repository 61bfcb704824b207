"""Whether a device multiplies the numbers that an experiment asks for."""

from __future__ import annotations

from primus.config.number_formats import find_block_format
from primus.config.schema import Trainer
from primus.errors import UsageError
from primus.machine.profile import find_profile_by_name

NVIDIA_ONLY = ("nvfp4",)


def check_number_format(trainer: Trainer, device_name: str) -> None:
    """Check that a device multiplies the numbers that are asked for; one that is not known is not judged.

    The matrix units of AMD's CDNA 4 have MXFP8 and MXFP4, those of NVIDIA's Blackwell also NVFP4; earlier ones have no
    scales of blocks (AMD CDNA 4 and CDNA 3 instruction sets, MFMA; NVIDIA PTX ISA, tcgen05.mma). All of them and no
    others have a peak of 4-bit products.

    Raises:
        UsageError: It does not.
    """
    wanted, profile = find_block_format(trainer), find_profile_by_name(device_name)
    if not wanted or profile is None:
        return
    key = "fp4_recipe" if trainer.backend_args.get("fp4") else "fp8_recipe"
    remedy = "set fp4: null" if key == "fp4_recipe" else "set fp8_recipe: tensorwise"
    if "fp4" not in profile.peaks:
        raise UsageError(f"{key}: {wanted}: the matrix units of {profile.model} have no scales of blocks", remedy)
    if wanted in NVIDIA_ONLY and profile.vendor != "nvidia":
        raise UsageError(f"{key}: {wanted}: a format of NVIDIA; {profile.model} has mxfp8 and mxfp4", remedy)
