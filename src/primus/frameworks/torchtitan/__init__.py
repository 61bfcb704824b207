"""TorchTitan: its trainer, built from Python, with the data, schedule, reports and checkpoints of primus."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from primus.config.schema import Experiment
    from primus.prediction.rank_record import RankRecord

ENGINES = ("torchtitan",)
USES_TORCH = True


def run_fake_rank(experiment: Experiment, rank: int, world_size: int, devices_per_node: int) -> RankRecord:
    """A step of one rank by torchtitan's trainer, executed on fake tensors."""
    from primus.frameworks.torchtitan.engine import fake_rank

    return fake_rank.run_fake_rank(experiment, rank, world_size, devices_per_node)
