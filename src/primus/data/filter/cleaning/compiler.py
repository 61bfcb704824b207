"""Compiles kernels with numba. Without numba they run as plain Python, slowly and with the same results.

Modules with kernels are imported inside functions, because the import of numba takes half a second.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

Function = TypeVar("Function", bound=Callable[..., Any])


def _import_numba() -> Any:
    """The compiler; None if it is not installed. Its cache keeps compiled kernels for the next process."""
    try:
        import numba
    except ImportError:
        return None
    settings: Any = numba.config
    settings.CACHE_DIR = settings.CACHE_DIR or _find_cache_folder()
    return numba


def _find_cache_folder() -> str:
    """A writable folder: in the chosen cache, in the user's own where that belongs to others, or a temporary folder.

    numba reads kernels only from folders that it may write.
    """
    for cache in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        folder = Path(cache, "primus", "numba", _hash_kernel_sources())
        if folder.is_absolute():  # a user without a home folder has none
            with suppress(OSError):
                # The folder name has the hash of the sources, so that old versions of a kernel are never loaded.
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder):
                    return str(folder)
    temporary = tempfile.mkdtemp(prefix=f"primus-numba-{os.getuid()}-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary


def _hash_kernel_sources() -> str:
    """Hash of all sources with kernels: numba checks only the file of a function, not those of its callees."""
    package = Path(__file__).parents[1]
    sources = sorted([*package.glob("cleaning/*.py"), *package.glob("dedup/*.py")])
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]


NUMBA = _import_numba()


def compile_kernel(function: Function) -> Function:
    """Compile a function of arrays and numbers at its first call. The function must not allocate arrays.

    Without allocations, numba need not count references, which makes kernels that call each other five times faster.
    They are inlined into their callers, because an array is passed as seven arguments.
    """
    if NUMBA is None:
        return function
    # nogil lets threads of one process run kernels in parallel.
    compiled: Function = NUMBA.njit(cache=True, nogil=True, _nrt=False, forceinline=True)(function)
    return compiled


def compile_entry(function: Function) -> Function:
    """Compile a kernel that Python calls. Without numba, 64-bit hashes wrap around as in compiled code."""
    if NUMBA is not None:
        return compile_kernel(function)

    @functools.wraps(function)
    def call_uncompiled(*arguments: Any) -> Any:
        with np.errstate(over="ignore"):
            return function(*arguments)

    return call_uncompiled  # type: ignore[return-value]
