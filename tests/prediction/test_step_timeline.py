"""Passes of a pipeline in their order and on the clock."""

from __future__ import annotations

import pytest
from tests.prediction.test_fake_ranks import build_experiment, execute

from primus.prediction.layout_machine import LayoutMachine
from primus.prediction.layout_page import format_layout_page
from primus.prediction.layout_run import LayoutReport
from primus.prediction.layout_speed import predict_layout
from primus.prediction.step_timeline import PassTime, StagePasses, schedule_passes

EQUAL = StagePasses(PassTime(1.0, 0.5, 0.0), PassTime(2.0, 0.5, 0.0), PassTime(0.0, 0.0, 0.0))


@pytest.mark.parametrize(("schedule", "groups"), [("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2)])
def test_equal_stages_wait_as_long_as_the_bubble_says(schedule: str, groups: int) -> None:
    stages, count = 4, 8
    placed = schedule_passes(schedule, [EQUAL] * stages, groups, count)
    # arXiv 2104.04473, section 2.2.
    assert max(end for each in placed for *_, end in each) == pytest.approx(3 * (count + (stages - 1) / groups))


@pytest.mark.parametrize("virtual", [1, 2])
def test_passes_are_in_the_order_in_which_the_engine_executes_them(virtual: int) -> None:
    asked = build_experiment({"pipeline_model_parallel_size": 2}, {"global_batch_size": 8, "device": "cuda"})
    asked.trainer.backend_args["num_virtual_stages_per_pipeline_rank"] = virtual
    records = [execute(asked, rank, 4) for rank in (0, 2)]
    machine = LayoutMachine(name="MI300X", nnodes=1, devices_per_node=4, device_bytes=None, model="mi300x")
    speed = predict_layout(asked.trainer, machine, records, price=2.0)
    for timeline in speed.timelines:
        assert len(timeline.passes) == 2 * virtual * 4 + 1
        assert all(each.operator is not None for each in timeline.passes)
    assert speed.prediction is not None and speed.prediction.cost_per_billion_tokens
    report = LayoutReport(
        experiment="tiny",
        framework="native",
        machine="MI300X",
        nnodes=1,
        world_size=4,
        device_bytes=None,
        records=tuple(records),
        fit=(),
        fits=True,
        seconds=1.0,
        speed=speed,
    )
    page = format_layout_page(report)
    assert page.count("Memory in the same seconds") == 2 * 2  # each wide and narrow


def test_a_machine_whose_rates_are_not_known_has_no_predicted_time() -> None:
    machine = LayoutMachine(name="CPU", nnodes=1, devices_per_node=1, device_bytes=None, model="cpu")
    assert predict_layout(build_experiment({}).trainer, machine, ()).problem
