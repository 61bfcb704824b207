"""Train repeatedly with a planted fault, and report how soon and how well the job recovers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from primus.config.flags import PositionalList, parse_options
from primus.drill import report, session
from primus.drill.drilled_launch import DrilledJob
from primus.drill.fault_kinds import KINDS, FaultName, FaultPermissions
from primus.drill.goodput import PUBLISHED_RATE, RATE_SOURCE
from primus.drill.lead import DrillSettings
from primus.errors import EXIT_FAILED, EXIT_OK, UsageError
from primus.plan import RestartPolicy
from primus.registry import load_plug_in
from primus.runtime import RUNTIMES
from primus.task import TaskContext

PLANS_ELSEWHERE = True


class Options(Struct, frozen=True, kw_only=True):
    """Options of `drill`; the training follows after `--`."""

    command: PositionalList = []
    """The training: -- train pretrain --config FILE ..."""
    minutes: Annotated[float, Meta(gt=0)] = 20.0
    """Time limit of the whole drill; faults that do not fit are skipped."""
    faults: tuple[FaultName, ...] = ()
    """Faults to plant; all that may be planted when omitted."""
    steps: Annotated[int, Meta(ge=6)] = 24
    """Steps of the undisturbed run; a checkpoint is saved after each third, a fault comes between the first two."""
    fill: str = ""
    """Folder on a small file system of its own (tmpfs, quota) that `fill-disk` may fill."""
    network_interface: str = ""
    """Network interface of the last node that `drop-network` may take down."""
    at_nodes: str = "64,512,4096"
    """Numbers of nodes for which the goodput is estimated, separated by commas."""
    failure_rate: Annotated[float, Meta(gt=0)] | None = None
    """Failures of one node in 1000 days (default: 6.5, as published for a cluster of 16,000 A100)."""
    output: str | None = None
    """Folder of the report, the runs and the logs (default: output/drill/<time>)."""


def plan_notes(options: Options, context: TaskContext) -> Sequence[str]:
    """What the drill would do and skip, for a dry run.

    Raises:
        UsageError: The command is not a training.
    """
    session.check_command(options.command)
    layout = None if context.runs_elsewhere else context.layout
    notes = session.list_fault_notes(_choose_faults(options), layout, _read_permissions(options))
    return [f"at most {options.minutes:g} minutes: an undisturbed run, then one for each fault", *notes]


def run(options: Options, context: TaskContext) -> int:
    """Run the drill; returns 1 if a fault was not recovered from, the wrong one was blamed, or losses differ.

    Raises:
        UsageError: An option is wrong, or the command is not a training.
        PrimusError: A node did not report, or the undisturbed job does not train.
    """
    session.check_command(options.command)
    assert context.layout
    settings = DrillSettings(
        minutes=options.minutes,
        steps=options.steps,
        faults=_choose_faults(options),
        at_nodes=_parse_numbers(options.at_nodes),
        failure_rate=options.failure_rate or PUBLISHED_RATE,
        failure_rate_source="--failure-rate" if options.failure_rate else RATE_SOURCE,
        policy=_read_policy(context),
    )
    job = DrilledJob(
        runtime_words=context.runtime_words,
        command=tuple(options.command),
        environ=session.find_environ(),
        allowed=_read_permissions(options),
    )
    result = session.run_drill(settings, job, context.layout, options.output, context)
    if result is None:  # node 0 reports
        return EXIT_OK
    context.result(result, report.format_result(result))
    return EXIT_OK if result.is_passed else EXIT_FAILED


def _choose_faults(options: Options) -> tuple[str, ...]:
    return options.faults or tuple(KINDS)


def _read_permissions(options: Options) -> FaultPermissions:
    return FaultPermissions(fill=options.fill, interface=options.network_interface)


def _parse_numbers(text: str) -> tuple[int, ...]:
    numbers = [part.strip() for part in text.split(",") if part.strip()]
    wrong = next((part for part in numbers if not part.isdecimal() or int(part) < 1), None)
    if wrong is not None or not numbers:
        raise UsageError(
            f"--at-nodes: '{wrong or text}' is not a number of nodes", "for example --at-nodes 64,512,4096"
        )
    return tuple(map(int, numbers))


def _read_policy(context: TaskContext) -> RestartPolicy:
    """Restarts and hang timeout as the user typed them: a real job has these, not those of the drill."""
    options: Any = load_plug_in(RUNTIMES, "direct").Options
    given = parse_options(options, context.runtime_words, "runtime 'direct'")[0]
    return RestartPolicy(
        max_restarts=given.max_restarts, backoff_s=given.restart_delay, hang_timeout_s=given.hang_timeout
    )
