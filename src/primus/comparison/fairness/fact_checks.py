"""Facts besides settings that make a comparison fair: inputs, losses, precision, counting, timing, the machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from primus.comparison.fairness.check import FairnessCheck, make_check, make_unknown
from primus.comparison.fairness.evidence import FairnessEvidence
from primus.comparison.fairness.loss_curves import LossSpread, compare_loss_curves

RATE_TOLERANCE = 1e-5
"""Relative; Megatron-LM prints learning rates with seven digits."""
FLOP_TOLERANCE = 0.005
"""Relative; conventions of a model differ by 3 % and more, padding of its vocabulary by 0.14 %."""
FIRST_LOSS_TOLERANCE = 1e-5
"""Losses of other random weights differ by 1e-3 and more at the first step; rounding of float32 by 2e-6."""
CLOCK_TOLERANCE = 0.02
MOST_LOAD = 0.05
"""Share of the machine that other processes may take."""
SHOWN_DIGITS = 12


def check_tokens(a: FairnessEvidence, b: FairnessEvidence) -> FairnessCheck:
    """Whether each step had the same tokens."""
    common = sorted(a.tokens.keys() & b.tokens.keys())
    if not common:
        return make_unknown("tokens", "the tokens of each step are not stated", (a, b), (a.tokens, b.tokens))
    other = next((step for step in common if a.tokens[step] != b.tokens[step]), None)
    if other is None:
        return _check_token_counts(a, b, common) or make_check(
            "tokens", "same", f"equal in all {len(common)} common steps"
        )
    reason = f"other tokens, or another order of them, from step {other} on"
    return make_check("tokens", "unfair", reason, (a.tokens[other][:SHOWN_DIGITS], b.tokens[other][:SHOWN_DIGITS]))


def _check_token_counts(a: FairnessEvidence, b: FairnessEvidence, steps: Sequence[int]) -> FairnessCheck | None:
    """Whether the rates of equal steps are computed by other numbers of tokens; None if they are not."""
    for step in steps:
        counts = a.num_tokens.get(step), b.num_tokens.get(step)
        if counts[0] != counts[1] and None not in counts:
            return make_check("tokens", "unfair", f"the tokens of step {step} are equal, their numbers are not", counts)
    return None


def check_weights(a: FairnessEvidence, b: FairnessEvidence) -> FairnessCheck:
    """Whether training started from the same weights: by their hashes, else by the loss of the first step."""
    name = "initial weights"
    if a.weights and b.weights:
        values = a.weights[:SHOWN_DIGITS], b.weights[:SHOWN_DIGITS]
        if a.weights == b.weights:
            return make_check(name, "same", "the hashes are equal", values)
        return make_check(name, "unfair", "training starts from other weights", values)
    first = a.losses.get(1, math.nan), b.losses.get(1, math.inf)
    if 1 in a.tokens and a.tokens[1] == b.tokens.get(1) and abs(first[0] - first[1]) <= FIRST_LOSS_TOLERANCE:
        return make_check(name, "equivalent", "the losses of the first step on the same tokens are equal", first)
    return make_unknown(name, "the hash of the initial weights is not stated", (a, b), (a.weights, b.weights))


def check_losses(a: FairnessEvidence, b: FairnessEvidence, spread: LossSpread | None) -> FairnessCheck:
    """Whether the loss curves are of the same training."""
    found = compare_loss_curves(a.losses, b.losses, spread, a.precision if a.precision == b.precision else None)
    if found.is_equal is None:
        return make_check("loss curves", "not shown", found.reason)
    return make_check("loss curves", "same" if found.is_equal else "unfair", found.reason)


def check_precision(a: FairnessEvidence, b: FairnessEvidence) -> FairnessCheck:
    """Whether both computed in the same precision, which is that of their settings."""
    name, values = "precision used", (a.precision, b.precision)
    for side in (a, b):
        asked = side.settings.get("precision")
        if asked and side.precision and asked != side.precision:
            reason = f"{side.name} was asked for {asked} and computed in {side.precision}"
            return make_check(name, "unfair", reason, values)
    if not a.precision or not b.precision:
        return make_unknown(name, "the precision of the computation is not stated", (a, b), values)
    if a.precision != b.precision:
        return make_check(name, "unfair", "narrower numbers are faster, and train differently", values)
    return make_check(name, "same", "equal", values)


def check_learning_rates(a: FairnessEvidence, b: FairnessEvidence) -> FairnessCheck:
    """Whether each step applied the same learning rate."""
    name, rates = "learning rates", (a.learning_rates, b.learning_rates)
    common = sorted(rates[0].keys() & rates[1].keys())
    if not common:
        return make_unknown(name, "the applied learning rates are not stated", (a, b), rates, is_required=False)
    other = _find_other_rate(*rates, shift=0)
    if other is None:
        return make_check(name, "same", f"equal in all {len(common)} common steps")
    reason = f"other learning rates from step {other} on"
    for shift, late in ((1, a.name), (-1, b.name)):
        if len(common) > 2 and _find_other_rate(*rates, shift=shift) is None:
            reason = f"the schedule of {late} is one step late"
    return make_check(name, "unfair", reason, (rates[0][other], rates[1][other]))


def _find_other_rate(a: Mapping[int, float], b: Mapping[int, float], *, shift: int) -> int | None:
    """The first step of `a` whose rate is not that of `b` `shift` steps earlier."""
    for step in sorted(a):
        theirs = b.get(step - shift)
        if theirs is not None and not math.isclose(a[step], theirs, rel_tol=RATE_TOLERANCE, abs_tol=1e-15):
            return step
    return None


def check_flops(a: FairnessEvidence, b: FairnessEvidence) -> FairnessCheck:
    """Whether both count the FLOPs of a token alike."""
    name, counts = "FLOP convention", (a.gflop_per_token, b.gflop_per_token)
    if counts[0] is None or counts[1] is None:
        return make_unknown(name, "FLOPs per token are not reported", (a, b), counts, is_required=False)
    values = [f"{side.gflop_per_token:.4g} GFLOP/token {side.flops_convention}".strip() for side in (a, b)]
    if math.isclose(counts[0], counts[1], rel_tol=FLOP_TOLERANCE):
        return make_check(name, "same", "equal FLOPs per token", values)
    return make_check(name, "unfair", "the FLOPs of a token are counted by different conventions", values)


def check_steps(a: FairnessEvidence, b: FairnessEvidence) -> FairnessCheck:
    """Whether times of the same steps are known, so that both are measured after the same warm-up."""
    name, common = "measured steps", set(a.timed_steps) & set(b.timed_steps)
    if not common:
        problem = "the times of common steps are not stated"
        return make_unknown(name, problem, (a, b), (a.timed_steps, b.timed_steps))
    firsts = min(a.timed_steps), min(b.timed_steps)
    if firsts[0] != firsts[1]:
        reason = "one side lacks its first steps, so that its warm-up is not seen"
        return make_check(name, "unfair", reason, [f"from step {first}" for first in firsts])
    return make_check(name, "same", f"{len(common)} common steps, measured after the same warm-up")


def check_timer(a: FairnessEvidence, b: FairnessEvidence) -> FairnessCheck:
    """Whether the time of a step includes the same."""
    name, values = "timer", (a.timer, b.timer)
    if a.timer is None or b.timer is None:
        return make_unknown(name, "what a step's time includes is not stated", (a, b), values, is_required=False)
    if a.timer != b.timer:
        return make_check(name, "unfair", "the times of steps include different things", values)
    return make_check(name, "same", a.timer)


def check_clocks(a: FairnessEvidence, b: FairnessEvidence) -> FairnessCheck:
    """Whether the same device ran at the same clock, if something else than the work chose it."""
    name, states = "clocks", (a.device_state, b.device_state)
    clocks = [state.clock_mhz for state in states]
    if clocks[0] is None or clocks[1] is None:
        return make_unknown(name, "not measured", (a, b), clocks, is_required=False)
    values = [f"{clock:.0f} MHz" for clock in clocks if clock is not None]
    if a.device != b.device:
        return make_check(name, "irrelevant", "the devices differ", values)
    if math.isclose(clocks[0], clocks[1], rel_tol=CLOCK_TOLERANCE):
        return make_check(name, "same", "equal", values)
    if not all(state.has_device_clock for state in states):
        reason = "the medians of all cores differ, idle ones included"
        return make_check(name, "not shown", reason, values, is_required=False)
    slower = min(states, key=lambda state: state.clock_mhz or 0.0)
    if slower.is_power_limited:
        return make_check(name, "irrelevant", "the slower clock is that of the power limit under its load", values)
    return make_check(name, "unfair", "the same device ran at different clocks", values)


def check_power_limits(a: FairnessEvidence, b: FairnessEvidence) -> FairnessCheck:
    """Whether the same device had the same power limit."""
    name, limits = "power limit", (a.device_state.power_limit_w, b.device_state.power_limit_w)
    if limits[0] is None or limits[1] is None:
        return make_unknown(name, "not measured", (a, b), limits, is_required=False)
    values = [f"{limit:.0f} W" for limit in limits if limit is not None]
    if a.device != b.device:
        return make_check(name, "irrelevant", "the devices differ", values)
    if math.isclose(limits[0], limits[1], rel_tol=CLOCK_TOLERANCE):
        return make_check(name, "same", "equal", values)
    return make_check(name, "unfair", "the same device had different power limits", values)


def check_throttling(a: FairnessEvidence, b: FairnessEvidence) -> FairnessCheck:
    """Whether heat or a fault lowered the clock of a device; a full load always reaches the power limit."""
    faults = a.device_state.faults, b.device_state.faults
    shown = [None if each is None else ", ".join(each) or "none" for each in faults]
    if any(faults):
        lowered = " and ".join(side.name for side, each in zip((a, b), faults, strict=True) if each)
        return make_check("throttling", "unfair", f"{lowered} was throttled", shown)
    if None in faults:
        return make_unknown("throttling", "not measured", (a, b), shown, is_required=False)
    return make_check("throttling", "same", "nothing but the power limit", shown)


def check_load(a: FairnessEvidence, b: FairnessEvidence) -> FairnessCheck:
    """Whether other processes took part of a machine."""
    name, loads = "other load", (a.other_load, b.other_load)
    shares = ["" if load is None else f"{load:.0%}" for load in loads]
    if a.turn_group and a.turn_group == b.turn_group:
        return make_check(name, "same", "the runs took turns, so that both met it", shares)
    if any(load is not None and load > MOST_LOAD for load in loads):
        known = " and ".join(filter(None, shares))
        return make_check(
            name, "unfair", f"other processes took {known} of the machine, more than {MOST_LOAD:.0%}", shares
        )
    if None in loads:
        return make_unknown(name, "not measured", (a, b), loads, is_required=False)
    return make_check(name, "same", f"at most {MOST_LOAD:.0%}", shares)


FACT_CHECKS = (check_tokens, check_weights, check_precision, check_flops, check_steps, check_timer, check_clocks,
               check_power_limits, check_throttling, check_load)  # fmt: skip
"""Those that depend on the two sides only."""
