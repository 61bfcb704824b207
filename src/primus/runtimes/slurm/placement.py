"""Where Slurm shall place the nodes of a job: `--placement` in options of Slurm."""

from __future__ import annotations

from primus.errors import UsageError

NEAR_WAIT = "00:05:00"
"""Longest wait for fewer switches: the default of max_switch_wait (slurm.conf(5), SchedulerParameters), its limit."""
REQUIRED_WAIT = "365-00:00:00"
"""Slurm has no wait without end, and takes a longer one than max_switch_wait as that."""
LEVELS = ("near", "any", "leaf", "block")


def check_placement(placement: str | None) -> None:
    """Check the value of `--placement`.

    Raises:
        UsageError: Slurm cannot place nodes by it.
    """
    if placement is not None and placement not in LEVELS:
        raise UsageError(
            f"slurm: --placement {placement}: Slurm places jobs by leaf switches or blocks",
            "use near, any, leaf (topology/tree) or block (topology/block)",
        )


def list_placement_options(placement: str | None, num_nodes: int) -> tuple[str, ...]:
    """Options of srun and sbatch for a placement."""
    if placement == "near":
        return (f"--switches=1@{NEAR_WAIT}",)
    if placement == "leaf":
        return (f"--switches=1@{REQUIRED_WAIT}",)
    return (f"--segment={num_nodes}",) if placement == "block" else ()


def describe_placement(placement: str | None) -> tuple[str, ...]:
    """Notes for a dry run."""
    if placement == "near":
        return (f"--placement near: as few switches as hold the nodes, counted at submission; any after {NEAR_WAIT}",)
    if placement == "leaf":
        return ("--placement leaf: Slurm waits for one leaf at most max_switch_wait of its SchedulerParameters",)
    return ()
