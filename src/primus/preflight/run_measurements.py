"""The measurements of a preflight on one node: run them, and judge their results."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Set
from typing import NamedTuple

from msgspec import structs

from primus.errors import EXIT_INTERRUPTED, PrimusError
from primus.machine.cluster import ClusterLayout
from primus.machine.host import dimms
from primus.machine.measurements import RankResult
from primus.machine.profile import Floor
from primus.preflight.checks import error_counts, nic_health
from primus.preflight.checks import site as site_checks
from primus.preflight.findings.finding import CheckFinding
from primus.preflight.findings.node import PreflightNode, format_ranges
from primus.preflight.findings.rules import About, judge
from primus.preflight.options import Options, build_demands, build_measurement_plan
from primus.preflight.performance import judge as performance
from primus.preflight.performance import storage_speed
from primus.preflight.rdma import session as rdma_session
from primus.runs.store import Run, RunOutcome
from primus.task import TaskContext

RUN = "performance.run"
"""Check that the measurements completed."""
Started = tuple[Run, RunOutcome] | PrimusError
"""Run and outcome of the workers, or why they did not start."""


class MeasuredFindings(NamedTuple):
    """Findings of the measurements."""

    findings: list[CheckFinding]
    is_interrupted: bool = False
    """Whether the user interrupted the measurements; partial results are reported."""


def run_measurements(
    node: PreflightNode, hosts: Mapping[int, str], options: Options, context: TaskContext
) -> MeasuredFindings:
    """Findings of the measurements, and of errors that ports counted meanwhile.

    Args:
        hosts: Name of each node in the report, by rank.
    """
    started, during = run_workers(node, options, context)
    host = hosts.get(node.layout.node_rank, "")
    # Findings of node 0 get its host here; those of other nodes get theirs in _read_other_preflight.
    found = [structs.replace(finding, host=host) for finding in during]
    is_interrupted = was_interrupted(started)
    if started is not None:
        found = [*_judge_workers(started, node, hosts, options, context), *found]
    # The RDMA session starts after the workers have exited: it uses the port of their rendezvous.
    if "rdma" in options.chosen_tests and not is_interrupted:
        try:
            found += rdma_session.lead_measurements(node, host, hosts, _show_progress, is_quick=options.quick)
        except KeyboardInterrupt:
            is_interrupted = True
    return MeasuredFindings(found, is_interrupted)


def _show_progress(text: str) -> None:
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def _judge_workers(
    started: Started, node: PreflightNode, hosts: Mapping[int, str], options: Options, context: TaskContext
) -> list[CheckFinding]:
    """Findings for the results of the workers."""
    if isinstance(started, PrimusError):
        advice = started.hint or "fix it and measure again"
        return [judge(f"{RUN}/not_started", False, started.problem, place="", fix=advice)]
    run_folder, outcome = started
    asked = build_measurement_plan(options, context, node.facts)
    results = performance.read_results(run_folder.directory, asked, node.layout.world_size)
    results = structs.replace(
        results, ranks=tuple(_fill_host(rank, hosts, node.layout.nproc) for rank in results.ranks)
    )
    demands = structs.replace(build_demands(options, context, node.facts), host_gb_per_s_min=_find_host_floor(node))
    found = performance.judge_results(results, node.facts, demands)
    found += _report_unmeasured_nodes(
        {rank.rank for rank in results.ranks if rank.is_complete}, hosts, node.layout.nproc
    )
    if outcome.state != "done":
        failure = outcome.first_failure
        host = hosts.get(failure.rank // node.layout.nproc, "") if failure else ""
        found.append(_report_failed_run(outcome, host, run_folder))
    return found


def was_interrupted(started: Started | None) -> bool:
    return isinstance(started, tuple) and started[1].exit_code == EXIT_INTERRUPTED


def run_workers(
    node: PreflightNode, options: Options, context: TaskContext
) -> tuple[Started | None, list[CheckFinding]]:
    """Run the workers and this node's own measurements; returns the outcome of the workers, and the findings: errors
    counted meanwhile, and the node's own figures."""
    # Read before and after, on each node for itself: the difference contains the errors under load of all tests.
    ports, counts = nic_health.read_counters(node), error_counts.read_counts(node)
    # Blocks until the workers of this node have exited; the launcher ends them if another node fails.
    started = _launch_workers(context) if context.launch else None
    found: list[CheckFinding] = []
    if "storage" in options.chosen_tests and not was_interrupted(started):
        # Storage is measured after the workers: both would compete for processors and for the network.
        found += storage_speed.measure_folders(node, is_quick=options.quick)
    found += [
        one
        for one in nic_health.find_grown_counters(ports, nic_health.read_counters(node), is_loaded=True)
        if one.status == "warn"
    ]
    return started, [*found, *error_counts.find_grown_counts(counts, error_counts.read_counts(node))]


def _find_host_floor(node: PreflightNode) -> Floor | None:
    """Floor of the host's memory bandwidth: the site's, or else half of the peak of its modules."""
    wanted = node.expected.site.memory.bandwidth_gb_per_s if node.expected.site else None
    if wanted is not None:
        return Floor(value=wanted, unit="GB/s", source="the site's file of --expect")
    peak = dimms.compute_peak_gb_per_s(site_checks.read_dimms(node)[0])
    source = f"half of the peak of the memory modules, {peak:.0f} GB/s" if peak else ""
    return Floor(value=peak / 2, unit="GB/s", source=source) if peak else None


def _fill_host(rank: RankResult, hosts: Mapping[int, str], nproc: int) -> RankResult:
    """The result with the node on which the rank was started: a rank without a rendezvous does not know its node."""
    number = rank.rank // nproc
    return structs.replace(rank, node=number, host=hosts.get(number, rank.host))


def _report_failed_run(outcome: RunOutcome, host: str, run: Run) -> CheckFinding:
    """The measurements ended early: names the node whose rank failed first."""
    failure = outcome.first_failure
    who = f"rank {failure.rank}" if failure else ""
    log = f"{run.directory}/{failure.log}" if failure and failure.log else f"{run.directory}/logs"
    return judge(RUN, False, outcome.reason or outcome.state, About(who, host), fix=f"see {log}")


def report_own_problems(started: Started | None, layout: ClusterLayout) -> list[CheckFinding]:
    """Failures of the workers that only this node knows, if node 0 cannot read its files."""
    if started is None:
        return []
    if isinstance(started, PrimusError):
        return [judge(f"{RUN}/not_started", False, started.problem, place=" here", fix=started.hint)]
    run, outcome = started
    failure = outcome.first_failure
    # A failure on another node is known to node 0 from that node: it is reported once.
    is_own = failure is not None and failure.rank // layout.nproc == layout.node_rank
    return [_report_failed_run(outcome, "", run)] if is_own else []


def _report_unmeasured_nodes(complete: Set[int], hosts: Mapping[int, str], nproc: int) -> Iterator[CheckFinding]:
    """Nodes with ranks that did not complete the tests; they are not known to be healthy."""
    for node_rank, host in sorted(hosts.items()):
        short = set(range(node_rank * nproc, (node_rank + 1) * nproc)) - complete
        if short:
            yield judge("performance.results", False, format_ranges(short), About(host=host))


def _launch_workers(context: TaskContext) -> Started:
    assert context.launch is not None
    try:
        return context.launch()
    except PrimusError as error:
        return error
