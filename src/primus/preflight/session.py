"""One preflight from options to exit code: on one node, or on all nodes of a launch."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct, structs

from primus import __version__
from primus.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_UNFIT, PrimusError
from primus.machine import measurements
from primus.machine.cluster import ClusterLayout
from primus.machine.facts import MachineFacts
from primus.machine.host_list import expand_hosts
from primus.machine.measurements import MeasurementPlan
from primus.machine.probe import find_machine_root
from primus.machine.tree import FileTree
from primus.plan import LaunchJob
from primus.preflight import run_checks as check
from primus.preflight.checks import site as site_checks
from primus.preflight.findings import rules, site
from primus.preflight.findings.finding import CheckFinding, NodeReport
from primus.preflight.findings.node import NodeExpectations, PreflightNode
from primus.preflight.nodes import cluster, collect_reports
from primus.preflight.nodes.cluster import ClusterReport
from primus.preflight.nodes.collect_reports import JudgedReports, PreflightDecision
from primus.preflight.options import (
    Options,
    build_limits,
    build_measurement_plan,
    find_unused_options,
    load_site,
    validate_check_names,
)
from primus.preflight.performance import judge as performance
from primus.preflight.rdma import session as rdma_session
from primus.preflight.report import formats as report
from primus.preflight.report import unfit_list
from primus.preflight.run_measurements import (
    RUN,
    MeasuredFindings,
    report_own_problems,
    run_measurements,
    run_workers,
    was_interrupted,
)
from primus.runs.attempt import Attempt
from primus.runs.files import read_json, to_json
from primus.runs.store import create_run_id
from primus.task import TaskContext

SILENT_FILE = "config/silent"
"""Present if the workers must not write to standard output."""


def prepare(options: Options, context: TaskContext) -> LaunchJob | None:
    """The job that measures; None if there is nothing to measure.

    Raises:
        UsageError: An option contains an unknown name, or a threshold is above the peak of its device.
    """
    build_limits(options)
    load_site(options)
    validate_check_names(options)
    if not options.starts_workers:
        return None
    facts = MachineFacts() if context.dry_run or options.device == "cpu" else context.facts()
    asked = build_measurement_plan(options, context, facts)
    files = {performance.CONFIG_FILE: to_json(asked)} | ({SILENT_FILE: ""} if context.json else {})
    device: Literal["cpu"] | None = "cpu" if options.device == "cpu" else None  # the report lists unfit devices
    return LaunchJob(name="preflight", workspace=options.workspace, files=files, device=device)


def build_worker_config(attempt: Attempt) -> MeasurementPlan:
    """The plan of a worker; if standard output carries JSON, the worker writes only to its log."""
    if (attempt.run.directory / SILENT_FILE).exists():
        attempt.console = None
    return read_json(attempt.run.directory / performance.CONFIG_FILE, MeasurementPlan)


def run(options: Options, context: TaskContext) -> int:
    """Run the checks and the requested measurements, and report the findings; returns 3 if a node is not fit.

    Raises:
        PrimusError: Node 0 is not reached, its port is in use, or the report cannot be written.
    """
    # Checks and measurements of all nodes run in the same steps:
    # 1. every node checks itself;
    # 2. the nodes report to node 0, which answers with its decision;
    # 3. if all nodes responded, all start workers, then the RDMA session;
    # 4. the nodes report again, and node 0 prints the report.
    # A node that fails in step 3 still takes part in step 4: otherwise node 0 would wait for the whole limit.
    for name, why in find_unused_options(options):
        context.say(f"--{name.replace('_', '-')} has no effect: {why}")
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # runs the finally blocks, which stop child processes
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    node = build_node(options, context)
    if options.report and node.layout.node_rank == 0:
        _make_report_folder(Path(options.report))
    own = check.run(node, options.groups)
    if node.layout.nnodes == 1:
        return _run_single_node(own, node, options, context)
    if node.layout.node_rank == 0:
        return _run_leader(own, node, options, context)
    return _run_follower(own, node, options, context)


def examine_node(options: Options, context: TaskContext) -> ClusterReport:
    """The findings and verdict of this node, without measurements."""
    node = build_node(options, context)
    return _build_report(options, node, [check.run(node, options.groups)], [])


class OtherPreflight(Struct, frozen=True):
    """Fields of another preflight's JSON report."""

    verdict: cluster.Verdict
    verdicts: dict[str, cluster.Verdict]
    reasons: dict[str, tuple[str, ...]] = {}


def _run_single_node(own: NodeReport, node: PreflightNode, options: Options, context: TaskContext) -> int:
    found = run_measurements(node, {0: own.host}, options, context) if options.measures else MeasuredFindings([])
    code = _report_result(_build_report(options, node, [own], found.findings), node, options, context)
    return EXIT_INTERRUPTED if found.is_interrupted else code


def _run_leader(own: NodeReport, node: PreflightNode, options: Options, context: TaskContext) -> int:
    """Node 0 of several: collect the reports, measure if all nodes responded, and collect the results of the other
    nodes."""
    names = _list_host_names(options, context)

    def judge(reports: Sequence[NodeReport], between: Sequence[CheckFinding]) -> JudgedReports:
        report = _build_report(options, node, reports, between)
        return report, _build_decision(report)

    first, decision = collect_reports.collect_reports(
        own, node.layout, node.limits.clock_skew_s, options.time_limit, judge, names
    )
    if not options.measures:
        return _report_result(first, node, options, context)
    if not decision.goes_on:
        skipped = rules.judge(f"{RUN}/missing_node", False)
        return _report_result(structs.replace(first, findings=(*first.findings, skipped)), node, options, context)
    # State: all nodes have received the decision and start their workers now, at the same time as this one.
    found, is_interrupted = run_measurements(node, decision.hosts, options, context)
    if is_interrupted:  # the other nodes were interrupted too and send no second report
        _report_result(structs.replace(first, findings=(*first.findings, *found)), node, options, context)
        return EXIT_INTERRUPTED

    def final(reports: Sequence[NodeReport], between: Sequence[CheckFinding]) -> JudgedReports:
        gone = [finding for finding in between if finding.check == "cluster.missing"]
        reported = _read_other_preflight(reports, decision.hosts, found)
        report = structs.replace(first, findings=(*first.findings, *gone, *found, *reported))
        return report, _build_decision(report)

    # The second exchange: `final` keeps the findings of the first one and adds those of the measurements.
    last, _ = collect_reports.collect_reports(
        own, node.layout, node.limits.clock_skew_s, options.time_limit, final, names
    )
    return _report_result(last, node, options, context)


def _read_other_preflight(
    reports: Sequence[NodeReport], hosts: Mapping[int, str], found: Sequence[CheckFinding]
) -> Iterator[CheckFinding]:
    """Findings of the other nodes during the measurements, without failed runs that node 0 already reports."""
    known = {finding.host for finding in found if finding.check == RUN}
    for one in reports:
        host = hosts.get(one.node_rank, one.host)
        if one.node_rank:
            yield from (
                structs.replace(finding, host=host)
                for finding in one.findings
                if finding.check != RUN or host not in known
            )


def _run_follower(own: NodeReport, node: PreflightNode, options: Options, context: TaskContext) -> int:
    """Another node: prints only its own problems; node 0 has the report."""
    decision = collect_reports.send_report(own, node.layout, time.time(), options.time_limit)
    # `goes_on` is node 0's answer for all nodes: either all start workers or none, or the rendezvous would wait for
    # its limit.
    if decision and decision.goes_on and options.measures:
        started, during = run_workers(node, options, context)
        if was_interrupted(started):
            raise KeyboardInterrupt
        # After a failed run as well: node 0 leads the RDMA session unless the user interrupted it, and waits for
        # every node.
        if "rdma" in options.chosen_tests:
            rdma_session.follow_measurements(node, own.host, is_quick=options.quick)
        own = structs.replace(own, findings=(*report_own_problems(started, node.layout), *during))
        # Node 0 answers only after its own measurements, each of which has the time limit.
        limit_s = options.time_limit * len(measurements.ALL_TESTS)
        decision = collect_reports.send_report(own, node.layout, time.time(), limit_s)
    # None in either exchange: node 0 exited, timed out, or rejected the connection because the rank had already
    # arrived.
    if decision is None:
        raise PrimusError(
            "node 0 did not respond: it exited, or another node uses this rank",
            "see node 0's output; give each node a unique --node-rank",
        )
    host = decision.hosts.get(node.layout.node_rank, own.host)
    verdict = decision.verdicts.get(host, "fail")
    if verdict == "pass":
        return EXIT_OK
    reasons = "".join(f"\n  {reason}" for reason in decision.reasons.get(host, ()))
    print(f"{host} is {report.VERDICT_WORDS[verdict]}{reasons}", file=sys.stderr)
    return EXIT_UNFIT


def _build_decision(judged: ClusterReport) -> PreflightDecision:
    verdicts = {host: judged.judge_host(host) for host in judged.expected_nodes}
    reasons = {
        host: tuple(report.list_reasons(judged, host)) for host, verdict in verdicts.items() if verdict != "pass"
    }
    return PreflightDecision(hosts={}, verdicts=verdicts, reasons=reasons)


def _build_report(
    options: Options, node: PreflightNode, nodes: Sequence[NodeReport], findings: Sequence[CheckFinding]
) -> ClusterReport:
    """The report of all nodes; nodes that were expected by name and did not respond are missing."""
    there = [one.host for one in nodes]
    named = [finding.host for finding in findings if finding.check == "cluster.missing"]
    wanted = [host.partition(".")[0] for host in expand_hosts(options.expected_nodes or "")]
    absent = [host for host in wanted if host not in there and host not in named]
    return ClusterReport(
        id=options.report_file_name or create_run_id(node.now),
        version=__version__,
        checks=(*options.groups, *(("performance",) if options.measures else ())),
        world_size=node.layout.world_size,
        nodes=tuple(nodes),
        findings=(*findings, *cluster.report_missing_nodes(absent, options.time_limit)),
        expected_nodes=tuple(sorted({*there, *named, *absent})),
        ignored=options.ignore,
        is_strict=options.strict,
    )


def _report_result(judged: ClusterReport, node: PreflightNode, options: Options, context: TaskContext) -> int:
    began = min(one.time for one in judged.nodes)
    judged = structs.replace(judged, duration_s=round(max(0.0, time.time() - began), 3))
    context.result(
        report.build_json(judged), report.format_text(judged, is_colored=sys.stdout.isatty() and not context.json)
    )
    if options.record_unfit:
        unfit_list.record_failing_nodes(judged, context)
    if options.report:
        context.say(f"report: {report.write_report(judged, Path(options.report))}")
    if options.write_expect:
        context.say(_write_expectations(judged, node, options.write_expect))
    return EXIT_OK if judged.overall_verdict == "pass" else EXIT_UNFIT


def _write_expectations(judged: ClusterReport, node: PreflightNode, file: str) -> str:
    """Write the properties of this node as expectations, unless it is unfit; returns a message."""
    own = next(one.host for one in judged.nodes if one.node_rank == node.layout.node_rank)
    if judged.judge_host(own) != "pass":
        return f"{file} was not written: {own} is {report.VERDICT_WORDS[judged.judge_host(own)]}"
    site.save(site_checks.build_expectations(node), Path(file))
    return f"expectations: {file}, from {own}; read it before you use it"


def _make_report_folder(folder: Path) -> None:
    """Create the folder of the report before any long step.

    Raises:
        PrimusError: It cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PrimusError(f"--report {folder}: {error.strerror}", "choose a folder that can be written") from None


def build_node(options: Options, context: TaskContext) -> PreflightNode:
    """Facts and expectations of this node."""
    layout = context.layout or ClusterLayout(nproc=1)
    return PreflightNode(
        facts=context.facts(),
        tree=FileTree(find_machine_root(context.environ)),
        environ=context.environ,
        limits=build_limits(options),
        expected=NodeExpectations(
            gpus=options.expected_gpus,
            rdma_nics=options.expected_rdma_nics,
            rdma_nic_allowlist=options.rdma_nic_allowlist,
            tools=options.require_tools,
            folders=tuple(_list_folders(options, context)),
            allowed_processes=options.allowed_procs,
            allows_foreign_processes=options.allow_foreign_procs,
            skips_kernel_log=options.skip_dmesg,
            site=load_site(options),
        ),
        layout=layout,
        now=time.time(),
        is_root=os.geteuid() == 0,
    )


def _list_folders(options: Options, context: TaskContext) -> Iterator[tuple[str, str]]:
    yield options.workspace, "workspace"
    if options.report:
        yield options.report, "report"
    data = options.data or context.environ.get("DATA_PATH")
    if data:
        yield data, "data"
    if context.environ.get("HF_HOME"):
        yield context.environ["HF_HOME"], "HF_HOME"
    yield tempfile.gettempdir(), "temporary files"


def _list_host_names(options: Options, context: TaskContext) -> list[str]:
    """Host names of the nodes by rank, as Slurm or the user specifies them; empty if neither does."""
    return expand_hosts(context.environ.get("SLURM_STEP_NODELIST", "") or options.expected_nodes or "")
