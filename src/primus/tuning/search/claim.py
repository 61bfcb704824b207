"""Claims of pieces of work that processes of several hosts share; a claim ends with its holder, however that dies."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from primus.errors import UsageError
from primus.runs import lock


@contextmanager
def claim_work(folder: Path) -> Iterator[bool]:
    """Be the only process that does the work of `folder`; gives False while another one does."""
    folder.mkdir(parents=True, exist_ok=True)
    # Where flock does not reach other hosts, the record of the holder does.
    if lock.find_holder(folder) is not None:
        yield False
        return
    with lock.hold_run(folder) as is_held:
        yield is_held


@contextmanager
def claim_host(folder: Path) -> Iterator[None]:
    """Be the only process of this host that works in `folder`.

    Raises:
        UsageError: Another one does.
    """
    host = folder / "hosts" / socket.gethostname()
    host.mkdir(parents=True, exist_ok=True)
    with lock.hold_run(host) as is_held:
        if not is_held:
            raise UsageError(f"{folder} is used by {lock.find_holder(host)}", "wait until it has ended")
        yield
