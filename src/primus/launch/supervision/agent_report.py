"""The file in which the elastic agent of a node reports how its ranks ended, as the launcher reads it."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from primus.errors import PrimusError
from primus.runs.files import read_json

AGENT = "primus.elastic_agent"
"""Program of the agent, which starts several ranks on a node; a single rank is started without it."""


class RankExit(Struct, frozen=True, kw_only=True):
    """Exit of the process of one rank."""

    rank: int
    exit_code: int
    """Exit code as in `subprocess`: negative if a signal ended the process."""
    last_alive: float
    """When the agent last saw the process alive, in seconds since the epoch: ahead of the errors of its peers."""


class AgentReport(Struct, frozen=True, kw_only=True):
    """Report of the agent; the file is replaced at each change."""

    exits: tuple[RankExit, ...] = ()
    """Ranks that ended by themselves, in order; without those that the agent stopped because another one failed."""
    signal: str = ""
    """Name of the signal that asked the agent to stop its ranks."""
    error: str = ""
    """Why the agent itself failed, for example in its rendezvous."""


def name_agent_report_file(folder: Path, node_rank: int) -> Path:
    """Report of the agent of a node, in the folder of the attempt; nodes may share the folder."""
    return folder / f"agent.node_{node_rank}.json"


def read_agent_report(folder: Path, node_rank: int) -> AgentReport:
    """The newest report; an empty one if the agent was killed before it wrote one."""
    try:
        return read_json(name_agent_report_file(folder, node_rank), AgentReport)
    except PrimusError:
        return AgentReport()
