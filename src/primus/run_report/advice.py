"""What limits a run, and what to change: rules over its facts, each with an estimate and where it comes from.

Every estimate is an upper bound of the time that the change can save: what is lost at most, not what will be gained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import Struct

from primus.run_report.facts import RunFacts
from primus.traces.report import TraceReport

MOST_CHANGES = 3
NOTICEABLE = 0.03
"""Share of time below which a change is not worth it."""
CONTENDED = 0.2
"""Share of waiting for a core above which it limits the run."""
RECOMPUTED_SHARE = 0.25
"""Full recomputation adds a forward pass to a step of three (arXiv 2205.05198): a quarter of its computation."""
LOW_MFU = 0.3
FREE_SHARE = 0.5
"""Share of memory in use below which a larger micro batch fits."""
COMPILING_BACKENDS = ("native", "torchtitan")
"""Those that accept `compile: true`, and do not compile without it."""


class SuggestedChange(Struct, frozen=True, kw_only=True):
    """A change of the settings."""

    change: str
    """What to do."""
    reason: str
    gain: float | None
    """Share of the run's time, or of a step's, that it saves at most; None if only a measurement can say it."""
    gain_of: str = "step"
    """``run`` or ``step``."""
    basis: str
    """Where the estimate comes from."""


def suggest_changes(facts: RunFacts, trace: TraceReport | None) -> list[SuggestedChange]:
    """Up to three changes, the largest gain first; those without an estimate are last."""
    found = [change for rule in RULES for change in rule(facts, trace)]
    noticeable = [change for change in found if change.gain is None or change.gain >= NOTICEABLE]
    return sorted(noticeable, key=lambda change: -(change.gain or 0.0))[:MOST_CHANGES]


def describe_limit(facts: RunFacts, trace: TraceReport | None) -> str:
    """One sentence: what most of the time goes into."""
    if not facts.points:
        return "the run has no training steps"
    largest = max(facts.time, key=lambda part: part.share, default=None)
    if largest is not None and largest.what != "steps":
        return f"most of the run's time is not training: {largest.what} takes {largest.share:.0%}"
    if facts.started.get("device_type") == "cpu" and (facts.core_wait_share or 0.0) > CONTENDED:
        return f"too few cores: threads that could run waited {facts.core_wait_share:.0%} of that time for one"
    if facts.data_share > 0.2:
        return f"the input: {facts.data_share:.0%} of the time of steps is spent waiting for batches"
    if trace is not None:
        return _describe_trace_limit(trace)
    if facts.compute_share is not None:
        rest = 1 - facts.compute_share
        if rest > 0.5:
            return f"waiting: only {facts.compute_share:.0%} of a step is forward and backward passes; record a profile"
        return f"computation: forward and backward passes are {facts.compute_share:.0%} of a step"
    return "the training steps; record a profile for details: train --profile steps=5:8"


def _describe_trace_limit(trace: TraceReport) -> str:
    found = trace.breakdown
    total = found.total_us or 1.0
    parts = {
        "computation": found.computation_us,
        "exposed communication (not overlapped with computation)": found.exposed_communication_us,
        "exposed copies (not overlapped with computation)": found.exposed_copy_us,
        "waiting for data": found.idle.data_us,
        "the host, between operators" if found.timeline == "host" else "launching kernels": found.idle.host_us,
        "kernels that wait for others": found.idle.kernel_us,
        "idle time of unknown cause": found.idle.unknown_us,
    }
    name = max(parts, key=lambda each: parts[each])
    text = f"{name}: {parts[name] / total:.0%} of the profiled time"
    if name == "computation" and found.categories:
        top = max(found.categories, key=lambda each: each.time_us)
        text += f"; {top.share:.0%} of the {'kernels' if found.timeline == 'device' else 'operators'} is {top.category}"
    return text


def _suggest_loader(facts: RunFacts, trace: TraceReport | None) -> Iterator[SuggestedChange]:
    workers = facts.settings.get("num_workers", 1)
    yield SuggestedChange(
        change=f"raise num_workers above {workers}, or put the data on a faster disk",
        reason=f"steps wait for batches {facts.data_share:.0%} of the time",
        gain=facts.data_share,
        basis="data_time_s of the steps: all of the wait",
    )


def _suggest_cores(facts: RunFacts, trace: TraceReport | None) -> Iterator[SuggestedChange]:
    if facts.started.get("device_type") == "cpu" and facts.core_wait_share is not None:
        yield SuggestedChange(
            change="end other processes on the host, or start no more threads than it has cores (OMP_NUM_THREADS)",
            reason=f"threads that could run waited {facts.core_wait_share:.0%} of that time for a core",
            gain=facts.core_wait_share,
            gain_of="run",
            basis="times in run queues of the kernel (schedstat of the threads of rank 0)",
        )


def _suggest_evaluation(facts: RunFacts, trace: TraceReport | None) -> Iterator[SuggestedChange]:
    share = _find_share(facts, "evaluation")
    interval, last = facts.settings.get("eval_interval"), facts.points[-1].step if facts.points else 0
    if not interval or interval >= last:  # the one after the last step has no interval
        return
    yield SuggestedChange(
        change=f"raise eval_interval above {facts.settings.get('eval_interval')}, or lower eval_iters",
        reason=f"evaluations take {share:.0%} of the run's time",
        gain=share / 2,
        gain_of="run",
        basis="time_s of the evaluations: half of it, with twice the interval",
    )


def _suggest_checkpoints(facts: RunFacts, trace: TraceReport | None) -> Iterator[SuggestedChange]:
    if not facts.settings.get("save_interval"):
        return
    waited = facts.checkpoint_wait_s
    if facts.settings.get("async_save") is False:
        what = "checkpoints" if waited is not None else "checkpoints, end and pauses"
        share = _find_share(facts, what)
        yield SuggestedChange(
            change="set async_save: true",
            reason=f"{what} take {share:.0%} of the run's time, and training waits for each save",
            gain=share,
            gain_of="run",
            basis="wait_s of the checkpoints: all of it"
            if waited is not None
            else "time without events, as an upper bound",
        )
    elif waited is not None and facts.wall_s:
        cost = waited + facts.slow_saving_s
        yield SuggestedChange(
            change=f"raise save_interval above {facts.settings['save_interval']}",
            reason=f"checkpoints cost {cost / facts.wall_s:.0%} of the run's time: training waits {waited:.1f} s for"
            f" them, and steps during the writing take {facts.slow_saving_s:.1f} s longer",
            gain=cost / facts.wall_s / 2,
            gain_of="run",
            basis="half of that, with twice the interval",
        )


def _suggest_first_steps(facts: RunFacts, trace: TraceReport | None) -> Iterator[SuggestedChange]:
    share = facts.slow_first_s / facts.wall_s if facts.wall_s else 0.0
    compiled = facts.started.get("compiled")
    yield SuggestedChange(
        change="set compile: false, or train for longer" if compiled else "warm the caches of kernels and data up once",
        reason=f"the first steps take {facts.slow_first_s:.1f} s longer than the others",
        gain=share,
        gain_of="run",
        basis="time of the first three steps of each attempt above the median",
    )


def _suggest_pauses(facts: RunFacts, trace: TraceReport | None) -> Iterator[SuggestedChange]:
    total = sum(part.seconds for part in facts.time if part.what == "steps")
    yield SuggestedChange(
        change="find what disturbs single steps: other jobs, the file system, Python's garbage collection"
        " (callbacks: [garbage_collector])",
        reason=f"steps that take 1.5 times the median cost {facts.slow_later_s:.1f} s",
        gain=facts.slow_later_s / total if total else 0.0,
        basis="their time above the median",
    )


def _suggest_compilation(facts: RunFacts, trace: TraceReport | None) -> Iterator[SuggestedChange]:
    backend = facts.started.get("backend", "native")
    if trace is None or facts.started.get("compiled") or backend == "jax":
        return
    found = trace.breakdown
    lost = found.idle.host_us + found.idle.kernel_us
    what = "kernels wait for their launch" if found.timeline == "device" else "the host works between operators"
    compile_or = "set compile: true, or " if backend in COMPILING_BACKENDS else ""
    yield SuggestedChange(
        change=f"{compile_or}raise micro_batch_size, so that there are fewer and larger operators",
        reason=f"{what} {lost / found.total_us:.0%} of the profiled time",
        gain=lost / found.total_us if found.total_us else 0.0,
        basis="idle time of the trace: all of it",
    )


def _suggest_overlap(facts: RunFacts, trace: TraceReport | None) -> Iterator[SuggestedChange]:
    if trace is None or not trace.breakdown.total_us:
        return
    share = trace.breakdown.exposed_communication_us / trace.breakdown.total_us
    yield SuggestedChange(
        change="raise global_batch_size or micro_batch_size, so that fewer bytes are sent for each token; with tensor"
        " parallelism, lower tensor_model_parallel_size",
        reason=f"exposed communication (not overlapped with computation) is {share:.0%} of the profiled time",
        gain=share,
        basis="exposed communication of the trace: all of it",
    )


def _suggest_straggler(facts: RunFacts, trace: TraceReport | None) -> Iterator[SuggestedChange]:
    ranks = trace.ranks if trace is not None else None
    if trace is None or ranks is None or ranks.straggler is None:
        return
    waits = max(row.wait_us for row in ranks.ranks)
    yield SuggestedChange(
        change=f"check the node of rank {ranks.straggler} (preflight --perf), or remove it",
        reason=f"the other ranks wait for rank {ranks.straggler}",
        gain=waits / trace.breakdown.total_us if trace.breakdown.total_us else 0.0,
        basis="the longest wait of a rank in the trace",
    )


def _suggest_recomputation(facts: RunFacts, trace: TraceReport | None) -> Iterator[SuggestedChange]:
    if facts.settings.get("recompute_activations") is True and _is_memory_free(facts):
        yield SuggestedChange(
            change="set recompute_activations: false",
            reason=f"{_format_memory(facts)} is in use, and activations are computed twice",
            gain=RECOMPUTED_SHARE * (facts.compute_share or 1.0),
            basis="a forward pass of four (arXiv 2205.05198)",
        )


def _suggest_batch(facts: RunFacts, trace: TraceReport | None) -> Iterator[SuggestedChange]:
    if facts.mfu is not None and facts.mfu < LOW_MFU and _is_memory_free(facts):
        size = facts.settings.get("micro_batch_size", 1)
        yield SuggestedChange(
            change=f"raise micro_batch_size above {size}",
            reason=f"MFU is {facts.mfu:.0%}, and only {_format_memory(facts)} is in use",
            gain=None,
            basis="to be measured: tune train --keys micro_batch_size=1,2,4,8",
        )


def _suggest_precision(facts: RunFacts, trace: TraceReport | None) -> Iterator[SuggestedChange]:
    if facts.started.get("dtype") == "float32" and facts.started.get("device_type") not in (None, "cpu"):
        yield SuggestedChange(
            change="set bf16: true",
            reason="the run trains in float32 on a device whose matrix units have bfloat16",
            gain=None,
            basis="to be measured: the losses change, too",
        )


RULES: tuple[Callable[[RunFacts, TraceReport | None], Iterator[SuggestedChange]], ...] = (
    _suggest_loader,
    _suggest_cores,
    _suggest_evaluation,
    _suggest_checkpoints,
    _suggest_first_steps,
    _suggest_pauses,
    _suggest_compilation,
    _suggest_overlap,
    _suggest_straggler,
    _suggest_recomputation,
    _suggest_batch,
    _suggest_precision,
)


def _find_share(facts: RunFacts, what: str) -> float:
    return next((part.share for part in facts.time if part.what == what), 0.0)


def _is_memory_free(facts: RunFacts) -> bool:
    if not facts.memory_gib or not facts.capacity_gib:
        return False
    return facts.memory_gib < FREE_SHARE * facts.capacity_gib


def _format_memory(facts: RunFacts) -> str:
    return f"{facts.memory_gib:.1f} of {facts.capacity_gib:.0f} GiB of memory"
