"""One preflight from its options to its exit code: on one node, or on all nodes of a launch."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Literal, NamedTuple

from msgspec import Struct, structs

from primus import __version__
from primus.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_UNFIT, PrimusError
from primus.launch.plan import Job
from primus.machine import dimms, measured
from primus.machine.cluster import Layout
from primus.machine.facts import Facts
from primus.machine.measured import Asked, RankResult
from primus.machine.profile import Floor
from primus.machine.tree import Tree
from primus.preflight import (
    adapters,
    check,
    cluster,
    error_counts,
    performance,
    rdma_session,
    report,
    site,
    site_checks,
    storage_speed,
    together,
)
from primus.preflight.cluster import ClusterReport
from primus.preflight.finding import Finding, NodeReport
from primus.preflight.node import Expected, Node, judged, ranges, unknown
from primus.preflight.options import Options, asked_of, check_names, demands_of, limits_of, site_of, without_effect
from primus.preflight.together import Decision
from primus.runs.attempt import Attempt
from primus.runs.files import read_json, to_json
from primus.runs.store import Outcome, Run, new_id
from primus.task import TaskContext

RUN = "performance.run"
"""The check that the measurements ended as they should."""
Started = tuple[Run, Outcome] | PrimusError
"""How the workers ended, or why they did not start."""
SILENT_FILE = "config/silent"
"""There where the workers shall not write on standard output."""


def prepare(options: Options, context: TaskContext) -> Job | None:
    """The job that measures; None where nothing is measured.

    Raises:
        UsageError: An option names nothing, or a threshold is above the peak of its device.
    """
    limits_of(options)
    site_of(options)
    check_names(options)
    if not options.starts_workers:
        return None
    facts = Facts() if context.dry_run or options.device == "cpu" else context.facts()
    asked = asked_of(options, context, facts)
    files = {performance.CONFIG_FILE: to_json(asked)} | ({SILENT_FILE: ""} if context.json else {})
    device: Literal["cpu"] | None = "cpu" if options.device == "cpu" else None  # what is unfit is told in the report
    return Job(name="preflight", workspace=options.workspace, files=files, device=device)


def told_to_workers(attempt: Attempt) -> Asked:
    """What a worker is asked to measure; where standard output carries JSON, it speaks in its log only."""
    if (attempt.run.directory / SILENT_FILE).exists():
        attempt.console = None
    return read_json(attempt.run.directory / performance.CONFIG_FILE, Asked)


def run(options: Options, context: TaskContext) -> int:
    """Check, measure where that was asked, and say what was found; 3 where a node is not fit.

    Raises:
        PrimusError: Node 0 is not reached, its port is in use, or the report cannot be written.
    """
    for name, why in without_effect(options):
        context.say(f"--{name.replace('_', '-')} has no effect: {why}")
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # an orderly end leaves no program behind that was asked
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    node = node_of(options, context)
    if options.report and node.layout.node_rank == 0:
        _make(Path(options.report))
    own = check.run(node, options.groups)
    if node.layout.nnodes == 1:
        return _alone(own, node, options, context)
    if node.layout.node_rank == 0:
        return _led(own, node, options, context)
    return _followed(own, node, options, context)


def examined(options: Options, context: TaskContext) -> ClusterReport:
    """This node by itself, looked at and judged; nothing is measured."""
    node = node_of(options, context)
    return _report_of(options, node, [check.run(node, options.groups)], [])


class Measured(NamedTuple):
    """What the measurements found."""

    findings: list[Finding]
    is_interrupted: bool = False
    """Whether the user ended them; what was found until then is reported."""


class Told(Struct, frozen=True):
    """What is read of the JSON of another preflight."""

    verdict: cluster.Verdict
    verdicts: dict[str, cluster.Verdict]
    reasons: dict[str, tuple[str, ...]] = {}


def _alone(own: NodeReport, node: Node, options: Options, context: TaskContext) -> int:
    found = _measured(node, {0: own.host}, options, context) if options.measures else Measured([])
    code = _told(_report_of(options, node, [own], found.findings), node, options, context)
    return EXIT_INTERRUPTED if found.is_interrupted else code


def _led(own: NodeReport, node: Node, options: Options, context: TaskContext) -> int:
    """Node 0 of several: everybody meets, is measured where all have come, and meets again to hear the end."""
    names = _names(options, context)

    def judge(reports: Sequence[NodeReport], between: Sequence[Finding]) -> ClusterReport:
        return _report_of(options, node, reports, between)

    first, decision = together.lead(
        own, node.layout, node.limits.clock_skew_s, options.time_limit, judge, _decided, names
    )
    if not options.measures:
        return _told(first, node, options, context)
    if not decision.goes_on:
        skipped = unknown(RUN, "not measured", "measured on all nodes", "a node is missing", "start it, and run again")
        return _told(structs.replace(first, findings=(*first.findings, skipped)), node, options, context)
    found, is_interrupted = _measured(node, decision.hosts, options, context)
    if is_interrupted:  # the other nodes were ended as well, and do not come again
        _told(structs.replace(first, findings=(*first.findings, *found)), node, options, context)
        return EXIT_INTERRUPTED

    def final(reports: Sequence[NodeReport], between: Sequence[Finding]) -> ClusterReport:
        gone = [finding for finding in between if finding.check == "cluster.missing"]
        told = _found_elsewhere(reports, decision.hosts, found)
        return structs.replace(first, findings=(*first.findings, *gone, *found, *told))

    last, _ = together.lead(own, node.layout, node.limits.clock_skew_s, options.time_limit, final, _decided, names)
    return _told(last, node, options, context)


def _found_elsewhere(
    reports: Sequence[NodeReport], hosts: Mapping[int, str], found: Sequence[Finding]
) -> Iterator[Finding]:
    """What the other nodes found while all were measured; of a run that failed node 0 may know already."""
    known = {finding.host for finding in found if finding.check == RUN}
    for one in reports:
        host = hosts.get(one.node_rank, one.host)
        if one.node_rank:
            yield from (
                structs.replace(finding, host=host)
                for finding in one.findings
                if finding.check != RUN or host not in known
            )


def _followed(own: NodeReport, node: Node, options: Options, context: TaskContext) -> int:
    """Another node: only what is wrong with it is said here; node 0 has the report."""
    decision = together.follow(own, node.layout, time.time(), options.time_limit)
    if decision and decision.goes_on and options.measures:
        started, during = _watched(node, options, context)
        if _is_interrupted(started):
            raise KeyboardInterrupt
        if "rdma" in options.chosen_tests:
            rdma_session.follow(node, own.host, is_quick=options.quick)
        own = structs.replace(own, findings=(*_own_trouble(started, node.layout), *during))
        limit_s = options.time_limit * len(measured.ALL_TESTS)
        decision = together.follow(own, node.layout, time.time(), limit_s)
    if decision is None:
        raise PrimusError(
            "node 0 gave no answer: it has ended, or another node has come with this rank",
            "see what node 0 says; give each node its own --node-rank",
        )
    host = decision.hosts.get(node.layout.node_rank, own.host)
    verdict = decision.verdicts.get(host, "fail")
    if verdict == "pass":
        return EXIT_OK
    reasons = "".join(f"\n  {reason}" for reason in decision.reasons.get(host, ()))
    print(f"{host} is {report.SAID[verdict]}{reasons}", file=sys.stderr)
    return EXIT_UNFIT


def _decided(judged: ClusterReport) -> Decision:
    verdicts = {host: judged.verdict(host) for host in judged.expected_nodes}
    reasons = {host: tuple(report.reasons(judged, host)) for host, verdict in verdicts.items() if verdict != "pass"}
    return Decision(hosts={}, verdicts=verdicts, reasons=reasons)


def _report_of(options: Options, node: Node, nodes: Sequence[NodeReport], findings: Sequence[Finding]) -> ClusterReport:
    """The report of all nodes; those that were expected by name and did not come are missing."""
    there = [one.host for one in nodes]
    named = [finding.host for finding in findings if finding.check == "cluster.missing"]
    wanted = [host.partition(".")[0] for host in together.expanded(options.expected_nodes or "")]
    absent = [host for host in wanted if host not in there and host not in named]
    return ClusterReport(
        id=options.report_file_name or new_id(node.now),
        version=__version__,
        checks=(*options.groups, *(("performance",) if options.measures else ())),
        world_size=node.layout.world_size,
        nodes=tuple(nodes),
        findings=(*findings, *cluster.missing(absent, options.time_limit)),
        expected_nodes=tuple(sorted({*there, *named, *absent})),
        ignored=options.ignore,
        is_strict=options.strict,
    )


def _told(judged: ClusterReport, node: Node, options: Options, context: TaskContext) -> int:
    began = min(one.time for one in judged.nodes)
    judged = structs.replace(judged, duration_s=round(max(0.0, time.time() - began), 3))
    context.result(report.as_json(judged), report.text(judged, is_coloured=sys.stdout.isatty() and not context.json))
    if options.report:
        context.say(f"report: {report.write(judged, Path(options.report))}")
    if options.write_expect:
        context.say(_written_expectations(judged, node, options.write_expect))
    return EXIT_OK if judged.overall == "pass" else EXIT_UNFIT


def _written_expectations(judged: ClusterReport, node: Node, file: str) -> str:
    """Write what this node has as what the others must have, unless it is unfit; gives what was done."""
    own = next(one.host for one in judged.nodes if one.node_rank == node.layout.node_rank)
    if judged.verdict(own) != "pass":
        return f"{file} was not written: {own} is {report.SAID[judged.verdict(own)]}"
    site.save(site_checks.expectations_of(node), Path(file))
    return f"expectations: {file}, from {own}; read it before you use it"


def _make(folder: Path) -> None:
    """Make the folder of the report before anything takes time.

    Raises:
        PrimusError: It cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PrimusError(f"--report {folder}: {error.strerror}", "choose a folder that can be written") from None


def _measured(node: Node, hosts: Mapping[int, str], options: Options, context: TaskContext) -> Measured:
    """Findings of the measurements, and of the errors that ports counted meanwhile.

    Args:
        hosts: Name of each node in the report, by rank.
    """
    started, during = _watched(node, options, context)
    host = hosts.get(node.layout.node_rank, "")
    found = [structs.replace(finding, host=host) for finding in during]
    is_interrupted = _is_interrupted(started)
    if started is not None:
        found = [*_of_workers(started, node, hosts, options, context), *found]
    if "rdma" in options.chosen_tests and not is_interrupted:
        try:
            found += rdma_session.lead(node, host, hosts, _show_progress, is_quick=options.quick)
        except KeyboardInterrupt:
            is_interrupted = True
    return Measured(found, is_interrupted)


def _show_progress(text: str) -> None:
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def _of_workers(
    started: Started, node: Node, hosts: Mapping[int, str], options: Options, context: TaskContext
) -> list[Finding]:
    """Findings of what the workers measured."""
    if isinstance(started, PrimusError):
        advice = started.hint or "correct it, and measure again"
        return [unknown(RUN, started.problem, "measured", "the workers did not start", advice)]
    run_folder, outcome = started
    asked = asked_of(options, context, node.facts)
    results = performance.read(run_folder.directory, asked, node.layout.world_size)
    results = structs.replace(results, ranks=tuple(_placed(rank, hosts, node.layout.nproc) for rank in results.ranks))
    demands = structs.replace(demands_of(options, context, node.facts), host_gb_per_s_min=_host_floor(node))
    found = performance.findings(results, node.facts, demands)
    found += _unmeasured({rank.rank for rank in results.ranks if rank.is_complete}, hosts, node.layout.nproc)
    if outcome.state != "done":
        failure = outcome.first_failure
        host = hosts.get(failure.rank // node.layout.nproc, "") if failure else ""
        found.append(_broken(outcome, host, run_folder))
    return found


def _is_interrupted(started: Started | None) -> bool:
    return isinstance(started, tuple) and started[1].exit_code == EXIT_INTERRUPTED


def _watched(node: Node, options: Options, context: TaskContext) -> tuple[Started | None, list[Finding]]:
    """Run the workers and what this node measures by itself; gives how the workers ended, and what was found: errors
    that were counted meanwhile, and the node's own figures."""
    ports, counts = adapters.read_counters(node), error_counts.read_counts(node)
    started = _launched(context) if context.launch else None
    found: list[Finding] = []
    if "storage" in options.chosen_tests and not _is_interrupted(started):
        found += storage_speed.measure(node, is_quick=options.quick)
    found += [
        one for one in adapters.grown(ports, adapters.read_counters(node), is_loaded=True) if one.status == "warn"
    ]
    return started, [*found, *error_counts.grown(counts, error_counts.read_counts(node))]


def _host_floor(node: Node) -> Floor | None:
    """What the host's memory must reach: as the site says, else half of what its modules could."""
    wanted = node.expected.site.memory.bandwidth_gb_per_s if node.expected.site else None
    if wanted is not None:
        return Floor(value=wanted, unit="GB/s", source="the site's file of --expect")
    peak = dimms.peak_gb_per_s(site_checks.read_dimms(node)[0])
    source = f"half of the peak of the memory modules, {peak:.0f} GB/s" if peak else ""
    return Floor(value=peak / 2, unit="GB/s", source=source) if peak else None


def _placed(rank: RankResult, hosts: Mapping[int, str], nproc: int) -> RankResult:
    """With the node that it was started on: a rank that never met the others does not know its own."""
    number = rank.rank // nproc
    return structs.replace(rank, node=number, host=hosts.get(number, rank.host))


def _broken(outcome: Outcome, host: str, run: Run) -> Finding:
    """The measurements ended early: of the node whose rank failed first."""
    failure = outcome.first_failure
    who = f"rank {failure.rank}" if failure else ""
    log = f"{run.directory}/{failure.log}" if failure and failure.log else f"{run.directory}/logs"
    expected, reason = "all tests end", "of several ranks that failed it was the first"
    return judged(
        False, "fail", RUN, outcome.reason or outcome.state, expected, reason, f"see {log}", subject=who, host=host
    )


def _own_trouble(started: Started | None, layout: Layout) -> list[Finding]:
    """What this node alone may know of how its workers ended: where node 0 does not see its files."""
    if started is None:
        return []
    if isinstance(started, PrimusError):
        return [unknown(RUN, started.problem, "measured", "the workers did not start here", started.hint)]
    run, outcome = started
    failure = outcome.first_failure
    is_own = failure is not None and failure.rank // layout.nproc == layout.node_rank
    return [_broken(outcome, "", run)] if is_own else []


def _unmeasured(complete: Set[int], hosts: Mapping[int, str], nproc: int) -> Iterator[Finding]:
    """Nodes some of whose ranks did not come to the end of the tests: not known to be healthy."""
    for node_rank, host in sorted(hosts.items()):
        short = set(range(node_rank * nproc, (node_rank + 1) * nproc)) - complete
        if short:
            yield unknown(
                "performance.results",
                f"not all of rank {ranges(short)}",
                "of every rank",
                "what was not measured is not known to be healthy",
                "see which rank failed first, and measure again without its node",
                host=host,
            )


def _launched(context: TaskContext) -> Started:
    assert context.launch is not None
    try:
        return context.launch()
    except PrimusError as error:
        return error


def node_of(options: Options, context: TaskContext) -> Node:
    """This node, read."""
    layout = context.layout or Layout(nproc=1)
    return Node(
        facts=context.facts(),
        tree=Tree(),
        environ=context.environ,
        limits=limits_of(options),
        expected=Expected(
            gpus=options.expected_gpus,
            rdma_nics=options.expected_rdma_nics,
            rdma_nic_allowlist=options.rdma_nic_allowlist,
            tools=options.require_tools,
            folders=tuple(_folders(options, context)),
            allowed_processes=options.allowed_procs,
            allows_foreign_processes=options.allow_foreign_procs,
            skips_kernel_log=options.skip_dmesg,
            site=site_of(options),
        ),
        layout=layout,
        now=time.time(),
        is_root=os.geteuid() == 0,
    )


def _folders(options: Options, context: TaskContext) -> Iterator[tuple[str, str]]:
    yield options.workspace, "workspace"
    if options.report:
        yield options.report, "report"
    data = options.data or context.environ.get("DATA_PATH")
    if data:
        yield data, "data"
    if context.environ.get("HF_HOME"):
        yield context.environ["HF_HOME"], "HF_HOME"
    yield tempfile.gettempdir(), "temporary files"


def _names(options: Options, context: TaskContext) -> list[str]:
    """Host names of the nodes by rank, where Slurm or the user tells them."""
    return together.expanded(context.environ.get("SLURM_STEP_NODELIST", "") or options.expected_nodes or "")
