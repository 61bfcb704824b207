"""The folder of one check of a cluster: a file for each node, by rename, so that it can be continued.

    RESULTS/<id>/request.json          the command that runs on each node
    RESULTS/<id>/nodes/<node>.json     what preflight found on the node; written once, when its job has ended
    RESULTS/<id>/logs/<node>.log       what the job has printed to standard error
    RESULTS/<id>/cluster.json          the summary of all nodes, with report.html, report.md and preflight/

One process writes a folder. A node without a file is checked by the next one that continues it.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct, structs

from primus import __version__
from primus.errors import PrimusError
from primus.preflight.findings.finding import CheckFinding, NodeReport
from primus.preflight.nodes.cluster import ClusterReport, Verdict, compare_nodes
from primus.runs.files import read_json, write_json
from primus.runtime import ClusterNode

NodeState = Literal["unfit", "unknown", "no answer", "not checked", "down", "drained", "busy", "fit"]
STATES: tuple[NodeState, ...] = ("unfit", "unknown", "no answer", "not checked", "down", "drained", "busy", "fit")
"""States in the order of the page: those that need attention first."""
STATE_OF_VERDICT: dict[Verdict, NodeState] = {"fail": "unfit", "unknown": "unknown", "pass": "fit"}
NUM_EARLIER = 5
"""Earlier checks that tell how much a figure of a node varies."""

REQUEST_FILE = "request.json"

AnswerT = TypeVar("AnswerT")


class PreflightAnswer(Struct, frozen=True):
    """What `preflight` prints as JSON on one node."""

    verdict: Verdict
    report: ClusterReport
    reasons: dict[str, tuple[str, ...]] = {}


class NodeCheckResult(Struct, frozen=True, kw_only=True):
    """What a check found on one node; the file of the node."""

    node: str
    """Name that its scheduler knows."""
    verdict: Verdict
    reasons: tuple[str, ...] = ()
    report: NodeReport
    findings: tuple[CheckFinding, ...] = ()
    """Findings of the measurements."""
    is_strict: bool = False
    """Whether warnings make it unfit."""

    @property
    def all_findings(self) -> tuple[CheckFinding, ...]:
        """Those of the checks and of the measurements."""
        return (*self.report.findings, *self.findings)


class CheckedNode(Struct, frozen=True, kw_only=True):
    """A node in the summary."""

    node: str
    state: NodeState
    reasons: tuple[str, ...] = ()
    """Why it is unfit, busy, drained or down, or why there is no answer."""
    listed: str = ""
    """Its entry in the list of unfit nodes."""


def read_answer(text: str, kind: type[AnswerT]) -> AnswerT:
    """The JSON that preflight has printed among other lines, as a `kind`.

    Raises:
        PrimusError: There is none.
    """
    decoder = json.JSONDecoder()
    position = text.find("{")
    while position >= 0:
        with contextlib.suppress(ValueError, msgspec.ValidationError):
            return msgspec.convert(decoder.raw_decode(text, position)[0], type=kind)
        position = text.find("\n{", position)
        position += 1 if position >= 0 else 0
    raise PrimusError("preflight gave no verdict")


def build_check_result(node: str, answer: PreflightAnswer) -> NodeCheckResult:
    """The result of the node that its scheduler calls `node`, whatever it calls itself.

    Raises:
        PrimusError: The answer has no report.
    """
    if not answer.report.nodes:
        raise PrimusError("preflight gave no report")
    ignored = answer.report.ignored
    measured = [finding for finding in answer.report.findings if finding.check not in ignored]
    own = answer.report.nodes[0]
    checked = tuple(finding for finding in own.findings if finding.check not in ignored)
    return NodeCheckResult(
        node=node,
        verdict=answer.verdict,
        reasons=tuple(reason for each in answer.reasons.values() for reason in each),
        report=structs.replace(own, host=node, findings=checked),
        findings=tuple(structs.replace(finding, host="") for finding in measured),
        is_strict=answer.report.is_strict,
    )


class CheckFolder:
    """The folder of one check."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def id(self) -> str:
        """Name of the folder: the time of its start."""
        return self.directory.name

    def write_command(self, command: str) -> None:
        """Create the folder of a check that runs `command` on each node.

        Raises:
            PrimusError: It cannot be created.
        """
        write_json(self.directory / REQUEST_FILE, {"command": command})

    def read_command(self) -> str:
        """The command of the check.

        Raises:
            PrimusError: The folder is damaged.
        """
        return read_json(self.directory / REQUEST_FILE, dict[str, str]).get("command", "")

    def locate_log(self, node: str) -> Path:
        """The file of what the job of a node prints to standard error."""
        return self.directory / "logs" / f"{_format_file_name(node)}.log"

    def write_result(self, result: NodeCheckResult) -> None:
        """Write the file of a node.

        Raises:
            PrimusError: It cannot be written.
        """
        write_json(self.directory / "nodes" / f"{_format_file_name(result.node)}.json", result)

    def read_results(self) -> dict[str, NodeCheckResult]:
        """Results by node; a file that is damaged, or of another version, counts as none."""
        found: dict[str, NodeCheckResult] = {}
        for path in sorted((self.directory / "nodes").glob("*.json")):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                result = msgspec.json.decode(path.read_bytes(), type=NodeCheckResult)
                found[result.node] = result
        return found


def find_check_folders(results: Path) -> list[CheckFolder]:
    """The checks below a folder, oldest first."""
    with contextlib.suppress(OSError):
        return [CheckFolder(path) for path in sorted(results.iterdir()) if (path / REQUEST_FILE).is_file()]
    return []


def read_earlier_results(results: Path, current: CheckFolder) -> dict[str, list[NodeCheckResult]]:
    """Earlier results of each node, newest first, from the last checks before the current one."""
    found: dict[str, list[NodeCheckResult]] = {}
    before = [folder for folder in find_check_folders(results) if folder.id != current.id]
    for folder in reversed(before[-NUM_EARLIER:]):
        for node, result in folder.read_results().items():
            found.setdefault(node, []).append(result)
    return found


def sort_nodes(nodes: Sequence[CheckedNode]) -> list[CheckedNode]:
    """In the order of the page: by state."""
    return sorted(nodes, key=lambda each: STATES.index(each.state))


def combine_states(
    nodes: Sequence[ClusterNode], results: dict[str, NodeCheckResult], problems: dict[str, str], listed: dict[str, str]
) -> list[CheckedNode]:
    """The nodes of a cluster, each in one state.

    Args:
        nodes: As the scheduler sees them.
        results: What preflight found.
        problems: Why idle nodes gave no answer.
        listed: Reasons in the list of unfit nodes.
    """
    return sort_nodes([_combine_state(each, results, problems, listed) for each in nodes])


def _combine_state(
    node: ClusterNode, results: dict[str, NodeCheckResult], problems: dict[str, str], listed: dict[str, str]
) -> CheckedNode:
    entry = listed.get(node.name, "")
    if result := results.get(node.name):
        state = STATE_OF_VERDICT[result.verdict]
        return CheckedNode(node=node.name, state=state, reasons=result.reasons, listed=entry)
    if node.state != "idle":
        return CheckedNode(node=node.name, state=node.state, reasons=tuple(filter(None, [node.reason])), listed=entry)
    if problem := problems.get(node.name):
        return CheckedNode(node=node.name, state="no answer", reasons=(problem,), listed=entry)
    return CheckedNode(node=node.name, state="not checked", listed=entry)


def merge_reports(results: Sequence[NodeCheckResult]) -> ClusterReport:
    """The results of all nodes as one preflight, with the differences between them."""
    reports = [each.report for each in results]
    findings = [
        structs.replace(finding, host=finding.host or each.node) for each in results for finding in each.findings
    ]
    return ClusterReport(
        id="preflight",
        version=__version__,
        checks=tuple(dict.fromkeys(finding.group for each in results for finding in each.all_findings)),
        world_size=len(reports),
        nodes=tuple(reports),
        findings=(*findings, *compare_nodes(reports, math.inf, {})),  # clocks were not read at the same time
        expected_nodes=tuple(sorted(each.node for each in results)),
        is_strict=any(each.is_strict for each in results),
        duration_s=max((each.duration_s for each in reports), default=0.0),
    )


def _format_file_name(node: str) -> str:
    return node.replace(":", "_").replace("/", "_")
