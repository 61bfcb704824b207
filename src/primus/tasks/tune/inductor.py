"""Compile the kernels of an experiment once, for later runs on this kind of device, on any node or in a container."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, structs

from primus import experiment
from primus.config.load import Resolved
from primus.errors import PrimusError, UnfitError
from primus.runs import tuned_files
from primus.runs.files import read_json, to_json, write_json
from primus.runs.run_steps import load_run_steps
from primus.task import TaskContext
from primus.tasks.tune._training import run_training
from primus.tuning.claim import claim_folder
from primus.tuning.kernel_cache import KernelCache, find_local_folder, keep_cache, pack_cache

OVERRIDES = True
STEPS = 3
FOLDER_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
AUTOTUNE_VARIABLE = "TORCHINDUCTOR_MAX_AUTOTUNE"
"""Inductor measures several kernels for an operation (torch/_inductor/config.py, max_autotune)."""


class Options(Struct, frozen=True, kw_only=True):
    """Options of `tune inductor`."""

    config: Annotated[str, Meta(extra={"aliases": ("--exp",)})]
    """Experiment file."""
    no_max_autotune: bool = False
    """Take Inductor's default kernels instead of measuring several (TORCHINDUCTOR_MAX_AUTOTUNE=1)."""
    workspace: str = "./output"
    """Folder of the results, below tune/."""
    timeout: float = 7200.0
    """Time limit of a run in seconds."""


def run(options: Options, context: TaskContext) -> None:
    """Compile, pack, start again with what was packed, and keep it.

    Raises:
        UsageError: The experiment is invalid, or this search is running already.
        UnfitError: PyTorch is not installed.
        PrimusError: A run fails or compiles nothing.
    """
    resolved = _resolve_experiment(options, context)
    name = resolved.experiment.exp_name
    valid_for = _describe_target(resolved, options, context)
    identity = hashlib.sha256((to_json(resolved.experiment) + to_json(valid_for)).encode()).hexdigest()[:8]
    folder = Path(options.workspace) / "tune" / f"{name}-inductor-{identity}"
    with claim_folder(folder, f"{folder} is used"):
        cache = _compile_kernels(folder, valid_for, options, context)
        if cache.warm_s is None:
            cache = _start_again(folder, cache, options, context)
        kept = None
        if cache.is_faster:
            kept = tuned_files.name_tuned_file(context.environ, "inductor", valid_for)
            keep_cache(cache, folder, kept)
    context.result({"cache": cache, "kept": str(kept) if kept else None}, _format_result(cache, kept))


def plan_notes(options: Options, context: TaskContext) -> Sequence[str]:
    """What a dry run prints."""
    resolved = _resolve_experiment(options, context)
    return [
        f"two runs of {STEPS} steps of {resolved.experiment.exp_name}: one compiles, one starts with its kernels",
        f"later runs use {tuned_files.find_store(context.environ)}/inductor-*.json",
    ]


def _format_result(cache: KernelCache, kept: Path | None) -> str:
    lines = [
        f"first step: {cache.cold_s:.1f} s compiling, {cache.warm_s or 0:.1f} s with {cache.num_files} packed files"
    ]
    if kept is None:
        return "\n".join([*lines, "not used by later runs: the second start was not faster"])
    return "\n".join([*lines, f"kept: later runs of this experiment use it ({kept}); direct --no-tuned disables it"])


def _resolve_experiment(options: Options, context: TaskContext) -> Resolved:
    words = (*context.overrides, "compile=true")
    return experiment.resolve_experiment(Path(options.config), words, context.environ)


def _describe_target(resolved: Resolved, options: Options, context: TaskContext) -> dict[str, str]:
    """What the kernels depend on, by name; without importing PyTorch."""
    import sys

    from primus.site_folders import find_distribution

    version = find_distribution("torch", sys.path)
    if version is None:
        raise UnfitError("tune inductor needs PyTorch, which is not installed", "./primus-cli setup installs it")
    facts = context.facts()
    return {
        "device": tuned_files.describe_device(facts, is_cpu=resolved.experiment.trainer.training.device == "cpu"),
        "torch": version,
        "experiment": resolved.experiment.exp_name,
    }


def _compile_kernels(folder: Path, valid_for: Mapping[str, str], options: Options, context: TaskContext) -> KernelCache:
    """Compile everything in an empty folder, and pack it; what an earlier call has packed is taken."""
    record = folder / "cache.json"
    try:
        return read_json(record, KernelCache)
    except PrimusError:  # none yet, or cut off
        pass
    built = folder / "compiled"
    shutil.rmtree(built, ignore_errors=True)
    context.say("compiling in an empty folder")
    variables = {} if options.no_max_autotune else {AUTOTUNE_VARIABLE: "1"}
    cold_s = _measure_first_step(folder, {**variables, FOLDER_VARIABLE: str(built.resolve())}, options, context)
    digest, count = pack_cache(built, folder / "cache.tar")
    cache = KernelCache(
        created=time.time(),
        valid_for=dict(valid_for),
        variables=variables,
        archive="cache.tar",
        sha256=digest,
        num_files=count,
        cold_s=cold_s,
    )
    write_json(record, cache)
    shutil.rmtree(built, ignore_errors=True)
    return cache


def _start_again(folder: Path, cache: KernelCache, options: Options, context: TaskContext) -> KernelCache:
    """Start a run with the packed kernels on a disk that does not have them, as a new node would."""
    shutil.rmtree(find_local_folder(cache), ignore_errors=True)
    context.say("starting again with the packed kernels")
    file = str((folder / "cache.json").resolve())
    warm_s = _measure_first_step(folder, {**cache.variables, tuned_files.INDUCTOR_VARIABLE: file}, options, context)
    cache = structs.replace(cache, warm_s=warm_s)
    write_json(folder / "cache.json", cache)
    return cache


def _measure_first_step(folder: Path, variables: Mapping[str, str], options: Options, context: TaskContext) -> float:
    """Seconds of the first step of a run, in which it compiles."""
    given = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    answer, run = run_training(
        options.config,
        context,
        {"train_iters": str(STEPS), "compile": "true"},
        folder,
        limit_s=options.timeout,
        options=("--no-tuned", *given),
        environ={name: value for name, value in context.environ.items() if name != FOLDER_VARIABLE},
    )
    if run is None or answer.state != "ok":
        where = f"runs show {run.directory}" if run else "run train pretrain with compile=true to see its log"
        raise PrimusError(f"the run that compiles failed: {answer.problem}", where)
    first = load_run_steps(run).columns["step_time_s"][0]
    assert first is not None, "a run that is done has timed its steps"
    return first
