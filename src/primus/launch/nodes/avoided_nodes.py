"""Which unfit nodes a job avoids: in its plan, and in the record of its run."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from msgspec import Struct

from primus.messages import Say
from primus.runs import events
from primus.runs.events import EventLog
from primus.runs.store import Run
from primus.runs.unfit_nodes import UnfitNodes, find_unfit_among, is_same_node

EVENT = "unfit_nodes"
"""Kind of the event: `avoided` and `used`, each with the reasons by node."""


class AvoidedNodes(Struct, frozen=True, kw_only=True):
    """Unfit nodes that a job avoids, and those that it uses all the same, each with the reason."""

    avoided: dict[str, str] = {}
    """The newest evidence first."""
    used: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    """What of the list is not applied, and why."""

    def merge(self, chosen: AvoidedNodes) -> AvoidedNodes:
        """This with the avoided nodes of `chosen`, and the used nodes and notes of both."""
        notes = (*self.notes, *chosen.notes)
        return AvoidedNodes(avoided=chosen.avoided, used=self.used | chosen.used, notes=notes)


def plan_avoided_nodes(listed: UnfitNodes, *, named: Sequence[str] = (), excluded: Sequence[str] = ()) -> AvoidedNodes:
    """What a job does about the unfit nodes that it may get.

    Args:
        listed: The list.
        named: Nodes that the user asks for by name, which the list does not overrule.
        excluded: Nodes that the user excludes anyway.
    """
    wanted = find_unfit_among(listed, named)
    others = sorted(listed.unfit, key=lambda each: each.records[-1].time, reverse=True)
    avoided = {
        each.node: each.format_reason()
        for each in others
        if not any(is_same_node(each.node, name) for name in (*wanted, *excluded))
    }
    used = {name: each.format_reason() for name, each in wanted.items()}
    notes = (*(f"warning: {name} is asked for by name and unfit: {why}" for name, why in used.items()), *listed.notes)
    return AvoidedNodes(avoided=avoided, used=used, notes=notes)


def spare_needed_nodes(avoided: Mapping[str, str], num_usable: int, num_needed: int) -> AvoidedNodes:
    """`avoided` without the nodes that the job needs: a list must not stop a job that could run.

    Args:
        avoided: Unfit nodes, all of them among the usable ones.
        num_usable: Nodes that the job could get without the list.
        num_needed: Nodes that it needs.
    """
    kept, used = dict(avoided), {}
    while kept and num_usable - len(kept) < num_needed <= num_usable:
        name, why = kept.popitem()  # of the oldest evidence
        used[name] = why
    notes = tuple(
        f"warning: {name} may be used although it is unfit: {why}; the job needs {num_needed} of {num_usable} nodes"
        for name, why in used.items()
    )
    return AvoidedNodes(avoided=kept, used=used, notes=notes)


def choose_among(avoided: Mapping[str, str], nodes: Sequence[str], num_needed: int) -> AvoidedNodes:
    """Those of `avoided` that are among `nodes`, by these names, while enough others are left."""
    known = {name: why for each, why in avoided.items() for name in nodes if is_same_node(each, name)}
    return spare_needed_nodes(known, len(nodes), num_needed)


def choose_listed_nodes(listed: UnfitNodes, nodes: Sequence[str], num_needed: int) -> AvoidedNodes:
    """The unfit ones among `nodes`, as far as the others are enough."""
    among = sorted(find_unfit_among(listed, nodes).items(), key=lambda each: each[1].records[-1].time, reverse=True)
    found = {name: each.format_reason() for name, each in among}
    chosen = spare_needed_nodes(found, len(nodes), num_needed)
    return AvoidedNodes(avoided=chosen.avoided, used=chosen.used, notes=(*listed.notes, *chosen.notes))


def report_avoided_nodes(found: AvoidedNodes, run: Run | None, say: Say) -> None:
    """Print what the job does about unfit nodes, and record it in the run."""
    for name, why in found.avoided.items():
        say(f"avoids {name}, which is unfit: {why}")
    for note in found.notes:
        say(note)
    if run and (found.avoided or found.used):
        with contextlib.suppress(OSError):  # a full disk stops the job at a better place
            log = EventLog(run.events)
            log.append(EVENT, avoided=found.avoided, used=found.used)
            log.close()


def report_used_nodes(listed: UnfitNodes, hosts: Sequence[str], run: Run, say: Say) -> None:
    """Print and record which of the `hosts` of a job are unfit; the job goes on with them."""
    used = {name: each.format_reason() for name, each in find_unfit_among(listed, hosts).items()}
    notes = tuple(f"warning: the job runs on {name}, which is unfit: {why}" for name, why in used.items())
    report_avoided_nodes(AvoidedNodes(used=used, notes=notes), run, say)


def read_avoided_nodes(run: Run) -> AvoidedNodes:
    """What the jobs of a run did about unfit nodes."""
    found = [event for event in events.read_events(run.events) if event["kind"] == EVENT]
    avoided = {name: why for event in found for name, why in event.get("avoided", {}).items()}
    used = {name: why for event in found for name, why in event.get("used", {}).items()}
    return AvoidedNodes(avoided=avoided, used=used)
