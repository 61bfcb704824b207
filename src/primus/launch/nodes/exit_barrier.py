"""The nodes of a job exit together, after the hooks of all of them.

A scheduler kills the remaining nodes when the first one exits: Slurm at once where its exit code is not 0
(--kill-on-bad-exit), else after a minute (--wait); Kubernetes and ssh have their own limits. So no node exits before
all nodes have run their hooks and printed their results:

    node k    work, hooks -> sends "finished" -> waits for "leave"                       -> exits
    node 0    work, hooks -> waits for "finished" of all connected nodes -> sends "leave" -> exits

A node that has exited or timed out is not waited for; where node 0 has, the others exit. A second signal ends the wait.
A node that is connected but does not finish delays the others for `limit_s` at most.
"""

from __future__ import annotations

import signal
import threading

from primus.launch.nodes.control_channel import ControlChannel, ControlMessage
from primus.launch.nodes.message_stream import Deadline
from primus.launch.signals import StopSignals

MARGIN_S = 60.0
"""Added to the time limits of the hooks, for what a task does after its workers, such as a report on node 0."""
RECEIVE_S = 0.1
"""Time between two looks at signals."""
CLOSE_LIMIT_S = 2.0
"""Time for the other nodes to read "leave", which takes milliseconds, before node 0 closes the connections."""


def wait_for_all_nodes(channel: ControlChannel, node_rank: int, limit_s: float) -> None:
    """Wait until all nodes have finished, at most `limit_s`, and close the connections to them."""
    if channel.connected_ranks:
        # Open only now: a signal before ended the work, and must not also end the wait for the hooks of other nodes.
        with StopSignals() as signals:
            (_release_nodes if node_rank == 0 else _wait_for_release)(channel, signals, Deadline(limit_s))
        _ignore_signals()
    # Node 0 closes last: for the others the end of its connection is the release that they wait for.
    channel.close(CLOSE_LIMIT_S if node_rank == 0 else 0.0)


def _release_nodes(channel: ControlChannel, signals: StopSignals, deadline: Deadline) -> None:
    """Node 0: let the other nodes exit once all of them have finished."""
    while channel.connected_ranks - channel.finished and not deadline.is_over and not signals.insists:
        channel.receive_messages(RECEIVE_S)
    channel.send_message(ControlMessage(kind="leave"), to=channel.connected_ranks)


def _wait_for_release(channel: ControlChannel, signals: StopSignals, deadline: Deadline) -> None:
    """Another node: report that it has finished, and wait until node 0 releases it."""
    # To connected ranks, not only to working ones: a node that failed also reports that its hooks are done.
    channel.send_message(ControlMessage(kind="finished"), to=channel.connected_ranks)
    while channel.connected_ranks and not deadline.is_over and not signals.insists:
        if any(message.kind == "leave" for _, message in channel.receive_messages(RECEIVE_S)):
            return


def _ignore_signals() -> None:
    """The result is recorded: a scheduler that now terminates the other nodes must not change this exit code."""
    if threading.current_thread() is threading.main_thread():
        for number in StopSignals.HANDLED:
            signal.signal(number, signal.SIG_IGN)
