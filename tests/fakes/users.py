"""Another user, whose read permissions count: root may open everything."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

NOBODY = 65534
"""User id without permissions (Debian, nobody)."""


@contextmanager
def as_another_user() -> Iterator[None]:
    """Root is somebody else while open; other users stay who they are."""
    if os.getuid() != 0:
        yield
        return
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
