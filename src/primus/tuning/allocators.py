"""Memory allocators for processes that compute on CPUs: settings of the C library, and libraries that replace it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from primus.errors import UnfitError

GLIBC = "glibc"
SYSTEM_FOLDERS = (
    *(Path(folder) for folder in (f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/lib64", "/usr/lib")),
    Path("/usr/local/lib"),
)


class Allocator(Struct, frozen=True, kw_only=True):
    """An allocator and the variables that choose it."""

    variables: dict[str, str] = {}
    library: str = ""
    """Beginning of the name of the library for LD_PRELOAD; empty for the C library."""
    package: str = ""
    """Package of Debian and Ubuntu."""


ALLOCATORS = {
    "default": Allocator(),
    # Freed tensors above 32 MiB go back to the system, and the next step faults in their pages again. These settings
    # keep them: no mmap, no trimming below 64 GiB (mallopt(3), M_MMAP_MAX and M_TRIM_THRESHOLD).
    GLIBC: Allocator(variables={"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(64 * 2**30)}),
    # The values of PyTorch's Performance Tuning Guide, "Switch memory allocator".
    "jemalloc": Allocator(
        variables={
            "MALLOC_CONF": "oversize_threshold:1,background_thread:true,metadata_thp:auto,dirty_decay_ms:-1,"
            "muzzy_decay_ms:-1"
        },
        library="libjemalloc.so",
        package="libjemalloc2",
    ),
    "tcmalloc": Allocator(library="libtcmalloc", package="libtcmalloc-minimal4"),
}


def list_allocators(asked: Sequence[str], environ: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Variables of each allocator in `asked`, or without any of all that this machine has.

    Raises:
        UnfitError: One that was asked for is not installed.
    """
    found = {}
    for name in asked or ALLOCATORS:
        allocator = ALLOCATORS[name]
        variables = dict(allocator.variables)
        if name == GLIBC and platform.libc_ver()[0] != "glibc":
            if asked:
                raise UnfitError(f"the C library of this machine is not {GLIBC}", "choose another --allocators")
            continue
        if allocator.library:
            library = find_library(allocator.library, environ)
            if library is None and asked:
                raise UnfitError(
                    f"{name} is not installed: no {allocator.library}*", f"on Debian: apt install {allocator.package}"
                )
            if library is None:
                continue
            # What the user preloads stays.
            variables["LD_PRELOAD"] = ":".join(filter(None, (str(library), environ.get("LD_PRELOAD"))))
        found[name] = variables
    return found


def find_library(beginning: str, environ: Mapping[str, str]) -> Path | None:
    """A shared library in the folders of LD_LIBRARY_PATH, of this Python's environment or of the system."""
    for folder in _list_folders(environ):
        files = sorted(file for file in folder.glob(f"{beginning}*") if ".so" in file.name)
        # The plain one before those that check or profile: libtcmalloc_minimal.so.4, not libtcmalloc_debug.so.4.
        usable = [file for file in files if not any(word in file.name for word in ("debug", "profiler"))]
        if usable:
            return usable[0]
    return None


def _list_folders(environ: Mapping[str, str]) -> Iterator[Path]:
    named = [environ.get("LD_LIBRARY_PATH", ""), f"{environ.get('CONDA_PREFIX', '')}/lib"]
    for folder in [part for text in named for part in text.split(os.pathsep)]:
        if folder.startswith("/"):
            yield Path(folder)
    yield from SYSTEM_FOLDERS
