"""Whether a device multiplies the numbers that an experiment asks for."""

from __future__ import annotations

from primus.config.number_formats import find_block_format
from primus.config.schema import Trainer
from primus.errors import UsageError
from primus.machine.block_formats import find_format_problem
from primus.machine.profile import find_profile_by_name


def check_number_format(trainer: Trainer, device_name: str) -> None:
    """Check that a device multiplies the numbers that are asked for; one that is not known is not judged.

    Raises:
        UsageError: It does not.
    """
    wanted, profile = find_block_format(trainer), find_profile_by_name(device_name)
    problem = find_format_problem(wanted, profile) if wanted and profile else ""
    if problem:
        key = "fp4_recipe" if trainer.backend_args.get("fp4") else "fp8_recipe"
        remedy = "set fp4: null" if key == "fp4_recipe" else "set fp8_recipe: tensorwise"
        raise UsageError(f"{key}: {wanted}: {problem}", remedy)
