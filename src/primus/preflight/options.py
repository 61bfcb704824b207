"""The options of a preflight, and the limits, demands and measurements that they select."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct, structs

from primus.config.docs import read_field_docs
from primus.errors import UsageError, did_you_mean
from primus.machine import measurements
from primus.machine.facts import DeviceKind, MachineFacts
from primus.machine.host_list import expand_hosts
from primus.machine.measurements import MeasurementPlan
from primus.preflight.findings import site, thresholds
from primus.preflight.findings.node import GROUPS, Group
from primus.preflight.findings.site import SiteExpectations
from primus.preflight.findings.thresholds import Thresholds
from primus.preflight.performance import judge as performance
from primus.preflight.performance.judge import Demands
from primus.preflight.report import formats as report
from primus.task import TaskContext

MIB = 1 << 20
DEFAULT_MINUTES = 10.0
"""The power stage of ROCm Validation Suite's level 4 takes 600 s."""
OLD_TESTS = {
    "gemm": "gemm",
    "intra-allreduce": "collectives",
    "intra-alltoall": "collectives",
    "inter-allreduce": "collectives",
    "inter-alltoall": "collectives",
    "inter-p2p": "pairs",
    "inter-ring-p2p": "collectives",
    "host_copy": "copies",
}
"""Tests that measure the same as a test of Primus (AMD-AGI/Primus preflight)."""


class Options(Struct, frozen=True, kw_only=True):
    """Options of `preflight`."""

    action: Annotated[Literal["check"], Meta(extra={"positional": True})] = "check"
    """Check without load."""
    host: bool = False
    """Check the host: CPUs, memory, limits, kernel, clock, drives. Without a group option, check all five groups."""
    gpu: bool = False
    """Check the GPUs: number, model, memory, links, errors, temperature, processes."""
    network: bool = False
    """Check the network: RDMA ports, interfaces, names, variables."""
    storage: bool = False
    """Check the folders of runs, data and models."""
    software: bool = False
    """Check installed software."""
    perf: Annotated[bool, Meta(extra={"aliases": ("--perf-test", "--tier2-perf")})] = False
    """Also measure matrix products, memory and collectives."""
    level: Literal["quick", "full", "soak"] | None = None
    """quick: no load; full: measure, like --perf; soak: also load all devices for --minutes and compare results."""
    minutes: Annotated[float, Meta(gt=0, le=1440)] | None = None
    """Duration of the burn-in of --level soak (default: 10)."""
    quick: bool = False
    """Measure briefly, with few sizes."""
    tests: str | None = None
    """Tests to run, separated by commas: sanity, gemm, memory, copies, kernels, collectives, pairs, host_memory,
    quickstart, burn_in, rdma, storage; implies --perf."""
    comm_sizes_mb: str | None = None
    """Sizes of the collectives in MiB, separated by commas."""
    report: Annotated[str | None, Meta(extra={"aliases": ("--dump-path",)})] = None
    """Folder for reports; each preflight creates a subfolder."""
    report_file_name: str | None = None
    """Name of that subfolder."""
    strict: bool = False
    """Treat warnings as failures."""
    record_unfit: bool = True
    """Add nodes that fail, while others pass, to the list of unfit nodes."""
    ignore: Annotated[tuple[str, ...], Meta(extra={"aliases": ("--preflight-ignore",)})] = ()
    """Checks to ignore, such as host.memlock; the report lists them."""
    thresholds: str | None = None
    """YAML file with limits that override the defaults."""
    expect: str | None = None
    """YAML file with what every node must have: counts, memory, firmware, versions, mounts, limits."""
    write_expect: str | None = None
    """Write such a file from this node, if it is fit."""
    expected_gpus: Annotated[int, Meta(ge=0)] | None = None
    """Number of GPUs that every node must have."""
    expected_rdma_nics: Annotated[int, Meta(ge=0)] | None = None
    """Number of RDMA devices that must be active on every node."""
    rdma_nic_allowlist: str | None = None
    """RDMA devices to check, in the syntax of NCCL_IB_HCA."""
    expected_nodes: str | None = None
    """Nodes that must report, as a Slurm host list: node[01-04]."""
    require_tools: tuple[str, ...] = ()
    """Programs that must be installed."""
    allowed_procs: tuple[str, ...] = ()
    """Programs that may use GPUs, besides common monitoring agents."""
    allow_foreign_procs: bool = False
    """Allow any program to use the GPUs."""
    skip_dmesg: bool = False
    """Do not read the kernel log."""
    dmesg_minutes: Annotated[float, Meta(gt=0)] | None = None
    """Minutes of kernel log to check, at most since boot (default: 720)."""
    time_limit: Annotated[
        float, Meta(gt=0, extra={"aliases": ("--dist-timeout-sec", "--rccl-timeout-sec", "--wait-timeout-sec")})
    ] = 120.0
    """Time limit of the rendezvous and of each measurement, in seconds."""
    per_gpu_timeout_sec: Annotated[float, Meta(gt=0)] | None = None
    """Time limit of each measurement of one device, in seconds, if lower."""
    ulimit_l_min_gb: Annotated[float, Meta(ge=0)] | None = None
    """Minimum locked-memory limit, in GiB (default: 32)."""
    shm_min_gb: Annotated[float, Meta(ge=0)] | None = None
    """Minimum size of /dev/shm, in GiB (default: 8)."""
    rocm_smi_timeout_sec: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(extra={"aliases": ("--smi-timeout-sec",)})
    ] = None
    """Timeout of a management tool, in seconds (default: 30)."""
    rocm_smi_warn_sec: Annotated[float, Meta(ge=0)] | None = None
    """Time after which a management tool is reported as slow, in seconds (default: 1)."""
    hbm_busy_threshold_gib: Annotated[float, Meta(ge=0)] | None = None
    """Maximum GPU memory in use, in GiB (default: 2)."""
    gpu_activity_warn_pct: Annotated[float, Meta(ge=0)] | None = None
    """Maximum GPU activity, in percent (default: 20)."""
    clock_skew_warn_sec: Annotated[float, Meta(ge=0)] | None = None
    """Maximum clock difference between nodes, in seconds (default: 30)."""
    gemm_tflops_min: Annotated[float, Meta(ge=0)] | None = None
    """Minimum matrix-product speed of each GPU, in TFLOP/s."""
    hbm_gbs_min: Annotated[float, Meta(ge=0)] | None = None
    """Minimum memory copy rate of each GPU, in GB/s."""
    rccl_size_mb: Annotated[int, Meta(gt=0)] = 64
    """Message size of --rccl-gbs-min, in MiB."""
    rccl_gbs_min: Annotated[float, Meta(ge=0)] | None = None
    """Minimum bus bandwidth of a node's all_reduce, in GB/s."""
    disable_pdf: bool = False
    """Ignored: the report is Markdown, HTML and JSON."""
    plot: bool = False
    """Ignored: the report contains tables."""
    no_clean_dump_path: bool = False
    """Ignored: older reports are neither read nor removed."""
    intra_group_sizes: str | None = None
    """Also run collectives among this many processes of a node, separated by commas."""
    inter_group_sizes: str | None = None
    """Also run collectives among this many nodes, separated by commas."""
    ring_p2p_sizes_mb: str | None = None
    """Sizes of send_recv in MiB, separated by commas."""
    data: str | None = None
    """Folder of the training data; also checked."""
    device: DeviceKind = "auto"
    """Device to measure: GPUs, or the CPU if there are none; cpu always measures the CPU."""
    workspace: str = "./output"
    """Folder of all run folders; measurements create a run there."""

    @property
    def measures(self) -> bool:
        """Whether any measurement is selected."""
        return self.perf or bool(self.tests) or self.level in ("full", "soak")

    @property
    def burns_in(self) -> bool:
        """Whether the devices are loaded for a given time."""
        return "burn_in" in self.chosen_tests

    @property
    def chosen_tests(self) -> tuple[str, ...]:
        """The selected measurements, in the order of execution.

        Raises:
            UsageError: --tests contains an unknown test.
        """
        everything = measurements.ALL_TESTS if self.level == "soak" else measurements.TESTS
        return (_parse_tests(self.tests) or everything) if self.measures else ()

    @property
    def starts_workers(self) -> bool:
        """Whether a selected measurement needs PyTorch processes."""
        return any(test not in measurements.NODE_TESTS for test in self.chosen_tests)

    @property
    def groups(self) -> tuple[Group, ...]:
        """The selected groups of checks; all groups if none is selected."""
        chosen = tuple(group for group in GROUPS if getattr(self, group))
        return chosen or GROUPS


WITHOUT_EFFECT = ("disable_pdf", "plot", "no_clean_dump_path")
OF_MEASURING = (
    *("comm_sizes_mb", "ring_p2p_sizes_mb", "intra_group_sizes", "inter_group_sizes", "per_gpu_timeout_sec"),
    *("gemm_tflops_min", "hbm_gbs_min", "rccl_gbs_min"),
)
LIMITS = {
    "ulimit_l_min_gb": "memlock_gib",
    "shm_min_gb": "shm_gib",
    "rocm_smi_timeout_sec": "smi_limit_s",
    "rocm_smi_warn_sec": "smi_warn_s",
    "hbm_busy_threshold_gib": "gpu_busy_gib",
    "gpu_activity_warn_pct": "gpu_activity_percent",
    "clock_skew_warn_sec": "clock_skew_s",
}
"""Thresholds by the option that sets them."""


def build_limits(options: Options) -> Thresholds:
    """The thresholds of the file, overridden by the options.

    Raises:
        UsageError: The file is wrong.
    """
    limits = thresholds.load_thresholds(Path(options.thresholds)) if options.thresholds else Thresholds()
    given = {field: getattr(options, name) for name, field in LIMITS.items() if getattr(options, name) is not None}
    if options.dmesg_minutes is not None:
        given["kernel_log_hours"] = options.dmesg_minutes / 60
    return structs.replace(limits, **given)


def load_site(options: Options) -> SiteExpectations | None:
    """The expectations of --expect; None without that option.

    Raises:
        UsageError: The file is invalid, or the file of --write-expect exists.
    """
    if options.write_expect and Path(options.write_expect).exists():
        raise UsageError(
            f"--write-expect {options.write_expect}: the file exists", "choose another name, or remove the file"
        )
    return site.load(Path(options.expect)) if options.expect else None


def build_demands(options: Options, context: TaskContext, facts: MachineFacts) -> Demands:
    """The user's demands on the measurements."""
    limits = build_limits(options)
    given = Demands(
        floors=limits.list_floors(facts.model),
        outlier_percent=limits.outlier_percent,
        gemm_tflops_min=options.gemm_tflops_min,
        hbm_gbs_min=options.hbm_gbs_min,
        rccl_gbs_min=options.rccl_gbs_min,
        rccl_size_mb=options.rccl_size_mb,
    )
    return performance.complete_demands(context.environ, given)


def build_measurement_plan(options: Options, context: TaskContext, facts: MachineFacts) -> MeasurementPlan:
    """The measurements for the workers.

    Raises:
        UsageError: --tests or an option with sizes is invalid.
    """
    limit_s = min(options.time_limit, options.per_gpu_timeout_sec or options.time_limit)
    asked = performance.plan_measurements(
        facts, build_demands(options, context, facts), is_quick=options.quick, timeout_s=limit_s
    )
    sizes = _parse_sizes("comm", options.comm_sizes_mb)
    return structs.replace(
        asked,
        device=options.device,
        tests=options.chosen_tests,
        burn_in_s=60 * (options.minutes or DEFAULT_MINUTES),
        sizes_bytes=sizes or asked.sizes_bytes,
        ring_sizes_bytes=_parse_sizes("ring-p2p", options.ring_p2p_sizes_mb),
        intra_group_sizes=_parse_group_sizes("intra", options.intra_group_sizes),
        inter_group_sizes=_parse_group_sizes("inter", options.inter_group_sizes),
    )


def _parse_group_sizes(which: str, text: str | None) -> tuple[int, ...]:
    """Group sizes without ``all``, which is always measured."""
    words = {word.strip() for word in (text or "all").split(",")} - {"all"}
    if not all(word.isdecimal() and int(word) > 1 for word in words):
        raise UsageError(f"--{which}-group-sizes {text}: numbers from 2 are separated by commas", "such as 2,4,all")
    return tuple(sorted(map(int, words)))


def _parse_tests(text: str | None) -> tuple[str, ...]:
    if text is None or text == "all":
        return ()
    known = [*measurements.ALL_TESTS, *OLD_TESTS]
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in known:
            raise UsageError(f"--tests: no test '{word}'", did_you_mean(word, known))
    chosen = {OLD_TESTS.get(word, word) for word in words}
    return tuple(test for test in measurements.ALL_TESTS if test in chosen)


def _parse_sizes(which: str, text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"\d+(\.\d+)?", word) and float(word) > 0 for word in words):
        raise UsageError(f"--{which}-sizes-mb {text}: sizes in MiB are separated by commas", "such as 1,64,1024")
    return tuple(sorted({int(float(word) * MIB) for word in words}))


def validate_check_names(options: Options) -> None:
    """Reject unknown names of checks, files and nodes.

    Raises:
        UsageError: --ignore names an unknown group of checks, or --report-file-name or --expected-nodes is invalid.
    """
    for name in options.ignore:
        group, dot, _ = name.partition(".")
        if group not in report.TITLES or not dot:
            hint = did_you_mean(group, report.TITLES) if dot else "as the report names it: host.memlock"
            raise UsageError(f"--ignore {name}: a check has a group and a name", hint)
    expand_hosts(options.expected_nodes or "")
    if options.report_file_name and not re.fullmatch(r"\w[\w.-]*", options.report_file_name):
        raise UsageError(f"--report-file-name {options.report_file_name}: not a name", "use letters, digits and . _ -")


def find_unused_options(options: Options) -> Iterator[tuple[str, str]]:
    """Options that have no effect, and the reason."""
    docs = read_field_docs(Options)
    yield from ((name, docs[name].partition(": ")[2]) for name in WITHOUT_EFFECT if getattr(options, name))
    if not options.measures:
        in_vain = (name for name in OF_MEASURING if getattr(options, name) is not None)
        yield from ((name, "nothing is measured without --perf") for name in in_vain)
    if options.minutes is not None and not options.burns_in:
        yield "minutes", "there is a burn-in with --level soak or --tests burn_in only"
