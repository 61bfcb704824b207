"""`python -m primus.drill.guard`: a process that undoes a fault when whoever planted it releases it, or dies.

It reads one `FaultUndo` as a line of JSON, writes "ready", and waits for the end of its standard input, which the
kernel closes when the planting process ends in any way. So a drill that is killed leaves no stopped process, no full
disk and no network interface that is down.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
from msgspec import Struct

READY = b"ready\n"
RELEASE_LIMIT_S = 60.0
"""Time to undo a fault: deleting a file of gigabytes, or a few calls of ip(8)."""


class FaultUndo(Struct, frozen=True, kw_only=True):
    """What to undo; each part is empty where the fault has none."""

    pid: int = 0
    """Process that continues."""
    started: str = ""
    """When it started (proc(5)): another process may get its number later."""
    file: str = ""
    """File that is deleted."""
    interface: str = ""
    """Network interface that is up again."""
    routes: tuple[str, ...] = ()
    """Its routes, as ip(8) lists and takes them: the kernel removes them when it goes down."""


class FaultGuard:
    """A guard process, from before a fault is planted until it is undone."""

    def __init__(self, undo: FaultUndo) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "primus.drill.guard"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a signal to the drill's process group must not reach it
        )
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(msgspec.json.encode(undo) + b"\n")
        self._process.stdin.flush()
        # The fault is planted only once someone is there who undoes it.
        self.is_ready = self._process.stdout.readline() == READY

    def release(self) -> None:
        """Undo the fault, and wait until that is done; a second call does nothing."""
        assert self._process.stdin and self._process.stdout
        if not self._process.stdin.closed:
            self._process.stdin.close()
            self._process.stdout.close()
            self._process.wait(RELEASE_LIMIT_S)


def read_start_time(pid: int) -> str:
    """When a process started, in ticks since the boot; empty if it has ended."""
    with contextlib.suppress(OSError, IndexError):
        # Field 22; the name in field 2 may contain spaces and parentheses (proc(5)).
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
    return ""


def undo_fault(undo: FaultUndo) -> None:
    """Undo a fault; what was undone already stays so."""
    if undo.pid and undo.started and read_start_time(undo.pid) == undo.started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(undo.pid, signal.SIGCONT)
    if undo.file:
        Path(undo.file).unlink(missing_ok=True)
    if undo.interface:
        subprocess.run(["ip", "link", "set", "dev", undo.interface, "up"], check=False)
        for route in undo.routes:  # `replace`: the kernel has added some of them again
            subprocess.run(
                ["ip", "route", "replace", *route.split(), "dev", undo.interface],
                check=False,
                stderr=subprocess.DEVNULL,
            )


def main() -> int:
    """Wait for the end of standard input, and undo."""
    # Only the end of the planting process or its release ends this one.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    undo = msgspec.json.decode(sys.stdin.buffer.readline(), type=FaultUndo)
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    sys.stdin.buffer.read()
    undo_fault(undo)
    return 0


if __name__ == "__main__":
    sys.exit(main())
