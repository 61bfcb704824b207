"""Stop a container whose launcher was killed: `watchdog.py ENGINE LABEL GRACE MARK`, in a separate session.

The launcher holds the other end of standard input. It writes a line after it has ended its container itself. End of
file without a line means that the launcher was killed, which it cannot handle itself. Then:

    1. the engine stops and removes the container with LABEL, which has GRACE seconds to save;
    2. the engine's client gets SIGTERM: it may still be fetching the image, and has no container to stop;
    3. after GRACE seconds, all processes that carry MARK are killed: apptainer has no daemon that could stop them;
    4. a container that has started in the meantime is removed.

The launcher starts this process with SIGHUP, SIGINT and SIGTERM ignored, because what ends the launcher often signals
everything in its job.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

POLL_S = 1.0


def main(argv: list[str]) -> None:
    """Wait for the end of the launcher, and stop its container if the launcher was killed."""
    engine, label, grace, mark = argv
    # Blocks for the whole life of the launcher. The kernel closes the pipe however the launcher ends.
    if sys.stdin.readline():
        return
    grace_s = int(grace)
    if label:
        stop_containers(engine, label, grace_s)
    # After the container was stopped: a client that still waits for it has ended by now.
    clients = find_marked_processes(mark)
    if clients:
        _send_signal(clients[0], signal.SIGTERM)  # the client; apptainer passes it on to what runs inside
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and find_marked_processes(mark):
        time.sleep(POLL_S)
    # Listed again, because a process may have started others since the loop above.
    for pid in find_marked_processes(mark):
        _send_signal(pid, signal.SIGKILL)
    if label:
        # Without a grace period: it has started after its launcher died, and has nothing to save.
        stop_containers(engine, label, 0)


def stop_containers(engine: str, label: str, grace_s: int) -> None:
    """Stop and remove the containers with `label`."""
    listed = subprocess.run([engine, "ps", "-aq", "--filter", f"label={label}"], stdout=subprocess.PIPE, check=False)
    for identity in listed.stdout.decode(errors="replace").split():
        subprocess.run([engine, "stop", "-t", str(grace_s), identity], check=False)
        subprocess.run([engine, "rm", "-f", identity], check=False)


def find_marked_processes(mark: str) -> list[int]:
    """Ids of the processes whose environment contains `mark`, NAME=VALUE, the oldest first."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or belongs to another user
            continue
        if os.fsencode(mark) in variables:
            found.append(int(folder.name))
    return sorted(found)


def _send_signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except OSError:  # it has ended
        return


if __name__ == "__main__":
    main(sys.argv[1:])
