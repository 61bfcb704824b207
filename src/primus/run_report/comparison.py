"""Which difference between two runs explains the difference of their speed or their losses.

A difference is a candidate for what it can change: a setting by the group of its key, everything of the machine and
the packages that compute for the speed. Where one candidate is left it is the explanation; several need a run each.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from msgspec import Struct

from primus.config.schema import OWNERS
from primus.redaction import are_comparable
from primus.run_report.facts import RunFacts
from primus.run_report.report import RunReport, build_report
from primus.runs import events, summary
from primus.runs.differences import (
    LossDifference,
    RunDifference,
    compare_losses,
    compare_mappings,
    read_run_packages,
)
from primus.runs.gate import CONTENDED
from primus.runs.run_steps import find_core_wait, find_other_load
from primus.runs.settings_in_force import read_settings_in_force
from primus.runs.snapshot import read_system_info
from primus.runs.speed_facts import (
    SpeedPart,
    describe_software,
    filter_packages,
    find_speed_rule,
    read_run_variables,
)
from primus.runs.store import Run
from primus.statistics import bootstrap_ratio
from primus.traces.report import TraceDifference, compare_reports

Effect = Literal["speed", "loss"]
SPEED: frozenset[Effect] = frozenset({"speed"})
LOSS: frozenset[Effect] = frozenset({"loss"})
BOTH: frozenset[Effect] = SPEED | LOSS
NONE: frozenset[Effect] = frozenset()
GROUP_EFFECTS: Mapping[str, frozenset[Effect]] = {
    "model": BOTH, "training": BOTH, "data": LOSS, "optimizer": LOSS, "parallel": SPEED, "checkpoint": NONE,
    "logging": NONE,
}  # fmt: skip
KEY_EFFECTS: Mapping[str, frozenset[Effect]] = {
    "seed": LOSS, "train_iters": LOSS, "init": LOSS, "device": BOTH, "compile": SPEED, "deterministic": SPEED,
    "recompute_activations": SPEED, "loss_chunk_size": SPEED, "eval_interval": NONE, "eval_iters": NONE,
    "max_nonfinite_steps": NONE, "max_rewinds": NONE, "allow_version": NONE, "allow_settings_not_in_force": NONE,
    "optimizer_implementation": SPEED, "attention_kernel": SPEED, "sharding": SPEED, "parameter_device": SPEED,
    "moment_device": SPEED, "num_workers": SPEED, "data_path": NONE,
    "load": LOSS, "finetune": LOSS, "framework": BOTH, "exp_name": NONE, "workspace": NONE, "work_group": NONE,
    "user_name": NONE,
}  # fmt: skip
"""What a key can change, where its group does not say it: rounding does not count as another loss."""
MEASURED = ("applied_grad_norm", "learning_rate")
"""Numbers of the first step among the settings in force, which the losses and the schedule explain."""
NUM_KERNELS = 8


class ExplainedDifference(Struct, frozen=True, kw_only=True):
    """A difference that can explain another speed or loss."""

    kind: str
    """``setting``, ``in force`` (a setting that was not asked for), ``machine``, ``variable`` or ``package``."""
    what: str
    a: Any
    b: Any
    effects: list[Effect]


class SpeedDifference(Struct, frozen=True, kw_only=True):
    """The speeds of two runs."""

    a: float
    """Tokens/s, the median of steady steps."""
    b: float
    ratio: float
    """B by A."""
    low: float
    """Of the 95 % interval of the ratio."""
    high: float
    is_real: bool
    """Whether the interval excludes 1."""
    parts: list[list[float | str | None]]
    """Part of a step, and its seconds in A and B."""


class RunComparison(Struct, frozen=True, kw_only=True):
    """Two runs compared."""

    speed: SpeedDifference | None
    """None if one of them has no steps."""
    losses: LossDifference
    candidates: list[ExplainedDifference]
    load: str
    """Other work of the machine that can explain the speed; empty without."""
    speed_explanation: str
    loss_explanation: str
    trace: TraceDifference | None
    """If both have a profile."""


def compare_runs(a: Run, b: Run) -> RunComparison:
    """Compare two runs."""
    reports = (build_report(a), build_report(b))
    candidates = list_candidates(a, b)
    speed = _compare_speeds(a, b, reports)
    losses = compare_losses(a, b)
    traces = [report.trace for report in reports]
    load = _describe_load(a, b)
    return RunComparison(
        speed=speed,
        losses=losses,
        candidates=candidates,
        load=load,
        speed_explanation=_explain_speed(speed, candidates, load),
        loss_explanation=_explain_losses(losses, candidates),
        trace=compare_reports(traces[0], traces[1], NUM_KERNELS) if traces[0] and traces[1] else None,
    )


def list_candidates(a: Run, b: Run) -> list[ExplainedDifference]:
    """Differences that can change speed or loss: settings, then the machine, variables and packages."""
    asked = compare_mappings(summary.flatten_run_settings(a), summary.flatten_run_settings(b))
    x, y = (_read_settings_in_force(run) for run in (a, b))
    # What both engines have alike explains nothing, whatever they were asked for.
    alike = {key for key in x.keys() & y.keys() if x[key] == y[key]}
    found = [_build_candidate("setting", each, find_effects(each.what)) for each in asked if each.what not in alike]
    known = {each.what for each in asked}
    found += [
        _build_candidate("in force", each, find_effects(each.what))
        for each in (compare_mappings(_drop_off(x, y), _drop_off(y, x)) if x and y else [])
        if each.what not in known
    ]
    for part in get_args(SpeedPart):
        for each in compare_mappings(_read_facts(a, part), _read_facts(b, part)):
            rule = find_speed_rule(part, each.what)
            # The launch set a variable that the table does not know for a reason.
            if (rule is None or rule.kind != "irrelevant") and are_comparable(str(each.a), str(each.b)):
                found.append(_build_candidate(part, each, SPEED))
    return [each for each in found if each.effects]


def _read_settings_in_force(run: Run) -> dict[str, object]:
    found = read_settings_in_force(events.read_events(run.events))
    return {each.key: each.in_force for each in found if each.key not in MEASURED}


def _drop_off(settings: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, object]:
    """The settings without those that do nothing and that the other engine does not state at all."""
    return {
        key: value
        for key, value in settings.items()
        if key in other or not (value in (None, "none") or (key.endswith("_parallel_size") and value == 1))
    }


def _read_facts(run: Run, part: SpeedPart) -> dict[str, object]:
    """What the run recorded of a part of the table of `primus.runs.speed_facts`."""
    if part == "variable":
        return dict(read_run_variables(run).values)
    if part == "package":
        return dict(filter_packages(read_run_packages(run)))
    started = _read_started(run)
    system = read_system_info(run.directory / "env")
    facts: dict[str, object] = {"host": run.read_metadata().host, "device": started.get("device")}
    facts |= {"world_size": started.get("world_size"), "threads": started.get("threads")}
    if system is not None:
        facts |= describe_software(system, run.read_metadata().command)
        facts["device"] = facts["device"] or ", ".join(sorted(set(system.devices))) or None
    return {name: value for name, value in facts.items() if value is not None}


def find_effects(key: str) -> frozenset[Effect]:
    """What a setting can change."""
    if key in KEY_EFFECTS:
        return KEY_EFFECTS[key]
    if key.startswith("env."):
        return SPEED
    group = OWNERS.get(key)
    return GROUP_EFFECTS[group] if group else BOTH  # keys of an engine


def _build_candidate(kind: str, found: RunDifference, effects: frozenset[Effect]) -> ExplainedDifference:
    return ExplainedDifference(kind=kind, what=found.what, a=found.a, b=found.b, effects=sorted(effects))


def _read_started(run: Run) -> Mapping[str, Any]:
    found = [event for event in events.read_events(run.events) if event["kind"] == "run_started"]
    return found[-1] if found else {}


def _compare_speeds(a: Run, b: Run, reports: Sequence[RunReport]) -> SpeedDifference | None:
    series = [_list_rates(run) for run in (a, b)]
    rates = [report.facts.tokens_per_s for report in reports]
    if not all(series) or rates[0] is None or rates[1] is None:
        return None
    interval = bootstrap_ratio(series[1], series[0], statistics.median, block=None)
    facts = [report.facts for report in reports]
    parts: list[list[float | str | None]] = [
        ["waiting for data", *(_to_seconds(each, each.data_share) for each in facts)],
        ["forward and backward passes", *(_to_seconds(each, each.compute_share) for each in facts)],
    ]
    return SpeedDifference(
        a=rates[0],
        b=rates[1],
        ratio=interval.estimate,
        low=interval.low,
        high=interval.high,
        is_real=not interval.low <= 1 <= interval.high,
        parts=[part for part in parts if None not in part],
    )


def _to_seconds(facts: RunFacts, share: float | None) -> float | None:
    """A share of the steady step in seconds."""
    return None if share is None or facts.steady_step_s is None else share * facts.steady_step_s


def _list_rates(run: Run) -> list[float]:
    """Tokens/s of the steps after warm-up."""
    steps = events.read_steps(run.events)
    chosen = steps[summary.WARM_UP_STEPS :] or steps
    return [float(step["tokens_per_s"]) for step in chosen if step.get("tokens_per_s")]


def _describe_load(a: Run, b: Run) -> str:
    """What other work of the machine has taken from the runs; empty if neither had to share it."""
    found = []
    for name, run in (("A", a), ("B", b)):
        recorded = list(events.read_events(run.events))
        waited, others = find_core_wait(recorded) or 0.0, find_other_load(recorded) or 0.0
        if waited > CONTENDED and _read_started(run).get("device_type") == "cpu":
            found.append(f"threads of {name} waited {waited:.0%} of the time for a core")
        if others > CONTENDED:
            found.append(f"other processes used {others:.0%} of the CPUs during {name}")
    return "; ".join(found)


def _explain_speed(speed: SpeedDifference | None, candidates: Sequence[ExplainedDifference], load: str) -> str:
    if speed is None:
        return "one of the runs has no steps"
    change = f"B has {speed.ratio:.3f} times the tokens/s of A (95 %: {speed.low:.3f} to {speed.high:.3f})"
    if not speed.is_real:
        return f"{change}: no difference beyond the noise of the steps"
    if load:
        others = [each.what for each in candidates if "speed" in each.effects]
        named = f", and so can {', '.join(others)}" if others else ""
        return f"{change}; the machine had other work, which can explain it{named}: {load}; repeat both runs without it"
    return f"{change}; {_name_candidates(candidates, 'speed', 'other jobs, clocks or the network may explain it')}"


def _explain_losses(losses: LossDifference, candidates: Sequence[ExplainedDifference]) -> str:
    if losses.common_steps == 0:
        return "the runs have no steps in common"
    if losses.first_step is None:
        return f"the losses of all {losses.common_steps} common steps are equal bit by bit"
    size = f", by at most {losses.max_absolute:.3g}" if losses.max_absolute is not None else ""
    start = f"the losses differ from step {losses.first_step} on{size}"
    otherwise = "rounding may explain it: another number of processes, device, kernel or version"
    return f"{start}; {_name_candidates(candidates, 'loss', otherwise)}"


def _name_candidates(candidates: Sequence[ExplainedDifference], effect: Effect, otherwise: str) -> str:
    found = [each for each in candidates if effect in each.effects]
    if not found:
        return f"no recorded difference can change the {effect}: {otherwise}"
    names = ", ".join(f"{each.what} ({each.a} -> {each.b})" for each in found)
    if len(found) == 1:
        return f"the only difference that can change the {effect} is {names}"
    return f"{len(found)} differences can change the {effect}: {names}; repeat A with one of them at a time"
