"""The process of one rank that is executed on fake tensors: reads a job from standard input, prints its answer."""

from __future__ import annotations

import os
import sys
import traceback
import warnings

import msgspec
from msgspec import Struct

from primus import patch, registry
from primus.config.schema import Experiment
from primus.errors import PrimusError, UnfitError, UsageError, format_error_place
from primus.framework import FRAMEWORKS, Framework
from primus.prediction.rank_record import RankRecord


class RankJob(Struct, frozen=True, kw_only=True):
    """A rank to execute."""

    experiment: Experiment
    rank: int
    world_size: int
    devices_per_node: int


class RankAnswer(Struct, frozen=True, kw_only=True):
    """Its record, or why it cannot run."""

    rank: int
    record: RankRecord | None = None
    problem: str = ""
    """What the rank would have failed with."""
    hint: str = ""
    is_unknown: bool = False
    """Whether the rank was not executed, so that nothing is known of it."""
    trace: str = ""
    """The traceback of an error that no one has put into words."""


def has_fake_rank(backend: Framework) -> bool:
    """Whether a framework has a step on fake tensors, instead of the default that refuses it."""
    return not getattr(backend.run_fake_rank, "is_optional", False)


def execute_rank(job: RankJob) -> RankAnswer:
    """The answer for a job; all errors of the engine are in it."""
    name = job.experiment.trainer.framework
    backend = registry.load_plug_in(FRAMEWORKS, name)
    try:
        if backend.ENGINES and has_fake_rank(backend):
            for choice in patch.choose_patches(os.environ, lambda: name):
                if choice.applies:
                    patch.apply_patch(choice)
        record = backend.run_fake_rank(job.experiment, job.rank, job.world_size, job.devices_per_node)
    except NotImplementedError:
        return RankAnswer(
            rank=job.rank,
            problem=f"framework {name} has no step on fake tensors",
            hint="`analyze speed` predicts its memory and time by formulas; --engine native executes the model",
            is_unknown=True,
        )
    except PrimusError as error:
        unknown = isinstance(error, UnfitError)  # what this machine lacks says nothing of the cluster
        return RankAnswer(rank=job.rank, problem=error.problem, hint=error.hint or "", is_unknown=unknown)
    except Exception as error:  # noqa: BLE001 - whatever PyTorch or a plug-in raises is what the cluster would have shown
        text = str(error).strip().splitlines()
        return RankAnswer(
            rank=job.rank,
            problem=f"{type(error).__name__} at {format_error_place(error)}: {text[0] if text else ''}",
            trace=traceback.format_exc(),
        )
    return RankAnswer(rank=job.rank, record=record)


def main() -> None:
    """Answer the job on standard input."""
    # Engines print to standard output, which carries the answer.
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        warnings.simplefilter("ignore")
        job = msgspec.json.decode(sys.stdin.buffer.read(), type=RankJob)
        answers.write(msgspec.json.encode(execute_rank(job)))


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        sys.exit(f"{error.problem}; {error.hint}")
