"""Connections of a node to the others of its job, from the rendezvous to the exit barrier."""

from __future__ import annotations

import contextlib

from primus.errors import PrimusError
from primus.launch.nodes import exit_barrier
from primus.launch.nodes.control_channel import ControlChannel, ControlMessage
from primus.launch.nodes.rendezvous import RendezvousPeer
from primus.launch.prepare import Launch
from primus.machine.cluster import ClusterLayout
from primus.runs.events import EventLog
from primus.runs.store import Run


class NodeConnections:
    """Connections to the other nodes of the job, from the rendezvous to the exit barrier."""

    def __init__(self, launch: Launch, shape: ClusterLayout) -> None:
        self.kept: dict[int, RendezvousPeer] = {}
        """Filled by the rendezvous."""
        self.run: Run | None = None
        """Set on node 0."""
        self._shape = shape
        self._channel: ControlChannel | None = None
        # Hooks after the workers may use their whole time limits before a node reaches the exit barrier.
        after = [each.timeout_s for each in launch.plan.actions if each.stage != "before"]
        self._limit_s = sum(after) + exit_barrier.MARGIN_S

    @property
    def control_channel(self) -> ControlChannel:
        """The channel to the nodes that have joined; made on first use, which ends the rendezvous."""
        if self._channel is None:
            connections = {rank: peer.stream for rank, peer in self.kept.items()}
            self._channel = ControlChannel(connections, {rank: peer.host for rank, peer in self.kept.items()})
        return self._channel

    def _record_release(self) -> None:
        if self.run is None or self._shape.nnodes == 1:
            return
        with contextlib.suppress(OSError, PrimusError):  # a full disk: Slurm notices by itself
            log = EventLog(self.run.events)
            log.append("nodes_left")
            log.close()

    def open_channel(self) -> None:
        """Start the thread that sends "alive" to the other nodes each second while hooks run."""
        assert self.control_channel

    def leave_job(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Exit together with the other nodes, after sending them an error of this one; at an unexpected error, at once.

        Node 0 records it as an event: a wrapper that waits for the processes of a lost node, as srun does, may stop.
        """
        if isinstance(error, PrimusError):
            self.control_channel.send_message(
                ControlMessage(kind="lost", text=error.problem), to=self.control_channel.connected_ranks
            )
        if kind is None or isinstance(error, PrimusError):
            exit_barrier.wait_for_all_nodes(self.control_channel, self._shape.node_rank, self._limit_s)
            self._record_release()
        else:
            # An unexpected error: this node leaves at once, and the others see its connection end.
            self.control_channel.close()
