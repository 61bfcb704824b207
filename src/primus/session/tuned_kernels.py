"""Compiled kernels that `tune inductor` kept: unpacked before a run compiles."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from primus.errors import PrimusError
from primus.runs.tuned_files import INDUCTOR_VARIABLE, explain_mismatch
from primus.session.session import Session
from primus.tuning.kernel_cache import read_kernel_cache, unpack_cache

FOLDER_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Folder of Inductor's kernels and of its graph cache (torch/_inductor/runtime/cache_dir_utils.py)."""


def use_tuned_kernels(session: Session, environ: Mapping[str, str]) -> None:
    """Unpack the kept kernels to the local disk, and let Inductor find them; says so, or why not."""
    given = environ.get(INDUCTOR_VARIABLE)
    if not given:
        return
    try:
        reason, folder = _unpack_kernels(Path(given), environ)
    except PrimusError as error:  # a run does not fail because it could start faster
        reason, folder = error.problem, None
    if folder is None:
        session.print_line(f"compiled kernels: not used: {reason}")
        return
    os.environ[FOLDER_VARIABLE] = str(folder)
    session.print_line(f"compiled kernels: {reason}")


def _unpack_kernels(path: Path, environ: Mapping[str, str]) -> tuple[str, Path | None]:
    """What to say, and the folder; None if the kernels are not used."""
    cache = read_kernel_cache(path)
    own = {**cache.valid_for, "torch": str(torch.__version__)}
    reason = explain_mismatch(cache.valid_for, own)
    if reason:
        return f"{reason}; run tune inductor again", None
    if environ.get(FOLDER_VARIABLE):
        return f"{FOLDER_VARIABLE} is set", None
    folder = unpack_cache(path, cache)
    day = time.strftime("%Y-%m-%d", time.localtime(cache.created))
    gain = f"; the first step took {cache.warm_s:.1f} instead of {cache.cold_s:.1f} s on {day}" if cache.warm_s else ""
    return f"{cache.num_files} files of tune inductor{gain}", folder
