"""Claims of pieces of work that processes of several hosts share; a claim ends with its holder, however that dies."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
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
def claim_folder(folder: Path, use: str) -> Iterator[None]:
    """Be the only process that holds `folder`; `use` begins the error: ``FOLDER is used``.

    Raises:
        UsageError: Another one does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with lock.hold_run(folder) as is_held:
        if not is_held:
            raise UsageError(f"{use} by {lock.find_holder(folder)}", "wait until it has ended")
        yield


def claim_host(folder: Path) -> AbstractContextManager[None]:
    """Be the only process of this host that works in `folder`: see `claim_folder`."""
    return claim_folder(folder / "hosts" / socket.gethostname(), f"{folder} is used")
