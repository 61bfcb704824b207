"""Loops over characters, compiled where numba is installed and plain Python with the same results where not.

Import modules that use it inside functions: numba takes half a second to import.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

Function = TypeVar("Function", bound=Callable[..., Any])


def _import_numba() -> Any:
    """The compiler, None where it is not installed; what it compiles is kept for the next process."""
    try:
        import numba
    except ImportError:
        return None
    settings: Any = numba.config
    settings.CACHE_DIR = settings.CACHE_DIR or _find_cache_folder()
    return numba


def _find_cache_folder() -> str:
    """A folder that can be written: the user's cache, or the temporary folder where there is none."""
    chosen = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(chosen, "primus", "numba", _hash_kernel_sources())
    if folder.is_absolute():  # a user without a home folder has none
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return str(folder)
    return tempfile.mkdtemp(prefix=f"primus-numba-{os.getuid()}-")


def _hash_kernel_sources() -> str:
    """Identity of all sources that hold kernels: numba looks only at the file of a function, not at what it calls."""
    package = Path(__file__).parents[1]
    sources = sorted([*package.glob("cleaning/*.py"), *package.glob("dedup/*.py")])
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]


NUMBA = _import_numba()


def compile_kernel(function: Function) -> Function:
    """A function of arrays and numbers, compiled when it is first called; it makes no arrays of its own.

    So no references need be counted, without which kernels that call each other are five times faster. They become
    part of their callers: an array is seven arguments of a call.
    """
    if NUMBA is None:
        return function
    compiled: Function = NUMBA.njit(cache=True, nogil=True, _nrt=False, forceinline=True)(function)
    return compiled


def compile_entry(function: Function) -> Function:
    """A kernel that Python calls: plain Python lets 64-bit hashes wrap around as the compiled code does."""
    if NUMBA is not None:
        return compile_kernel(function)

    @functools.wraps(function)
    def call_uncompiled(*arguments: Any) -> Any:
        with np.errstate(over="ignore"):
            return function(*arguments)

    return call_uncompiled  # type: ignore[return-value]
