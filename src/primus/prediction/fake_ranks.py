"""Ranks of a training that does not happen, each executed in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
from msgspec import structs

from primus import interpreter, registry
from primus.config.checks import count_accumulation_steps
from primus.config.load import Resolved
from primus.config.schema import Experiment, Trainer
from primus.engines.choice import choose_engine
from primus.errors import PrimusError, UnfitError, UsageError
from primus.framework import FRAMEWORKS
from primus.package_files import PROGRAM
from primus.prediction.rank_worker import RankAnswer, RankJob, has_fake_rank

WORKER = "primus.prediction.rank_worker"
SIDE_BY_SIDE = 2
"""Processes at a time: each takes one core, and less than 1 GB."""
LIMIT_S = 900.0
ALL_KINDS = "all-kinds"


def choose_ranks(text: str, trainer: Trainer, world_size: int) -> tuple[int, ...]:
    """The ranks that `--rank` means: one of each kind, or those of a list.

    The first rank of a pipeline stage has as much as any of it; the second stage holds most of those in the middle.

    Raises:
        UsageError: It is neither, or there is no such rank.
    """
    if text == ALL_KINDS:
        stages = trainer.parallel.pipeline_model_parallel_size
        size = world_size // stages
        return tuple(sorted({0, min(1, stages - 1) * size, (stages - 1) * size}))
    words = text.split(",")
    if not all(word.isdecimal() for word in words):
        raise UsageError(f"--rank {text}: neither a rank nor {ALL_KINDS}", "such as --rank 37, or --rank 0,37")
    ranks = tuple(sorted({int(word) for word in words}))
    if ranks[-1] >= world_size:
        raise UsageError(f"--rank {ranks[-1]}: the run has the ranks 0 to {world_size - 1}")
    return ranks


def check_world_size(resolved: Resolved, world_size: int) -> None:
    """What the launch checks of a number of processes.

    Raises:
        UsageError: They cannot be laid out, or do not divide the batch.
    """
    count_accumulation_steps(resolved, world_size)
    trainer = resolved.experiment.trainer
    expert, stage = (
        trainer.parallel.expert_model_parallel_size,
        world_size // (trainer.parallel.pipeline_model_parallel_size),
    )
    if stage % expert:
        raise UsageError(
            f"expert_model_parallel_size: {expert} does not divide the {stage} processes of a pipeline stage",
            "lower it to a divisor of that number",
        )


def run_ranks(
    experiment: Experiment, ranks: Sequence[int], world_size: int, devices_per_node: int, environ: Mapping[str, str]
) -> tuple[RankAnswer, ...]:
    """Execute ranks, two at a time.

    Raises:
        PrimusError: A process was killed, or took too long.
    """
    # Variables of workers may be secrets, and change nothing here.
    experiment = structs.replace(experiment, env={})
    jobs = [
        RankJob(experiment=experiment, rank=rank, world_size=world_size, devices_per_node=devices_per_node)
        for rank in ranks
    ]
    try:
        python = _find_python(experiment.trainer, environ)
    except UnfitError as error:
        return (RankAnswer(rank=ranks[0], problem=error.problem, hint=error.hint or "", is_unknown=True),)
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        return tuple(pool.map(lambda job: _run_rank(job, python, environ), jobs))


def _find_python(trainer: Trainer, environ: Mapping[str, str]) -> str:
    """The interpreter of the engine that a run would use.

    Raises:
        UnfitError: The engine is not installed, or in a version that is not supported.
    """
    backend = registry.load_plug_in(FRAMEWORKS, trainer.framework)
    if not has_fake_rank(backend):
        return sys.executable  # which says so, without the engine
    names = tuple(backend.ENGINES)
    choice = choose_engine(names, environ, allows_any_version=trainer.training.allow_version)
    if choice is None:
        return sys.executable
    if choice.installation is None:
        raise UnfitError(
            f"{names[0]} is not installed here, so that no step of it can be executed",
            f"{PROGRAM} setup --engine {names[0]}",
        )
    return choice.installation.python


def _run_rank(job: RankJob, python: str, environ: Mapping[str, str]) -> RankAnswer:
    argv = interpreter.build_module_command(python, WORKER)
    # One thread: there is nothing to compute.
    variables = {**interpreter.drop_empty_python_path(environ), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            argv, input=msgspec.json.encode(job), capture_output=True, env=variables, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise PrimusError(f"rank {job.rank}: no step on fake tensors within {LIMIT_S:.0f} s") from None
    try:
        return msgspec.json.decode(done.stdout, type=RankAnswer)
    except msgspec.MsgspecError:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"its process ended with code {done.returncode}"
        raise PrimusError(f"rank {job.rank}: {reason}") from None
