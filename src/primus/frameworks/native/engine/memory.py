"""Reuse of the memory that tensors of a CPU process free."""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""Parameters of mallopt(3), from glibc's malloc.h."""

LARGEST = 1 << 30
"""Bytes: larger blocks are still returned to the system at once."""


def keep_freed_memory() -> bool:
    """Keep freed memory for the next tensors instead of returning it to the system; True if that took effect.

    A step frees and allocates the same large blocks again and again, and each time the kernel clears their pages
    first: 10 to 20 percent of a small model's step (docs/native-speed.md). Only glibc has the setting; other
    allocators (jemalloc, musl) are not changed.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST)) and bool(mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
