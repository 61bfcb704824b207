"""The result of a drill as text and as a page."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence

from primus.drill.fault_kinds import KINDS
from primus.drill.goodput import GoodputEstimate
from primus.drill.result import DrillResult, FaultCase, is_case_passed
from primus.drill.timeline import StepEquality
from primus.report import page
from primus.report.bar_chart import ChartBar, draw_bar_chart
from primus.report.page import Html, make_element
from primus.report.table import format_duration, format_number, format_table

FAULT_HEADER = ("fault", "state", "detected s", "restarted s", "steps lost", "by", "blamed", "losses after")
GOODPUT_HEADER = ("nodes", "a failure every", "checkpoint every", "steps", "goodput", "goodput, hourly")


def format_result(result: DrillResult) -> str:
    """The tables, what was skipped and why, and where the page is."""
    planted = [case for case in result.cases if case.state != "skipped"]
    lines = [""]
    if planted:
        rows = [_list_cells(case) for case in planted]
        lines += [format_table(FAULT_HEADER, rows, right=(2, 3, 4)), ""]
    lines += [f"skipped: {case.fault}: {case.reason}" for case in result.cases if case.state == "skipped"]
    lines += [f"{case.fault}: {case.reason}" for case in planted if not is_case_passed(case) and case.reason]
    if result.goodput:
        assert result.outage
        lines += [
            "",
            format_table(GOODPUT_HEADER, [_list_goodput_cells(each) for each in result.goodput], right=(0, 3, 4, 5)),
        ]
        lines += _list_assumptions(result)
    if result.problem:
        lines.append(f"the drill ended early: {result.problem}")
    lines += ["", _summarize(result), f"report: {result.folder}/drill.html"]
    return "\n".join(lines)


def _summarize(result: DrillResult) -> str:
    planted = [case for case in result.cases if case.state != "skipped"]
    passed = sum(map(is_case_passed, planted))
    skipped = len(result.cases) - len(planted)
    return (
        f"{passed} of {len(planted)} faults recovered with the right blame and equal losses"
        f"{f', {skipped} skipped' if skipped else ''}; {format_duration(result.duration_s)}"
    )


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _list_cells(case: FaultCase) -> list[str]:
    return [
        case.fault,
        _describe_state(case),
        _format_seconds(case.detect_s),
        _format_seconds(case.restart_s),
        "-" if case.steps_lost is None else str(case.steps_lost),
        case.restarted_by or "-",
        _describe_blame(case),
        describe_losses(case.losses),
    ]


def _describe_state(case: FaultCase) -> str:
    """The state of a fault; of a run that has recovered but not as it should, what is wrong."""
    if case.state != "recovered" or is_case_passed(case):
        return case.state
    return "wrong blame" if case.is_blame_right is False else "losses differ"


def _format_seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _describe_blame(case: FaultCase) -> str:
    if case.is_blame_right is None:
        return "-"
    hosts = ", ".join(case.blamed_hosts)
    found = f"rank {case.blamed_rank}" if case.blamed_rank is not None else hosts or "nobody"
    if case.blamed_rank == case.rank and not case.is_blame_right:
        found += f" on {hosts or 'no host'}, planted on {case.host}"
    if case.fault == "fill-disk":
        found = "the disk" if case.is_blame_right else case.reason or "nothing"
    return f"right: {found}" if case.is_blame_right else f"wrong: {found}"


def describe_losses(losses: StepEquality | None) -> str:
    """How the steps after a fault compare with the undisturbed run."""
    if losses is None or not losses.num_after:
        return "-"
    share = f"{losses.num_equal_after} of {losses.num_after} equal"
    if losses.is_equal:
        return share
    difference = f"at most {losses.largest_difference:.1e} relative"
    return f"{share}, {difference}" + ("" if losses.is_deterministic else "; differ before the fault, too")


def _list_goodput_cells(each: GoodputEstimate) -> list[str]:
    return [
        f"{each.nodes:,}",
        format_duration(each.mtbf_s),
        format_duration(each.interval_s),
        f"{each.interval_steps:,}",
        f"{each.goodput:.1%}",
        f"{each.goodput_hourly:.1%}",
    ]


def _list_assumptions(result: DrillResult) -> list[str]:
    assert result.outage and result.reference
    times = result.reference
    return [
        f"outage after a failure: {result.outage.seconds:.0f} s, the {result.outage.source}",
        f"checkpoint: stalls training for {format_number(times.stall_s, 3)} s, as measured here",
        f"step: {format_number(times.step_s, 3)} s, as measured here on {_count(result.nnodes, 'node')}",
        f"failures of a node in 1000 days: {result.failure_rate:g} ({result.failure_rate_source})",
        "interval and goodput: J. T. Daly, Future Generation Computer Systems 22 (2006) 303-312",
    ]


def format_page(result: DrillResult) -> str:
    """The page."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(result.started))
    nodes, processes = _count(result.nnodes, "node"), _count(result.nproc, "process", "processes")
    hosts = ", ".join(dict.fromkeys(result.hosts))
    subtitle = f"{nodes} of {processes} on {hosts}; {when}, {format_duration(result.duration_s)}"
    sections: list[tuple[str, object]] = [("", _make_verdict(result)), ("Faults", _make_fault_table(result.cases))]
    chart = _draw_outages(result.cases)
    if chart:
        sections.append(("Time until training goes on", chart))
    if result.goodput:
        rows = [_list_goodput_cells(each) for each in result.goodput]
        notes = make_element(
            "ul", page.join_fragments(*(make_element("li", each) for each in _list_assumptions(result)))
        )
        table = page.make_table(GOODPUT_HEADER, rows, right=(0, 3, 4, 5))
        sections.append(("Goodput to expect", page.join_fragments(table, notes)))
    sections.append(("How it was measured", _describe_method(result)))
    return page.format_page("Failure drill", sections, subtitle)


def _make_verdict(result: DrillResult) -> Html:
    badge = page.make_badge("ok", "passed") if result.is_passed else page.make_badge("fail", "failed")
    parts: list[object] = [make_element("p", Html(f"{badge} {page.escape(_summarize(result))}"))]
    if result.problem:
        parts.append(page.make_paragraph(f"The drill ended early: {result.problem}"))
    return page.join_fragments(*parts)


def _make_fault_table(cases: Sequence[FaultCase]) -> Html:
    header = ("fault", "state", "where", *FAULT_HEADER[2:], "what the run recorded")
    rows = [_list_page_cells(case) for case in cases]
    return page.make_table(header, rows, right=(3, 4, 5))


def _list_page_cells(case: FaultCase) -> list[object]:
    status = "info" if case.state == "skipped" else "ok" if is_case_passed(case) else "fail"
    cells = _list_cells(case)
    # One element: on a narrow screen the parts of a cell stand next to each other.
    name = make_element("div", page.join_fragments(make_element("b", case.fault), Html("<br>"), KINDS[case.fault].act))
    where = "" if case.node is None else f"node {case.node}" + (f", rank {case.rank}" if case.rank is not None else "")
    return [
        name,
        page.make_badge(status, _describe_state(case)),
        where,
        *(each if each != "-" else "" for each in cells[2:]),
        case.reason,
    ]


def _draw_outages(cases: Sequence[FaultCase]) -> Html:
    bars = [
        ChartBar(
            label=case.fault,
            value=case.detect_s + (case.restart_s or 0.0),
            text=f"{case.detect_s:.1f} + {case.restart_s or 0.0:.1f} s",
            tip=f"{case.fault}: detected in {case.detect_s:.1f} s, restarted in {case.restart_s or 0.0:.1f} s",
        )
        for case in cases
        if case.detect_s is not None
    ]
    return draw_bar_chart("seconds to detect + seconds to restart (less is better)", bars) if bars else Html("")


def _describe_method(result: DrillResult) -> Html:
    times = result.reference
    rows: list[tuple[str, str]] = [("command", shlex.join(result.command)), ("version", result.version)]
    if times:
        rows += [
            ("undisturbed run", f"{times.steps} steps, checkpoints after {', '.join(map(str, times.saved_steps[:8]))}"),
            ("start to the first step", f"{format_number(result.start_s, 3)} s"),
            ("step", f"{format_number(times.step_s, 3)} s"),
            (
                "checkpoint",
                f"stall {format_number(times.stall_s, 3)} s, complete after {format_number(times.save_s, 3)} s",
            ),
        ]
    rows.append(("hang timeout of the drill", f"{format_number(result.hang_timeout_s, 3)} s"))
    rows.append(("runs and logs", result.folder))
    text = (
        "Each fault has a run of its own, with the same settings and seed as the undisturbed run. Detected: until the"
        " run's events record the failure. Restarted: from then until the first step of the next attempt is done."
        " Losses and gradient norms are compared bit by bit. Where a launcher cannot restart its own job, the drill"
        " starts it again on the same nodes, as a scheduler would."
    )
    return page.join_fragments(page.make_paragraph(text), page.make_table(("", ""), rows))
