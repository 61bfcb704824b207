"""Every process measures its own computing, apart from what it waits for others; and that costs next to nothing."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fakes.gloo import in_processes
from primus.config.schema import ModelSpec, OptimizerConfig, ParallelConfig
from primus.frameworks.native.engine.layout import build_layout
from primus.frameworks.native.engine.model import build_model, initialize_weights
from primus.frameworks.native.engine.optimizer import build_optimizer
from primus.frameworks.native.engine.step import prepare_model, train_step
from primus.runs import events
from primus.runs.store import Run
from primus.session.timing import compute_timer
from primus.session.timing.compute_timer import ComputeTimer

MakeRun = Callable[..., Run]
SPEC = ModelSpec(num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, vocab_size=160)
DELAY_S = 0.2
CPU = torch.device("cpu")


def test_time_outside_of_measured_passes_and_in_waits_does_not_count() -> None:
    timer = ComputeTimer(CPU, nn.Linear(1, 1))
    for _ in range(2):
        with timer.measure_step():
            time.sleep(0.02)
            if timer.pause():
                time.sleep(0.2)
                timer.resume()
        time.sleep(0.2)
    taken = timer.take_time()
    assert taken is not None and 0.04 <= taken.seconds() < 0.2
    assert timer.take_time() is None, "nothing since"


def test_a_pause_outside_of_measured_passes_begins_nothing() -> None:
    timer = ComputeTimer(CPU, nn.Linear(1, 1))
    assert not timer.pause()
    assert timer.take_time() is None


def test_what_follows_the_last_computing_of_a_pass_does_not_count() -> None:
    timer = ComputeTimer(CPU, nn.Linear(1, 1))
    with timer.measure_step():
        timer.stop()
        time.sleep(0.1)
    taken = timer.take_time()
    assert taken is not None and taken.seconds() < 0.05


@pytest.mark.parametrize("is_sharded", [True, False])
def test_of_two_processes_the_slow_one_has_the_longer_computing_time(tmp_path: Path, is_sharded: bool) -> None:
    in_processes(2, _slow_and_fast, tmp_path, is_sharded)
    fast, slow = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert min(fast["step"]) > 2 * DELAY_S, "each step lasts as long for both"
    assert statistics.median(slow["compute"]) > 2 * DELAY_S
    assert statistics.median(fast["compute"]) < DELAY_S, "the fast one waits, which is no computing"


def _slow_and_fast(rank: int, folder: Path, is_sharded: bool) -> None:
    """Three steps of two micro batches; in each forward pass of rank 1 there is a delay."""
    layout = build_layout(ParallelConfig(use_distributed_optimizer=is_sharded), CPU, 2)
    model = build_model(SPEC, "meta", 0, layout=layout)
    trainable = prepare_model(model, device="cpu")
    initialize_weights(model, 0)
    optimizer = build_optimizer(model, OptimizerConfig())
    timer = ComputeTimer(CPU, model)
    assert timer.is_complete
    trainable = replace(trainable, timer=timer)
    if rank == 1:
        model.layers["0"].attention.register_forward_pre_hook(lambda *_: time.sleep(DELAY_S))
    tokens = torch.randint(0, 160, (2, 16))
    times: dict[str, list[float]] = {"step": [], "compute": []}
    for _ in range(3):
        before = time.perf_counter()
        batches = [(tokens, tokens)] * 2
        train_step(trainable, optimizer, batches, learning_rate=1e-3, clip_grad=1.0).values.tolist()
        times["step"].append(time.perf_counter() - before)
        taken = timer.take_time()
        assert taken is not None
        times["compute"].append(taken.seconds())
    (folder / f"{rank}.json").write_text(json.dumps(times))


def test_a_torch_whose_waits_are_unknown_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sharded(nn.Module):
        def _get_fsdp_state(self) -> object:
            return type("State", (), {"_fsdp_param_groups": [object()]})()

    monkeypatch.setattr(compute_timer, "FSDPModule", Sharded)
    timer = ComputeTimer(CPU, Sharded())
    assert not timer.is_complete
    with timer.measure_step():
        pass
    assert timer.take_time() is None


class Event:
    """As torch.cuda.Event, on the clock of the host."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.time - self.time)


@pytest.mark.parametrize(("interval_s", "expected"), [(0.0, [True, True, True]), (1000.0, [True, False, False])])
def test_on_a_gpu_events_are_read_later_and_not_every_step_is_measured(
    monkeypatch: pytest.MonkeyPatch, interval_s: float, expected: list[bool]
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(compute_timer, "INTERVAL_S", interval_s)
    timer = ComputeTimer(torch.device("cuda"), nn.Linear(1, 1))
    taken = []
    for _ in expected:
        with timer.measure_step():
            time.sleep(0.02)
        taken.append(timer.take_time())
    assert [time is not None for time in taken] == expected
    assert taken[0] is not None and 0.02 <= taken[0].seconds() < 0.5


def test_heartbeats_of_all_processes_have_their_times(make_run: MakeRun, start_workers: Callable[..., Any]) -> None:
    run = make_run(train_iters=3)
    start_workers(run, world=2).succeed()
    for rank in (0, 1):
        beat = json.loads((run.attempt_folder(0) / f"rank_{rank}.heartbeat.json").read_text())
        assert beat["step"] == 3 and 0 < beat["compute_time_s"] < beat["step_time_s"]
    steps = [event for event in events.read_events(run.events) if event["kind"] == "step"]
    assert all(0 < step["compute_time_s"] < step["step_time_s"] for step in steps)


@pytest.mark.slow
def test_measuring_costs_less_than_a_two_hundredth_of_a_step() -> None:
    """A layer of FSDP2 pauses the timer five times in a pass; one of 64 wide on one core is as short as layers get."""
    timer = ComputeTimer(CPU, nn.Linear(1, 1))
    costs_s = []
    for _ in range(200):
        before = time.perf_counter()
        with timer.measure_step():
            for _ in range(15):
                timer.pause()
                timer.resume()
        taken = timer.take_time()
        assert taken is not None
        taken.seconds()
        costs_s.append(time.perf_counter() - before)
    cost_s = statistics.median(costs_s)
    assert cost_s < 0.005 * _shortest_step_s(), f"{cost_s * 1e6:.1f} us"


def _shortest_step_s() -> float:
    """A step of two layers, with 2,048 tokens."""
    threads = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        model = build_model(SPEC, "cpu", 0)
        trainable = prepare_model(model, device="cpu")
        optimizer = build_optimizer(model, OptimizerConfig())
        tokens = torch.randint(0, 160, (16, 128))
        times = []
        for _ in range(10):
            before = time.perf_counter()
            train_step(trainable, optimizer, [(tokens, tokens)], learning_rate=1e-3, clip_grad=1.0).values.tolist()
            times.append(time.perf_counter() - before)
    finally:
        torch.set_num_threads(threads)
    return min(times)
