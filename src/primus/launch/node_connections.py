"""Connections of a node to the others of its job, from the rendezvous to the exit barrier."""

from __future__ import annotations

import contextlib
from functools import cached_property

from msgspec import Struct

from primus.errors import PrimusError
from primus.launch.nodes import exit_barrier
from primus.launch.nodes.control_channel import ControlChannel, ControlMessage
from primus.launch.nodes.rendezvous import RendezvousPeer
from primus.machine.cluster import ClusterLayout
from primus.plan import Action
from primus.runs.events import EventLog
from primus.runs.store import Run


class NodeConnections(Struct, kw_only=True, dict=True):
    """Connections of the node of `layout` to the other nodes of the job, from the rendezvous to the exit barrier."""

    layout: ClusterLayout
    actions: tuple[Action, ...]
    """Those of the plan: hooks after the workers may use their whole time limits before a node reaches the barrier."""
    kept: dict[int, RendezvousPeer] = {}
    """Filled by the rendezvous."""
    run: Run | None = None
    """Set on node 0."""

    @cached_property
    def control_channel(self) -> ControlChannel:
        """The channel to the nodes that have joined; made on first use, which ends the rendezvous."""
        connections = {rank: peer.stream for rank, peer in self.kept.items()}
        return ControlChannel(connections, {rank: peer.host for rank, peer in self.kept.items()})

    def _record_release(self) -> None:
        if self.run is None or self.layout.nnodes == 1:
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
            limit_s = sum(each.timeout_s for each in self.actions if each.stage != "before") + exit_barrier.MARGIN_S
            exit_barrier.wait_for_all_nodes(self.control_channel, self.layout.node_rank, limit_s)
            self._record_release()
        else:
            # An unexpected error: this node leaves at once, and the others see its connection end.
            self.control_channel.close()
