"""One preflight from its options to its exit code: on one node, or on all nodes of a launch."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct, structs

from primus import __version__
from primus.config.docs import field_docs
from primus.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_UNFIT, PrimusError, UsageError, did_you_mean
from primus.launch.plan import Job
from primus.machine import measured
from primus.machine.cluster import Layout
from primus.machine.facts import Facts
from primus.machine.measured import Asked
from primus.machine.tree import Tree
from primus.preflight import check, cluster, network, performance, report, thresholds, together
from primus.preflight.cluster import ClusterReport
from primus.preflight.finding import Finding, NodeReport
from primus.preflight.node import GROUPS, Expected, Group, Node, unknown
from primus.preflight.performance import Demands
from primus.preflight.thresholds import Thresholds
from primus.preflight.together import Decision
from primus.runs.attempt import Attempt
from primus.runs.files import read_json, to_json
from primus.runs.store import Outcome, Run, new_id
from primus.task import TaskContext

MIB = 1 << 20
SILENT_FILE = "config/silent"
"""There where the workers shall not write on standard output."""
OLD_TESTS = {
    "gemm": "gemm",
    "intra-allreduce": "collectives",
    "intra-alltoall": "collectives",
    "inter-allreduce": "collectives",
    "inter-alltoall": "collectives",
    "inter-p2p": "pairs",
    "inter-ring-p2p": "pairs",
}
"""What measures the same as a test of the existing system (AMD-AGI/Primus preflight)."""


class Options(Struct, frozen=True, kw_only=True):
    """Options of `preflight`."""

    action: Annotated[Literal["check"], Meta(extra={"positional": True})] = "check"
    """Look and judge, which is all there is to do."""
    host: bool = False
    """Check the host: processors, memory, limits, kernel, clock, drives. Without any of these five, all are checked."""
    gpu: bool = False
    """Check the devices: number, model, memory, links, errors, heat, who uses them."""
    network: bool = False
    """Check the network: RDMA ports, interfaces, names, variables."""
    storage: bool = False
    """Check the folders of runs, data and models."""
    software: bool = False
    """Check what is installed."""
    perf: Annotated[bool, Meta(extra={"aliases": ("--perf-test", "--tier2-perf")})] = False
    """Measure matrix products, memory and collectives as well."""
    quick: bool = False
    """Measure with short times and few sizes; looking is quick anyway."""
    tests: str | None = None
    """What to measure, separated by commas: sanity, gemm, memory, host_copy, collectives, pairs; implies --perf."""
    comm_sizes_mb: str | None = None
    """Sizes of the collectives in MiB, separated by commas."""
    report: Annotated[str | None, Meta(extra={"aliases": ("--dump-path",)})] = None
    """Folder for the report; each preflight makes a folder of its own in it."""
    report_file_name: str | None = None
    """Name of that folder, where it must be known."""
    strict: bool = False
    """Warnings make a node unfit."""
    ignore: Annotated[tuple[str, ...], Meta(extra={"aliases": ("--preflight-ignore",)})] = ()
    """Checks that do not count, such as host.memlock; the report names them."""
    thresholds: str | None = None
    """YAML file with other limits than the defaults."""
    expected_gpus: int | None = None
    """Devices that every node must have."""
    expected_rdma_nics: int | None = None
    """RDMA devices that must be active on every node."""
    rdma_nic_allowlist: str | None = None
    """Which RDMA devices count, written as NCCL_IB_HCA."""
    expected_nodes: str | None = None
    """Names of the nodes that must report, as Slurm lists them: node[01-04]."""
    require_tools: tuple[str, ...] = ()
    """Programs that must be there."""
    allowed_procs: tuple[str, ...] = ()
    """Programs that may use devices besides the usual watchers."""
    allow_foreign_procs: bool = False
    """Any program may use the devices."""
    skip_dmesg: bool = False
    """Leave the kernel log unread."""
    dmesg_minutes: float | None = None
    """How far back the kernel log counts, in minutes (default: 720, since boot at most)."""
    time_limit: Annotated[
        float, Meta(gt=0, extra={"aliases": ("--dist-timeout-sec", "--rccl-timeout-sec", "--wait-timeout-sec")})
    ] = 120.0
    """Seconds for the nodes to meet, and for each measurement."""
    per_gpu_timeout_sec: float | None = None
    """Seconds for each measurement of one device, where that is less."""
    ulimit_l_min_gb: float | None = None
    """Least memory that may be locked, in GiB (default: 32)."""
    shm_min_gb: float | None = None
    """Least size of /dev/shm, in GiB (default: 8)."""
    rocm_smi_timeout_sec: Annotated[float | None, Meta(extra={"aliases": ("--smi-timeout-sec",)})] = None
    """Seconds after which a management tool counts as hung (default: 5)."""
    rocm_smi_warn_sec: float | None = None
    """Seconds after which a management tool counts as slow (default: 1)."""
    hbm_busy_threshold_gib: float | None = None
    """Device memory that may be in use, in GiB (default: 2)."""
    gpu_activity_warn_pct: float | None = None
    """Device activity that is normal, in per cent (default: 20)."""
    clock_skew_warn_sec: float | None = None
    """Seconds that clocks may differ (default: 30)."""
    gemm_tflops_min: float | None = None
    """Least speed of the matrix product of every device, in TFLOP/s."""
    hbm_gbs_min: float | None = None
    """Least copy rate of every device's memory, in GB/s."""
    rccl_size_mb: int = 64
    """Size at which --rccl-gbs-min holds, in MiB."""
    rccl_gbs_min: float | None = None
    """Least bus bandwidth of a node's all_reduce, in GB/s."""
    disable_pdf: bool = False
    """Accepted, and without effect: the report is Markdown, HTML and JSON."""
    plot: bool = False
    """Accepted, and without effect: the report's tables hold the numbers."""
    no_clean_dump_path: bool = False
    """Accepted, and without effect: nothing older is ever read or removed."""
    intra_group_sizes: str | None = None
    """Accepted, and without effect: groups are a node's processes, and all processes."""
    inter_group_sizes: str | None = None
    """Accepted, and without effect: groups are a node's processes, and all processes."""
    ring_p2p_sizes_mb: str | None = None
    """Accepted, and without effect: every two processes are measured with each other."""
    data: str | None = None
    """Folder of the training data, which is checked as well."""
    workspace: str = "./output"
    """Folder of all run folders; what is measured makes one there."""

    @property
    def measures(self) -> bool:
        """Whether anything is measured."""
        return self.perf or bool(self.tests)

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of checks that were chosen; all where none was."""
        chosen = tuple(group for group in GROUPS if getattr(self, group))
        return chosen or GROUPS


WITHOUT_EFFECT = (
    *("disable_pdf", "plot", "no_clean_dump_path"),
    *("intra_group_sizes", "inter_group_sizes", "ring_p2p_sizes_mb"),
)
OF_MEASURING = ("comm_sizes_mb", "per_gpu_timeout_sec", "gemm_tflops_min", "hbm_gbs_min", "rccl_gbs_min")
LIMITS = {
    "ulimit_l_min_gb": "memlock_gib",
    "shm_min_gb": "shm_gib",
    "rocm_smi_timeout_sec": "smi_limit_s",
    "rocm_smi_warn_sec": "smi_warn_s",
    "hbm_busy_threshold_gib": "gpu_busy_gib",
    "gpu_activity_warn_pct": "gpu_activity_percent",
    "clock_skew_warn_sec": "clock_skew_s",
}
"""Thresholds by the option that sets each."""


def prepare(options: Options, context: TaskContext) -> Job | None:
    """The job that measures; None where nothing is measured.

    Raises:
        UsageError: An option names nothing, or a threshold is above the peak of its device.
    """
    limits_of(options)
    check_names(options)
    if not options.measures:
        return None
    facts = Facts() if context.dry_run else context.facts()
    asked = asked_of(options, context, facts)
    files = {performance.CONFIG_FILE: to_json(asked)} | ({SILENT_FILE: ""} if context.json else {})
    return Job(name="preflight", workspace=options.workspace, files=files)


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
    for name, why in _without_effect(options):
        context.say(f"--{name.replace('_', '-')} has no effect: {why}")
    node = node_of(options, context)
    own = check.run(node, options.groups)
    if node.layout.nnodes == 1:
        return _alone(own, node, options, context)
    if node.layout.node_rank == 0:
        return _led(own, node, options, context)
    return _followed(own, node, options, context)


def examined(options: Options, context: TaskContext) -> ClusterReport:
    """This node by itself, looked at and judged; nothing is measured."""
    node = node_of(options, context)
    return _judged(options, node, [check.run(node, options.groups)], [])


class Told(Struct, frozen=True):
    """What is read of the JSON of another preflight."""

    verdict: cluster.Verdict
    verdicts: dict[str, cluster.Verdict]
    reasons: dict[str, tuple[str, ...]] = {}


def _alone(own: NodeReport, node: Node, options: Options, context: TaskContext) -> int:
    found = _measured(node, options, context) if context.launch else []
    return _told(_judged(options, node, [own], found), options, context)


def _led(own: NodeReport, node: Node, options: Options, context: TaskContext) -> int:
    """Node 0 of several: everybody meets, is measured where all have come, and meets again to hear the end."""
    names = _names(options, context)

    def judge(reports: Sequence[NodeReport], between: Sequence[Finding]) -> ClusterReport:
        return _judged(options, node, reports, between)

    first, decision = together.lead(
        own, node.layout, node.limits.clock_skew_s, options.time_limit, judge, _decided, names
    )
    if not context.launch:
        return _told(first, options, context)
    if not decision.goes_on:
        skipped = unknown(
            "performance.run", "not measured", "measured on all nodes", "a node is missing", "start it, and run again"
        )
        return _told(structs.replace(first, findings=(*first.findings, skipped)), options, context)
    found = _measured(node, options, context)

    def final(reports: Sequence[NodeReport], between: Sequence[Finding]) -> ClusterReport:
        gone = [finding for finding in between if finding.check == "cluster.missing"]
        return structs.replace(first, findings=(*first.findings, *gone, *found))

    last, _ = together.lead(own, node.layout, node.limits.clock_skew_s, options.time_limit, final, _decided, names)
    return _told(last, options, context)


def _followed(own: NodeReport, node: Node, options: Options, context: TaskContext) -> int:
    """Another node: only what is wrong with it is said here; node 0 has the report."""
    decision = together.follow(own, node.layout, time.time(), options.time_limit)
    if decision and decision.goes_on and context.launch:
        _launched(context)
        limit_s = options.time_limit * len(measured.TESTS)
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


def _judged(options: Options, node: Node, nodes: Sequence[NodeReport], findings: Sequence[Finding]) -> ClusterReport:
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


def _told(judged: ClusterReport, options: Options, context: TaskContext) -> int:
    written = report.write(judged, Path(options.report)) if options.report else None
    context.result(report.as_json(judged), report.text(judged, is_coloured=sys.stdout.isatty() and not context.json))
    if written:
        context.say(f"report: {written}")
    return EXIT_OK if judged.overall == "pass" else EXIT_UNFIT


def _measured(node: Node, options: Options, context: TaskContext) -> list[Finding]:
    """Findings of the measurements, and of the errors that ports counted meanwhile."""
    before = network.read_counters(node)
    started = _launched(context)
    if isinstance(started, PrimusError):
        advice = started.hint or "mend it, and measure again"
        return [unknown("performance.run", started.problem, "measured", "the workers did not start", advice)]
    run_folder, outcome = started
    if outcome.exit_code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    asked = asked_of(options, context, node.facts)
    results = performance.read(run_folder.directory, asked, node.layout.world_size)
    found = [
        structs.replace(finding, host=finding.host.partition(".")[0])
        for finding in performance.findings(results, node.facts, demands_of(options, context, node.facts))
    ]
    if outcome.state != "done" and not any(finding.status in ("fail", "unknown") for finding in found):
        found.append(
            unknown("performance.run", outcome.reason, "all tests end", "", f"see {run_folder.directory}/logs")
        )
    during = network.grown(before, network.read_counters(node))
    return [*found, *(finding for finding in during if finding.status == "warn")]


def _launched(context: TaskContext) -> tuple[Run, Outcome] | PrimusError:
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


def limits_of(options: Options) -> Thresholds:
    """The thresholds of the file, changed by the options.

    Raises:
        UsageError: The file is wrong.
    """
    limits = thresholds.load(Path(options.thresholds)) if options.thresholds else Thresholds()
    given = {field: getattr(options, name) for name, field in LIMITS.items() if getattr(options, name) is not None}
    if options.dmesg_minutes is not None:
        given["kernel_log_hours"] = options.dmesg_minutes / 60
    return structs.replace(limits, **given)


def demands_of(options: Options, context: TaskContext, facts: Facts) -> Demands:
    """What the user demands of the measurements."""
    limits = limits_of(options)
    given = Demands(
        floors=limits.floors_of(facts.model),
        outlier_percent=limits.outlier_percent,
        gemm_tflops_min=options.gemm_tflops_min,
        hbm_gbs_min=options.hbm_gbs_min,
        rccl_gbs_min=options.rccl_gbs_min,
        rccl_size_mb=options.rccl_size_mb,
    )
    return performance.demanded(context.environ, given)


def asked_of(options: Options, context: TaskContext, facts: Facts) -> Asked:
    """What the workers shall measure.

    Raises:
        UsageError: --tests or --comm-sizes-mb names nothing that can be measured.
    """
    limit_s = min(options.time_limit, options.per_gpu_timeout_sec or options.time_limit)
    asked = performance.plan(facts, demands_of(options, context, facts), is_quick=options.quick, timeout_s=limit_s)
    tests, sizes = _tests(options.tests), _sizes(options.comm_sizes_mb)
    return structs.replace(asked, tests=tests or asked.tests, sizes_bytes=sizes or asked.sizes_bytes)


def _tests(text: str | None) -> tuple[str, ...]:
    if text is None or text == "all":
        return ()
    known = [*measured.TESTS, *OLD_TESTS]
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in known:
            raise UsageError(f"--tests: no test '{word}'", did_you_mean(word, known))
    chosen = {OLD_TESTS.get(word, word) for word in words}
    return tuple(test for test in measured.TESTS if test in chosen)


def _sizes(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"\d+(\.\d+)?", word) and float(word) > 0 for word in words):
        raise UsageError(f"--comm-sizes-mb {text}: sizes in MiB are separated by commas", "such as 1,64,1024")
    return tuple(sorted({int(float(word) * MIB) for word in words}))


def check_names(options: Options) -> None:
    """Refuse names that mean nothing.

    Raises:
        UsageError: --ignore names no group of checks, or --report-file-name is no name.
    """
    for name in options.ignore:
        group, dot, _ = name.partition(".")
        if group not in report.TITLES or not dot:
            hint = did_you_mean(group, report.TITLES) if dot else "as the report names it: host.memlock"
            raise UsageError(f"--ignore {name}: a check has a group and a name", hint)
    if options.report_file_name and not re.fullmatch(r"[\w.-]+", options.report_file_name):
        raise UsageError(f"--report-file-name {options.report_file_name}: not a name", "use letters, digits and . _ -")


def _names(options: Options, context: TaskContext) -> list[str]:
    """Host names of the nodes by rank, where Slurm or the user tells them."""
    return together.expanded(context.environ.get("SLURM_STEP_NODELIST", "") or options.expected_nodes or "")


def _without_effect(options: Options) -> Iterator[tuple[str, str]]:
    """Options that were given in vain, and why."""
    docs = field_docs(Options)
    yield from ((name, docs[name].partition(": ")[2]) for name in WITHOUT_EFFECT if getattr(options, name))
    if not options.measures:
        in_vain = (name for name in OF_MEASURING if getattr(options, name) is not None)
        yield from ((name, "nothing is measured without --perf") for name in in_vain)
