"""What differs between two runs: settings, environment, packages and losses."""

from __future__ import annotations

import math
from typing import Any

from msgspec import Struct

from primus.redaction import are_comparable
from primus.runs import events
from primus.runs.store import Run

SHELL = "shell"
"""Source of the variables that no part of the launch has set."""


class RunDifference(Struct, frozen=True):
    """One difference."""

    what: str
    a: Any
    b: Any


class LossDifference(Struct, frozen=True, kw_only=True):
    """Difference between the losses of two runs."""

    common_steps: int
    """Steps that both runs have taken."""
    different_steps: int
    """Steps among these whose losses are not bitwise equal."""
    first_step: int | None
    """The first of these."""
    first_absolute: float | None
    """Difference there; None if one of the losses is not a number."""
    max_absolute: float | None
    """Largest difference."""
    max_absolute_step: int | None
    """Step of it."""
    max_relative: float | None
    """Largest difference relative to the larger loss of the two."""
    max_relative_step: int | None
    """Step of it."""


def compare_mappings(a: dict[str, Any], b: dict[str, Any]) -> list[RunDifference]:
    """The values that differ; one that is missing is `absent`."""
    absent = "absent"
    names = sorted(name for name in a.keys() | b.keys() if a.get(name, absent) != b.get(name, absent))
    return [RunDifference(name, a.get(name, absent), b.get(name, absent)) for name in names]


def compare_environments(a: Run, b: Run) -> list[RunDifference]:
    """What differs between the variables and machines of two runs, as far as hidden values can be compared."""
    found = compare_mappings(read_run_environment(a), read_run_environment(b))
    return [each for each in found if are_comparable(each.a, each.b)]


def read_variable_dump(run: Run) -> dict[str, tuple[str, str]]:
    """Value and source of each variable of the workers."""
    dump = run.directory / "env" / "primus_env_dump.txt"
    lines = dump.read_text(encoding="utf-8", errors="replace").splitlines() if dump.is_file() else []
    found = {}
    for line in lines:
        assignment, _, source = line.rpartition("  # ")
        name, is_set, value = assignment.partition("=")
        if is_set:
            found[name] = value, source
    return found


def read_run_environment(run: Run) -> dict[str, str]:
    """Variables that the run set itself, and the machine's facts."""
    variables = {name: value for name, (value, source) in read_variable_dump(run).items() if source != SHELL}
    devices = run.directory / "env" / "gpu_model.txt"
    metadata = run.read_metadata()
    return variables | {
        "(host)": metadata.host,
        "(devices)": devices.read_text().strip() if devices.is_file() else "unknown",
        "(git revision)": metadata.git_revision or "unknown",
    }


def read_run_packages(run: Run) -> dict[str, str]:
    """Versions of the packages that the run recorded."""
    path = run.directory / "env" / "packages.txt"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return dict(line.split("==", 1) for line in lines if "==" in line)


def compare_losses(a: Run, b: Run) -> LossDifference:
    """Compare the losses of two runs on their common steps; two values that are not numbers are equal."""
    losses_a, losses_b = (
        {event["step"]: event.get("loss") for event in events.read_steps(run.events)} for run in (a, b)
    )
    common = sorted(losses_a.keys() & losses_b.keys())
    pairs = {step: (_parse_loss(losses_a[step]), _parse_loss(losses_b[step])) for step in common}
    apart = [step for step, (x, y) in pairs.items() if x != y]
    gaps = {step: abs(x - y) for step in apart for x, y in [pairs[step]] if x is not None and y is not None}
    relative = {step: gap / max(abs(each or 0.0) for each in pairs[step]) for step, gap in gaps.items()}
    widest, widest_relative = (
        max(gaps, key=gaps.__getitem__, default=None),
        max(relative, key=relative.__getitem__, default=None),
    )
    return LossDifference(
        common_steps=len(common),
        different_steps=len(apart),
        first_step=apart[0] if apart else None,
        first_absolute=gaps.get(apart[0]) if apart else None,
        max_absolute=None if widest is None else gaps[widest],
        max_absolute_step=widest,
        max_relative=None if widest_relative is None else relative[widest_relative],
        max_relative_step=widest_relative,
    )


def _parse_loss(loss: Any) -> float | None:
    """A loss; None if it is missing or not finite."""
    return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else None


def describe_losses(found: LossDifference) -> str:
    """A sentence about the losses."""
    if found.common_steps == 0:
        return "no common steps"
    if found.first_step is None:
        return f"equal bit by bit on all {found.common_steps} common steps"
    text = f"differ on {found.different_steps} of {found.common_steps} common steps, from step {found.first_step} on"
    if found.max_absolute is None:
        return text
    first = f" (by {found.first_absolute:.3g})" if found.first_absolute is not None else ""
    return (
        f"{text}{first}; at most by {found.max_absolute:.3g} (step {found.max_absolute_step}), "
        f"relatively {found.max_relative:.3g} (step {found.max_relative_step})"
    )
