"""A plug-in of pytest for `tools/mutants.py`: writes which tests run which lines of a module, in their own process.

The module is `$MUTANTS_MODULE`; the answer goes to `$MUTANTS_VISITS`: duration, id and lines of each test as JSON, the
fastest first.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Generator
from types import FrameType
from typing import Any

import pytest

MODULE = os.path.realpath(os.environ["MUTANTS_MODULE"])
_visits: list[tuple[float, str, list[int]]] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    """Trace a test with its fixtures."""
    lines: set[int] = set()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != MODULE:
            return None
        lines.add(frame.f_lineno)
        return trace

    started = time.monotonic()
    sys.settrace(trace)
    try:
        return (yield)
    finally:
        sys.settrace(None)
        _visits.append((time.monotonic() - started, item.nodeid, sorted(lines)))


def pytest_sessionfinish() -> None:
    """Write the answer."""
    with open(os.environ["MUTANTS_VISITS"], "w") as file:
        json.dump(sorted(_visits), file)
