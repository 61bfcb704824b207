"""Freed memory stays with the process where the C library can do that."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from primus.frameworks.native.engine.memory import keep_freed_memory
{call}
def faults():
    for _ in range(20):
        torch.ones(16 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = faults()
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_large_blocks_are_reused_without_new_page_faults() -> None:
    """64 MiB twenty times over are at least 20 x 32 faults even with pages of 2 MiB, unless they are reused."""
    returned, kept = (page_faults(call) for call in ("", "assert keep_freed_memory()"))
    assert kept < 200 < returned


def page_faults(call: str) -> int:
    program = [sys.executable, "-c", PROGRAM.format(call=call)]
    return int(subprocess.run(program, check=True, capture_output=True, text=True, timeout=60).stdout)
