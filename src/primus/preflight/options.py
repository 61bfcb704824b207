"""The options of a preflight, and what they mean: limits, demands, what is measured."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct, structs

from primus.config.docs import field_docs
from primus.errors import UsageError, did_you_mean
from primus.machine import measurements
from primus.machine.facts import DeviceKind, MachineFacts
from primus.machine.measurements import MeasurementPlan
from primus.preflight import collect_reports, performance, report, site, thresholds
from primus.preflight.node import GROUPS, Group
from primus.preflight.performance import Demands
from primus.preflight.site import SiteExpectations
from primus.preflight.thresholds import Thresholds
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
    level: Literal["quick", "full", "soak"] | None = None
    """quick: no load; full: measure, as --perf does; soak: also load all devices for --minutes, and compare results."""
    minutes: Annotated[float, Meta(gt=0, le=1440)] | None = None
    """How long the burn-in of --level soak loads the devices (default: 10)."""
    quick: bool = False
    """Measure with short times and few sizes; looking is quick anyway."""
    tests: str | None = None
    """What to measure, separated by commas: sanity, gemm, memory, copies, collectives, pairs, host_memory, quickstart,
    burn_in, rdma, storage; implies --perf."""
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
    expect: str | None = None
    """YAML file with what every node of the site must have: counts, memory, firmware, versions, mounts, limits."""
    write_expect: str | None = None
    """Write such a file from this node, where it is found to be fit."""
    expected_gpus: Annotated[int, Meta(ge=0)] | None = None
    """Devices that every node must have."""
    expected_rdma_nics: Annotated[int, Meta(ge=0)] | None = None
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
    dmesg_minutes: Annotated[float, Meta(gt=0)] | None = None
    """How far back the kernel log counts, in minutes (default: 720, since boot at most)."""
    time_limit: Annotated[
        float, Meta(gt=0, extra={"aliases": ("--dist-timeout-sec", "--rccl-timeout-sec", "--wait-timeout-sec")})
    ] = 120.0
    """Seconds for the nodes to meet, and for each measurement."""
    per_gpu_timeout_sec: Annotated[float, Meta(gt=0)] | None = None
    """Seconds for each measurement of one device, where that is less."""
    ulimit_l_min_gb: Annotated[float, Meta(ge=0)] | None = None
    """Least memory that may be locked, in GiB (default: 32)."""
    shm_min_gb: Annotated[float, Meta(ge=0)] | None = None
    """Least size of /dev/shm, in GiB (default: 8)."""
    rocm_smi_timeout_sec: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(extra={"aliases": ("--smi-timeout-sec",)})
    ] = None
    """Seconds after which a management tool counts as hung (default: 30)."""
    rocm_smi_warn_sec: Annotated[float, Meta(ge=0)] | None = None
    """Seconds after which a management tool counts as slow (default: 1)."""
    hbm_busy_threshold_gib: Annotated[float, Meta(ge=0)] | None = None
    """Device memory that may be in use, in GiB (default: 2)."""
    gpu_activity_warn_pct: Annotated[float, Meta(ge=0)] | None = None
    """Device activity that is normal, in per cent (default: 20)."""
    clock_skew_warn_sec: Annotated[float, Meta(ge=0)] | None = None
    """Seconds that clocks may differ (default: 30)."""
    gemm_tflops_min: Annotated[float, Meta(ge=0)] | None = None
    """Least speed of the matrix product of every device, in TFLOP/s."""
    hbm_gbs_min: Annotated[float, Meta(ge=0)] | None = None
    """Least copy rate of every device's memory, in GB/s."""
    rccl_size_mb: Annotated[int, Meta(gt=0)] = 64
    """Size at which --rccl-gbs-min holds, in MiB."""
    rccl_gbs_min: Annotated[float, Meta(ge=0)] | None = None
    """Least bus bandwidth of a node's all_reduce, in GB/s."""
    disable_pdf: bool = False
    """Accepted, and without effect: the report is Markdown, HTML and JSON."""
    plot: bool = False
    """Accepted, and without effect: the report's tables hold the numbers."""
    no_clean_dump_path: bool = False
    """Accepted, and without effect: nothing older is ever read or removed."""
    intra_group_sizes: str | None = None
    """Collectives among so many processes of a node as well, separated by commas; all of a node are always measured."""
    inter_group_sizes: str | None = None
    """Collectives among so many nodes as well, separated by commas; all nodes are always measured."""
    ring_p2p_sizes_mb: str | None = None
    """Sizes in MiB, separated by commas, of what each process sends to the next at once."""
    data: str | None = None
    """Folder of the training data, which is checked as well."""
    device: DeviceKind = "auto"
    """What is measured: the accelerators, or the CPU where there is none; cpu measures the CPU in any case."""
    workspace: str = "./output"
    """Folder of all run folders; what is measured makes one there."""

    @property
    def measures(self) -> bool:
        """Whether anything is measured."""
        return self.perf or bool(self.tests) or self.level in ("full", "soak")

    @property
    def burns_in(self) -> bool:
        """Whether the devices are loaded for a time."""
        return "burn_in" in self.chosen_tests

    @property
    def chosen_tests(self) -> tuple[str, ...]:
        """What is measured, in order.

        Raises:
            UsageError: --tests names nothing that can be measured.
        """
        everything = measurements.ALL_TESTS if self.level == "soak" else measurements.TESTS
        return (_parse_tests(self.tests) or everything) if self.measures else ()

    @property
    def starts_workers(self) -> bool:
        """Whether something is measured that needs processes of PyTorch."""
        return any(test not in measurements.NODE_TESTS for test in self.chosen_tests)

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of checks that were chosen; all where none was."""
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
"""Thresholds by the option that sets each."""


def build_limits(options: Options) -> Thresholds:
    """The thresholds of the file, changed by the options.

    Raises:
        UsageError: The file is wrong.
    """
    limits = thresholds.load_thresholds(Path(options.thresholds)) if options.thresholds else Thresholds()
    given = {field: getattr(options, name) for name, field in LIMITS.items() if getattr(options, name) is not None}
    if options.dmesg_minutes is not None:
        given["kernel_log_hours"] = options.dmesg_minutes / 60
    return structs.replace(limits, **given)


def load_site(options: Options) -> SiteExpectations | None:
    """The expectations of --expect; None without one.

    Raises:
        UsageError: The file is wrong, or that of --write-expect is there already.
    """
    if options.write_expect and Path(options.write_expect).exists():
        raise UsageError(
            f"--write-expect {options.write_expect}: the file exists", "choose another name, or remove the file"
        )
    return site.load(Path(options.expect)) if options.expect else None


def build_demands(options: Options, context: TaskContext, facts: MachineFacts) -> Demands:
    """What the user demands of the measurements."""
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
    """What the workers shall measure.

    Raises:
        UsageError: --tests, or an option of sizes, names nothing that can be measured.
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
    """Sizes without ``all``, which is measured whatever is asked."""
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
    """Refuse names that mean nothing.

    Raises:
        UsageError: --ignore names no group of checks, --report-file-name is no name, or --expected-nodes no list.
    """
    for name in options.ignore:
        group, dot, _ = name.partition(".")
        if group not in report.TITLES or not dot:
            hint = did_you_mean(group, report.TITLES) if dot else "as the report names it: host.memlock"
            raise UsageError(f"--ignore {name}: a check has a group and a name", hint)
    collect_reports.expand_hosts(options.expected_nodes or "")
    if options.report_file_name and not re.fullmatch(r"\w[\w.-]*", options.report_file_name):
        raise UsageError(f"--report-file-name {options.report_file_name}: not a name", "use letters, digits and . _ -")


def find_unused_options(options: Options) -> Iterator[tuple[str, str]]:
    """Options that were given in vain, and why."""
    docs = field_docs(Options)
    yield from ((name, docs[name].partition(": ")[2]) for name in WITHOUT_EFFECT if getattr(options, name))
    if not options.measures:
        in_vain = (name for name in OF_MEASURING if getattr(options, name) is not None)
        yield from ((name, "nothing is measured without --perf") for name in in_vain)
    if options.minutes is not None and not options.burns_in:
        yield "minutes", "there is a burn-in with --level soak or --tests burn_in only"
