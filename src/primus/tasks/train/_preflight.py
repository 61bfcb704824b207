"""The preflight of a launch: check a node before the run starts there, and do not start on an unfit one."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, get_args

import msgspec
from msgspec import structs

from primus import interpreter
from primus.errors import PrimusError, UnfitError, UsageError, did_you_mean
from primus.machine.cluster import ClusterLayout
from primus.plan import LaunchJob
from primus.task import TaskContext

if TYPE_CHECKING:
    from primus.preflight.options import Options

# primus.preflight is imported only if a preflight is requested, because the import takes tens of ms.
Depth = Literal["quick", "full", "off"]
VARIABLE = "PRIMUS_PREFLIGHT"
FULL_LIMIT_S = 900.0
"""The measurements of one node take a few minutes; a hung device must not block a job."""
OF_A_LAUNCH = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PET_", "SLURM_")
"""Prefixes of variables that place a process among several nodes; each node is measured alone."""


def require_preflight(job: LaunchJob, depth: Depth | None, ignored: tuple[str, ...], context: TaskContext) -> LaunchJob:
    """`job`, restricted to nodes that pass the preflight.

    Args:
        depth: From the command line; None means $PRIMUS_PREFLIGHT, or off if that is unset.
        ignored: Checks to ignore.

    Raises:
        UsageError: The variable has an invalid value, or an ignored check does not exist.
    """
    chosen = depth or _parse_preflight_depth(context.environ)
    if chosen == "off":
        if ignored:
            raise UsageError("--preflight-ignore without a preflight", "add --preflight quick or full")
        return job
    words = ("--preflight", chosen, *(f"--preflight-ignore={name}" for name in ignored))
    from primus.preflight import options as preflight

    options = preflight.Options(quick=True, ignore=ignored, workspace=job.workspace)
    preflight.validate_check_names(options)
    excluded = f", ignoring {', '.join(ignored)}" if ignored else ""
    note = f"preflight {chosen} on each node before the run starts{excluded}"

    def check_node(layout: ClusterLayout) -> None:
        job.check_node(layout)
        if not context.dry_run:
            run_preflight(options, chosen, layout, context)

    amend = job.amend
    return structs.replace(
        job,
        check_node=check_node,
        notes=(*job.notes, note),
        elsewhere=None if job.elsewhere is None else (*job.elsewhere, *words),
        amend=None if amend is None else lambda words: require_preflight(amend(words), depth, ignored, context),
    )


def _parse_preflight_depth(environ: Mapping[str, str]) -> Depth:
    text = environ.get(VARIABLE) or "off"
    for depth in get_args(Depth):
        if text == depth:
            return depth  # type: ignore[no-any-return]
    raise UsageError(f"${VARIABLE}: '{text}' is not a preflight level", did_you_mean(text, get_args(Depth)))


def run_preflight(options: Options, depth: Depth, layout: ClusterLayout, context: TaskContext) -> None:
    """Check this node.

    Raises:
        UnfitError: It is unfit, or its state is unknown; the message names every finding.
    """
    context.say(f"preflight {depth}")
    if depth == "full":
        _measure_in_subprocess(options, layout, context)
        return
    from primus.preflight import session
    from primus.preflight.report import formats as report

    checked = session.examine_node(options, structs.replace(context, layout=layout))
    if checked.overall_verdict != "pass":
        host = checked.expected_nodes[0]
        raise _build_unfit_error(
            host, report.VERDICT_WORDS[checked.judge_host(host)], report.list_reasons(checked, host)
        )


def _measure_in_subprocess(options: Options, layout: ClusterLayout, context: TaskContext) -> None:
    """Check and measure this node in a separate process: the launcher must not hold its devices."""
    from primus import process
    from primus.preflight import session
    from primus.preflight.report import formats as report

    ignored = [f"--ignore={name}" for name in options.ignore]
    on_node = ["direct", "--nproc", str(layout.nproc), "--nnodes", "1", "--node-rank", "0", "--no-hooks"]
    task = ["preflight", "--perf", "--quick", f"--workspace={options.workspace}", *ignored]
    environ = {name: value for name, value in context.environ.items() if not name.startswith(OF_A_LAUNCH)}
    argv = interpreter.build_module_command(sys.executable, "primus.cli.main", "--json", *on_node, "--", *task)
    answer = process.run_command(argv, interpreter.drop_empty_python_path(environ), FULL_LIMIT_S)
    try:
        reported = msgspec.json.decode(answer.text, type=session.OtherPreflight)
    except msgspec.MsgspecError:
        raise PrimusError(
            f"preflight full: {answer.problem}", "run `preflight --perf --quick` to see its output"
        ) from None
    for host, verdict in reported.verdicts.items():
        if verdict != "pass":
            raise _build_unfit_error(host, report.VERDICT_WORDS[verdict], list(reported.reasons.get(host, ())))
    if answer.state != "ok" or reported.verdict != "pass":
        raise UnfitError(f"preflight full: {answer.problem or reported.verdict}", "run `preflight --perf --quick`")


def _build_unfit_error(host: str, verdict: str, reasons: list[str]) -> UnfitError:
    names = sorted({reason.partition(":")[0].partition(" ")[0] for reason in reasons})
    return UnfitError(
        f"preflight: {host} is {verdict}; nothing was started" + "".join(f"\n  - {reason}" for reason in reasons),
        f"fix it, or start anyway with --preflight-ignore {' '.join(names)}",
    )
