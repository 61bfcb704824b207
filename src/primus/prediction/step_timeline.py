"""When each pass of a rank computes, exchanges and waits: predicted times in the order of the pipeline's schedule."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from primus.config.schema import ModelSpec
from primus.prediction.device_rates import DeviceRates
from primus.prediction.rank_record import RankRecord
from primus.prediction.step_layout import StepLayout
from primus.prediction.step_time import COMMUNICATION, FITTED, time_stage
from primus.prediction.step_work import list_stages

FORWARD_COMPUTE = {"products": 1 / 3, "attention": 1 / 3.5, "element-wise": 1 / 3, "host": 1 / 3}
"""Share of a term that the forward pass has: one of three products, one of 3.5 of attention; nothing is recomputed."""
FORWARD_EXCHANGE = {"tensor": 1 / 2, "context": 1 / 3, "expert": 1 / 2, "weights": 1 / 2, "pipeline": 1 / 2}
"""The same of calls of collectives (`step_work`); gradients are reduced in the backward pass."""


class PassTime(Struct, frozen=True):
    """Seconds of a pass of one micro batch through a stage."""

    compute: float
    exchange: float
    """Hidden behind computation or not."""
    exposed: float
    """What of it adds to the pass."""

    @property
    def total(self) -> float:
        return self.compute + self.exposed


class StagePasses(Struct, frozen=True):
    """Times of one stage; those of the end of a step are the optimizer's and of collectives that run once."""

    forward: PassTime
    backward: PassTime
    end: PassTime


class TimelinePass(Struct, frozen=True, kw_only=True):
    """A pass of a rank, on the clock of the step."""

    phase: str
    """``forward``, ``backward``, or ``end``: what follows the passes."""
    operator: int | None
    """Operators of the executed step before it; None if none was executed."""
    start: float
    end: float
    exchange: float
    """Seconds of collectives, which end with the pass; what they last longer than the pass waits for is hidden."""
    exposed: float


def time_passes(spec: ModelSpec, layout: StepLayout, rates: DeviceRates) -> list[StagePasses]:
    """The times of each stage, the first one first."""
    found = []
    for stage in list_stages(spec, layout):
        terms, collectives = time_stage(stage, layout, rates, FITTED)
        count = layout.micro_batches
        compute = {name: terms[name] / count for name in ("products", "attention", "element-wise", "recompute", "host")}
        of_batch = [each for each in collectives if each.scope == "micro batch"]
        of_step = [each for each in collectives if each.scope == "step"]
        exchange = {each.name: 0.0 for each in of_batch}
        exposed = dict(exchange)
        for each in of_batch:
            exchange[each.name] += each.seconds / count
            exposed[each.name] += each.exposed_seconds / count
        forward = PassTime(
            _sum_shares(compute, FORWARD_COMPUTE),
            _sum_shares(exchange, FORWARD_EXCHANGE),
            _sum_shares(exposed, FORWARD_EXCHANGE),
        )
        backward = PassTime(
            sum(compute.values()) - forward.compute,
            sum(exchange.values()) - forward.exchange,
            sum(exposed.values()) - forward.exposed,
        )
        end = PassTime(
            terms["optimizer"],
            sum(each.seconds for each in of_step),
            max(0.0, sum(terms[name] for name in COMMUNICATION) - count * sum(exposed.values())),
        )
        found.append(StagePasses(forward, backward, end))
    return found


def _sum_shares(values: dict[str, float], shares: dict[str, float]) -> float:
    return sum(value * shares.get(name, 0.0) for name, value in values.items())


class _Pass(Struct, frozen=True):
    is_forward: bool
    chunk: int
    """Group of layers of the stage."""
    micro_batch: int


def list_passes(schedule: str, stage: int, stages: int, groups: int, count: int) -> list[_Pass]:
    """The passes of a stage in the order of `torch.distributed.pipelining`'s schedule of that name."""
    rounds = max(1, count // stages) if groups > 1 else 1
    # Interleaved schedules take the groups in turn, after as many micro batches as a round has.
    of_round = count // rounds if schedule == "Interleaved1F1B" else count
    forward, backward = [], []
    for number in range(count * groups):
        turn, place = divmod(number, of_round * groups)
        chunk, micro_batch = divmod(place, of_round)
        forward.append(_Pass(True, chunk, turn * of_round + micro_batch))
        last = of_round - 1 - micro_batch if schedule == "LoopedBFS" else micro_batch
        backward.append(_Pass(False, groups - 1 - chunk, turn * of_round + last))
    if schedule == "1F1B":
        ahead = stages - stage - 1
    elif schedule == "Interleaved1F1B":
        ahead = (groups - 1) * of_round + 2 * (stages - stage - 1)
    elif schedule == "none":
        ahead = 0
    else:
        ahead = len(forward)
    ahead = min(ahead, len(forward))
    order = forward[:ahead]
    for number in range(len(backward)):
        order += forward[ahead + number : ahead + number + 1]
        order.append(backward[number])
    return order


def schedule_passes(
    schedule: str, times: Sequence[StagePasses], groups: int, count: int
) -> list[list[tuple[_Pass, float, float]]]:
    """Each pass of each stage with its begin and end: it waits for the stage before it, or behind it."""
    stages = len(times)
    orders = [list_passes(schedule, stage, stages, groups, count) for stage in range(stages)]
    ends: dict[tuple[bool, int, int], float] = {}
    """By direction, stage in the order of the layers, and micro batch."""
    done: list[list[tuple[_Pass, float, float]]] = [[] for _ in times]
    while any(len(found) < len(order) for found, order in zip(done, orders, strict=True)):
        for stage, (found, order) in enumerate(zip(done, orders, strict=True)):
            while len(found) < len(order):
                each = order[len(found)]
                place = each.chunk * stages + stage
                before = place - 1 if each.is_forward else place + 1
                needed = (each.is_forward, before, each.micro_batch)
                if 0 <= before < stages * groups and needed not in ends:
                    break  # another stage is first
                start = max(found[-1][2] if found else 0.0, ends.get(needed, 0.0))
                passed = times[stage].forward if each.is_forward else times[stage].backward
                end = start + passed.total / groups
                ends[each.is_forward, place, each.micro_batch] = end
                found.append((each, start, end))
    return done


def build_timeline(record: RankRecord, times: Sequence[StagePasses], groups: int) -> tuple[TimelinePass, ...]:
    """The executed micro batches of a rank on the clock of a step that has so many."""
    own = times[record.stage]
    placed = schedule_passes(record.schedule, times, groups, record.executed_micro_batches)[record.stage]
    marks = [mark.operator for mark in record.passes]
    has_marks = [mark.phase == "forward" for mark in record.passes] == [
        *(each.is_forward for each, *_ in placed),
        False,
    ]
    found = [
        TimelinePass(
            phase="forward" if each.is_forward else "backward",
            operator=marks[number] if has_marks else None,
            start=start,
            end=end,
            exchange=(own.forward if each.is_forward else own.backward).exchange / groups,
            exposed=(own.forward if each.is_forward else own.backward).exposed / groups,
        )
        for number, (each, start, end) in enumerate(placed)
    ]
    last = max(pass_.end for pass_ in found)
    found.append(
        TimelinePass(
            phase="end",
            operator=marks[-1] if has_marks else None,
            start=last,
            end=last + own.end.total,
            exchange=own.end.exchange,
            exposed=own.end.exposed,
        )
    )
    return tuple(found)
