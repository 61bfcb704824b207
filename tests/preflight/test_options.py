"""Options of preflight become the plan of its measurements."""

from __future__ import annotations

from typing import Any

import pytest

from primus.errors import UsageError
from primus.machine.facts import MachineFacts
from primus.machine.measurements import MeasurementPlan
from primus.preflight.options import Options, build_measurement_plan
from primus.task import TaskContext

MIB = 1 << 20


def plan(**options: Any) -> MeasurementPlan:
    return build_measurement_plan(Options(**options), TaskContext(environ={}), MachineFacts())


def test_sizes_are_in_order_and_groups_are_without_all() -> None:
    found = plan(
        comm_sizes_mb="64,0.5,1,64", ring_p2p_sizes_mb="2", intra_group_sizes="4, 2,all", inter_group_sizes="3"
    )
    assert found.sizes_bytes == (MIB // 2, MIB, 64 * MIB) and found.ring_sizes_bytes == (2 * MIB,)
    assert (found.intra_group_sizes, found.inter_group_sizes) == ((2, 4), (3,))
    usual = plan()
    assert usual.sizes_bytes and usual.ring_sizes_bytes == usual.intra_group_sizes == usual.inter_group_sizes == ()


def test_the_shorter_time_limit_counts_and_minutes_are_those_of_the_burn_in() -> None:
    assert plan(time_limit=90.0, per_gpu_timeout_sec=30.0).timeout_s == 30.0
    assert plan(time_limit=20.0, per_gpu_timeout_sec=30.0).timeout_s == plan(time_limit=20.0).timeout_s == 20.0
    assert plan(minutes=5.0).burn_in_s == 300.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"intra_group_sizes": "1"}, "--intra-group-sizes 1: numbers from 2"),
        ({"inter_group_sizes": "2,x"}, "--inter-group-sizes 2,x: numbers from 2"),
        ({"comm_sizes_mb": "1,0"}, "--comm-sizes-mb 1,0: sizes in MiB"),
        ({"ring_p2p_sizes_mb": "-1"}, "--ring-p2p-sizes-mb -1: sizes in MiB"),
    ],
)
def test_a_size_that_cannot_be_is_refused_by_its_option(options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(**options)
