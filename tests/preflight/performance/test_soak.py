"""Results of a soak are judged: who computes otherwise, who slows down, and whose card is held down."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from primus.machine.facts import Device, MachineFacts, Partition
from primus.machine.measurements import (
    BurnIn,
    LoadWindow,
    MeasuredFigure,
    MeasurementPlan,
    MeasurementResults,
    RankResult,
    ReferenceTraining,
    Telemetry,
)
from primus.machine.profile import Floor
from primus.preflight.findings.finding import CheckFinding
from primus.preflight.performance import judge as performance
from primus.preflight.performance import soak
from primus.preflight.performance.baselines import Demands

FACTS = MachineFacts(
    devices=tuple(Device(index=i, vendor="amd", model="MI300X", partitions=(Partition(index=i),)) for i in range(4))
)


def burned(rates: tuple[float, ...] = (600.0,) * 20, key: str = "MI300X", digest: str = "d", **more: Any) -> BurnIn:
    """A burn-in with a window each 10 s."""
    windows = tuple(LoadWindow(begin_s=10.0 * i, tflops=rate) for i, rate in enumerate(rates))
    return BurnIn(key=key, digest=digest, duration_s=10.0 * len(rates), products=1000, windows=windows, **more)


def telemetry(card: int, **more: Any) -> Telemetry:
    values = {"clock_min_mhz": 1290.0, "clock_mean_mhz": 1300.0, "power_mean_w": 740.0, "power_max_w": 750.0}
    return Telemetry(gpu=card, num_samples=40, **(values | {"temperature_max_c": 80.0, "new_uncorrectable": 0} | more))


def trainings(*digests: str, key: str = "MI300X", loss: float | None = 6.0) -> tuple[ReferenceTraining, ...]:
    return tuple(ReferenceTraining(key=key, digest=digest, last_loss=loss) for digest in digests)


def healthy(**changes: dict[int, Any]) -> list[RankResult]:
    """Two nodes of four devices; `changes` are fields by rank."""
    ranks = []
    for number in range(8):
        node, local = divmod(number, 4)
        fields: dict[str, Any] = {
            "burn_in": burned(),
            "trainings": trainings("a", "a"),
            "telemetry": tuple(telemetry(card) for card in range(4)) if local == 0 else (),
            "figures": (MeasuredFigure(test="host_triad", value=100.0, unit="GB/s"),),
        }
        fields |= {name: by_rank[number] for name, by_rank in changes.items() if number in by_rank}
        ranks.append(
            RankResult(
                rank=number, local_rank=local, node=node, host=f"node{node}", device=f"cuda:{local}",
                device_name="MI300X", **fields,
            )
        )  # fmt: skip
    return ranks


def bad(ranks: list[RankResult], demands: Demands | None = None) -> dict[tuple[str, str, str], str]:
    """Status by check, host and subject of what is neither ok nor info."""
    return {
        (one.check.removeprefix("performance."), one.host, one.subject): one.status
        for one in findings(ranks, demands)
        if one.status not in ("ok", "info")
    }


def findings(ranks: list[RankResult], demands: Demands | None = None) -> list[CheckFinding]:
    asked = MeasurementPlan(
        tests=("host_memory", "quickstart", "burn_in"), sizes_bytes=(8,), pair_bytes=8, gemm_size=8192, dtype="bf16"
    )
    results = MeasurementResults(asked=asked, world_size=len(ranks), ranks=tuple(ranks))
    return performance.judge_results(results, FACTS, demands or Demands())


def test_healthy_nodes_have_one_finding_for_each_test() -> None:
    found = findings(healthy())
    assert {one.status for one in found} <= {"ok", "info"}
    endured = [one for one in found if one.check == "performance.burn_in"]
    assert [one.host for one in endured] == ["node0", "node1"]
    assert endured[0].measured.startswith("4 devices, 3:20")


FAULTS: dict[str, tuple[dict[str, dict[int, Any]], dict[tuple[str, str, str], str]]] = {
    "one bit of one product": (
        {"burn_in": {5: burned(wrong_words=1, first_wrong_s=70.0)}}, {("burn_in", "node1", "rank 5 (GPU 1)"): "fail"},
    ),
    "memory": (
        {"burn_in": {2: burned(wrong_memory=3, first_wrong_s=10.0)}},
        {("burn_in_memory", "node0", "rank 2 (GPU 2)"): "fail"},
    ),
    "wrong from the first product on": (
        {"burn_in": {6: burned(digest="x")}}, {("burn_in_compared", "node1", "rank 6 (GPU 2)"): "fail"},
    ),
    "slower with time": (
        {"burn_in": {4: burned((600.0,) * 8 + (550.0,) * 12)}},
        {("burn_in_slowdown", "node1", "rank 4 (GPU 0)"): "fail", ("burn_in_speed", "node1", "rank 4 (GPU 0)"): "fail"},
    ),
    "slow all the time": (
        {"burn_in": {7: burned((540.0,) * 20)}}, {("burn_in_speed", "node1", "rank 7 (GPU 3)"): "fail"},
    ),
    "never ended": ({"burn_in": {3: None}}, {("burn_in", "node0", "rank 3 (GPU 3)"): "unknown"}),
    "an error of the driver": (
        {"burn_in": {3: None}, "figures": {3: (
            MeasuredFigure(test="host_triad", value=100.0),
            MeasuredFigure(test="burn_in", problem="HIP error: launch failure"),
        )}},
        {("burn_in", "node0", "rank 3 (GPU 3)"): "fail"},
    ),
    "throttled by heat": (
        {"telemetry": {4: (telemetry(0), telemetry(1, throttled={"hw_thermal_slowdown": 9}), telemetry(2))}},
        {("telemetry", "node1", "GPU 1"): "fail"},
    ),
    "a lower clock": (
        {"telemetry": {0: (telemetry(0), telemetry(1), telemetry(2), telemetry(3, clock_mean_mhz=1100.0))}},
        {("telemetry", "node0", "GPU 3"): "warn"},
    ),
    "new uncorrectable errors": (
        {"telemetry": {0: (telemetry(0, new_uncorrectable=1),)}}, {("telemetry", "node0", "GPU 0"): "fail"},
    ),
    "another result of the training": (
        {"trainings": {1: trainings("b", "b")}}, {("quickstart", "node0", "rank 1 (GPU 1)"): "fail"},
    ),
    "a training that does not repeat itself": (
        {"trainings": {1: trainings("a", "c")}}, {("quickstart", "node0", "rank 1 (GPU 1)"): "fail"},
    ),
    "a loss that is not finite": (
        {"trainings": {1: trainings("a", "a", loss=None)}}, {("quickstart", "node0", "rank 1 (GPU 1)"): "fail"},
    ),
    "no training": ({"trainings": {1: ()}}, {("quickstart", "node0", "rank 1 (GPU 1)"): "unknown"}),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_names_the_device_and_no_other(fault: str) -> None:
    changes, expected = FAULTS[fault]
    assert bad(healthy(**changes)) == expected


def test_a_throttle_by_the_power_cap_belongs_to_a_full_load() -> None:
    cards = tuple(telemetry(card, throttled={"ppt": 40, "sw_power_cap": 40}) for card in range(4))
    assert bad(healthy(telemetry={0: cards})) == {}


def test_devices_of_different_models_need_not_agree() -> None:
    others = {rank: burned(key="MI325X", digest="e") for rank in range(4, 8)}
    assert bad(healthy(burn_in=others)) == {}


def test_two_devices_that_disagree_are_both_named() -> None:
    assert set(soak.find_minority({0: ("k", "a"), 1: ("k", "b")})) == {0, 1}
    assert set(soak.find_minority({0: ("k", "a"), 1: ("k", "b"), 2: ("k", "a")})) == {1}


def test_where_no_device_repeats_itself_the_library_is_suspected() -> None:
    unsteady = {rank: burned(wrong_words=10, first_wrong_s=1.0) for rank in range(8)}
    restless = {rank: trainings("a", f"{rank}") for rank in range(8)}
    assert set(bad(healthy(burn_in=unsteady, trainings=restless)).values()) == {"unknown"}


def test_a_host_with_slow_memory_is_named() -> None:
    ranks = healthy()
    triad = MeasuredFigure(test="host_triad", value=60.0, unit="GB/s")
    third = [structs.replace(rank, rank=rank.rank + 8, node=2, host="node2") for rank in ranks[:4]]
    slow = [structs.replace(rank, figures=(triad,)) for rank in third]
    assert bad([*ranks, *slow]) == {("host_memory", "node2", ""): "warn"}
    floor = Demands(host_gb_per_s_min=Floor(value=300.0, unit="GB/s", source="half of the peak"))
    assert bad([*ranks[:4], *slow], floor) == {("host_memory", "node2", ""): "warn"}
    assert bad(ranks, floor) == {}


def test_the_beginning_is_compared_with_the_end_without_the_warm_up() -> None:
    assert soak.split_windows(burned((100.0, *(600.0,) * 10, *(500.0,) * 10))) == (600.0, 500.0)
    assert soak.split_windows(burned((600.0,))) == (600.0, 600.0)
