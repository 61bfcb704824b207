"""Look at a node before a run starts there, and start nothing on one that is not fit."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, get_args

import msgspec
from msgspec import structs

from primus import interpreter, process
from primus.errors import PrimusError, UnfitError, UsageError, did_you_mean
from primus.launch.plan import LaunchJob
from primus.machine.cluster import ClusterLayout
from primus.task import TaskContext

if TYPE_CHECKING:
    from primus.preflight.options import Options

# primus.preflight is imported where one was asked for: most launches ask for none, and it costs them tens of ms.
Depth = Literal["quick", "full", "off"]
VARIABLE = "PRIMUS_PREFLIGHT"
FULL_LIMIT_S = 900.0
"""A node's own measurements take a few minutes at most; a hung device shall not hold a job for ever."""
OF_A_LAUNCH = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PET_", "SLURM_")
"""Beginnings of variables that place a process among several nodes; the measured node is alone."""


def require_preflight(job: LaunchJob, depth: Depth | None, ignored: tuple[str, ...], context: TaskContext) -> LaunchJob:
    """`job`, which starts only on nodes that are fit.

    Args:
        depth: What the command line says; None leaves it to $PRIMUS_PREFLIGHT, and that unset means off.
        ignored: Checks that do not count.

    Raises:
        UsageError: The variable has another value, or an ignored check has no such name.
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
    overridden = f", whatever is found by {', '.join(ignored)}" if ignored else ""
    note = f"preflight {chosen} on each node before anything starts{overridden}"

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
    raise UsageError(f"${VARIABLE}: '{text}' is no preflight", did_you_mean(text, get_args(Depth)))


def run_preflight(options: Options, depth: Depth, layout: ClusterLayout, context: TaskContext) -> None:
    """Look at this node.

    Raises:
        UnfitError: It is not fit, or it cannot be said; the message names every finding.
    """
    context.say(f"preflight {depth}")
    if depth == "full":
        _measure_in_subprocess(options, layout, context)
        return
    from primus.preflight import report, session

    judged = session.examine_node(options, structs.replace(context, layout=layout))
    if judged.overall_verdict != "pass":
        host = judged.expected_nodes[0]
        raise _build_unfit_error(host, report.VERDICT_WORDS[judged.judge_host(host)], report.list_reasons(judged, host))


def _measure_in_subprocess(options: Options, layout: ClusterLayout, context: TaskContext) -> None:
    """Check and measure this node in a process of its own: the launcher must not hold its devices."""
    from primus.preflight import report, session

    ignored = [f"--ignore={name}" for name in options.ignore]
    on_node = ["direct", "--nproc", str(layout.nproc), "--nnodes", "1", "--node-rank", "0", "--no-hooks"]
    task = ["preflight", "--perf", "--quick", f"--workspace={options.workspace}", *ignored]
    environ = {name: value for name, value in context.environ.items() if not name.startswith(OF_A_LAUNCH)}
    argv = interpreter.module_command(sys.executable, "primus.cli.main", "--json", *on_node, "--", *task)
    answer = process.run_command(argv, interpreter.without_empty_python_path(environ), FULL_LIMIT_S)
    try:
        told = msgspec.json.decode(answer.text, type=session.OtherPreflight)
    except msgspec.MsgspecError:
        raise PrimusError(
            f"preflight full: {answer.problem}", "run the same by hand: preflight --perf --quick"
        ) from None
    for host, verdict in told.verdicts.items():
        if verdict != "pass":
            raise _build_unfit_error(host, report.VERDICT_WORDS[verdict], list(told.reasons.get(host, ())))
    if answer.state != "ok" or told.verdict != "pass":
        raise UnfitError(f"preflight full: {answer.problem or told.verdict}", "run `preflight --perf --quick`")


def _build_unfit_error(host: str, said: str, reasons: list[str]) -> UnfitError:
    names = sorted({reason.partition(":")[0].partition(" ")[0] for reason in reasons})
    return UnfitError(
        f"preflight: {host} is {said}; nothing was started" + "".join(f"\n  - {reason}" for reason in reasons),
        f"mend it, or start all the same with --preflight-ignore {' '.join(names)}",
    )
