"""The native backend: a decoder-only transformer trained with PyTorch's own distributed parts."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from primus.errors import UnfitError
from primus.frameworks.native.support import KEYS as KEYS
from primus.frameworks.native.support import check as check
from primus.package_files import PROGRAM

if TYPE_CHECKING:
    import torch

    from primus.checkpoint.weights import WeightReader
    from primus.config.schema import Experiment, ModelSpec
    from primus.frameworks.native.engine.loaded_model import LoadedModel
    from primus.prediction.rank_record import RankRecord
    from primus.runs.attempt import Attempt

ENGINES = ()
STAGES = ("pre_trainer", "post_trainer", "rl_trainer")
USES_TORCH = True


def train(experiment: Experiment, attempt: Attempt) -> None:
    """Train as one rank of a run, until the last step or a signal.

    Raises:
        PrimusError: The training fails; the message says why.
    """
    _require_torch()
    from primus.frameworks.native.engine import run

    run.train(experiment, attempt)


def _require_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise UnfitError(
            f"the native framework needs PyTorch, which cannot be imported: {error}",
            f"{PROGRAM} setup installs it",
        ) from None


def run_fake_step(experiment: Experiment, device: str, observer: AbstractContextManager[object]) -> None:
    """Run the passes of one micro batch on fake tensors inside of `observer`."""
    from primus.frameworks.native.engine import fake_step

    fake_step.run_fake_step(experiment, device, observer)


def run_fake_rank(experiment: Experiment, rank: int, world_size: int, devices_per_node: int) -> RankRecord:
    """A step of one rank, executed on fake tensors."""
    _require_torch()
    from primus.frameworks.native.engine import fake_rank

    return fake_rank.run_fake_rank(experiment, rank, world_size, devices_per_node)


def train_reference(device: torch.device) -> tuple[str, float]:
    """Train the quick start's model for a few fixed steps; returns a digest of losses and weights, and the last loss.

    Two devices of the same model with the same libraries have the same digest.
    """
    from primus.frameworks.native.engine import reference

    return reference.train(device)


def try_kernels(device: torch.device) -> list[tuple[str, str]]:
    """Try the kernels of a dense model and of one with experts; their names, and what is wrong with each."""
    from primus.frameworks.native.engine import reference

    return reference.try_kernels(device)


def compute_logits(spec: ModelSpec, weights: WeightReader, tokens_BS: torch.Tensor) -> torch.Tensor:
    """Logits [B, S, V] of a model with weights in hub names, float32 on the CPU.

    Raises:
        UsageError: native does not support this model.
    """
    from primus.frameworks.native.engine.loaded_model import compute_logits as compute

    return compute(spec, weights, tokens_BS)


def load_model(spec: ModelSpec, weights: WeightReader) -> LoadedModel:
    """A model with weights in hub names that generates texts and scores them, on a GPU if there is one.

    Raises:
        UsageError: native does not support this model.
    """
    from primus.frameworks.native.engine import loaded_model

    return loaded_model.load_model(spec, weights)
