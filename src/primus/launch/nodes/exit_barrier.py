"""The nodes of a job leave together, once the hooks of all of them are over.

A scheduler ends the nodes that are left when the first one has gone: Slurm at once where it has failed
(--kill-on-bad-exit), else after a minute (--wait), Kubernetes and ssh with their own limits. So nobody goes before all
have done their hooks and said what there is to say:

    node k    work, hooks -> says "finished" -> waits for "leave"             -> goes
    node 0    work, hooks -> waits for "finished" of the nodes that are there -> says "leave" -> goes

A node that has gone, or has fallen silent, is not waited for; if it is node 0, the others go. Whoever insists on the
end by a second signal is not kept either. A node that is there but does not finish keeps the others for `limit_s`.
"""

from __future__ import annotations

import signal
import threading
import time

from primus.launch.nodes.control_channel import ControlChannel, ControlMessage
from primus.launch.signals import StopSignals

MARGIN_S = 60.0
"""Over the time limits of the hooks: for what a task does after its workers, such as a report on node 0."""
HEAR_S = 0.1
CLOSE_LIMIT_S = 2.0
"""Time that node 0 leaves the others to read its last word, which takes them milliseconds."""


def wait_for_all_nodes(bond: ControlChannel, node_rank: int, limit_s: float) -> None:
    """Wait until all nodes have finished, at most `limit_s`, and end the connections to them."""
    if bond.connected_ranks:
        with StopSignals() as signals:
            (_release_nodes if node_rank == 0 else _wait_for_release)(bond, signals, time.monotonic() + limit_s)
        _ignore_signals()
    bond.close(CLOSE_LIMIT_S if node_rank == 0 else 0.0)


def _release_nodes(bond: ControlChannel, signals: StopSignals, deadline: float) -> None:
    """Node 0: let the others go once all of them have finished."""
    while bond.connected_ranks - bond.finished and time.monotonic() < deadline and not signals.insists:
        bond.receive_messages(HEAR_S)
    bond.send_message(ControlMessage(kind="leave"), to=bond.connected_ranks)


def _wait_for_release(bond: ControlChannel, signals: StopSignals, deadline: float) -> None:
    """Another node: finished; stay until node 0 says so."""
    bond.send_message(ControlMessage(kind="finished"), to=bond.connected_ranks)
    while bond.connected_ranks and time.monotonic() < deadline and not signals.insists:
        if any(message.kind == "leave" for _, message in bond.receive_messages(HEAR_S)):
            return


def _ignore_signals() -> None:
    """All is done and recorded: a scheduler that now ends the other nodes must not change this one's exit code."""
    if threading.current_thread() is threading.main_thread():
        for number in StopSignals.HANDLED:
            signal.signal(number, signal.SIG_IGN)
