"""Measured performance is judged: by floors, peaks, the other devices, and who is slow with whom."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from primus.errors import UsageError
from primus.machine import measurements
from primus.machine.facts import Device, MachineFacts, Partition, RdmaDevice, RdmaPort
from primus.machine.measurements import (
    Collective,
    MeasuredFigure,
    MeasurementPlan,
    MeasurementResults,
    Pair,
    RankMeasurements,
    RankResult,
    WrongElements,
)
from primus.machine.profile import Floor, Profile
from primus.preflight.findings.finding import CheckFinding, find_worst_status
from primus.preflight.performance.baselines import Demands, PerformanceBaseline
from primus.preflight.performance.judge import PerformanceJudge, complete_demands, plan_measurements, read_results
from primus.runs.files import write_json

ACC = "AMD Instinct acceptance documentation"
MI300X = Profile(
    model="MI300X",
    vendor="amd",
    architecture="gfx942",
    source="AMD data sheet",
    memory_gb_per_s=5300.0,
    last_level_cache_bytes=256 * 2**20,
    peaks={"bf16": 1307.4},
    achieved={"bf16": 668.4},
    floors={
        "gemm_bf16": Floor(value=530.0, unit="TFLOP/s", source="ROCm/ROCmValidationSuite"),
        "memory_copy": Floor(value=4177.285, unit="GB/s", source=ACC),
        "all_reduce": Floor(value=304.0, unit="GB/s", source=ACC),
    },
)
GEMM, COPY = "gemm_bf16", "memory_copy"


def machine(cards: int = 8, partitions: int = 1) -> MachineFacts:
    return MachineFacts(
        devices=tuple(
            Device(
                index=card,
                vendor="amd",
                model="MI300X",
                partitions=tuple(Partition(index=card * partitions + part) for part in range(partitions)),
            )
            for card in range(cards)
        )
    )


def results(
    nodes: int = 1,
    devices: int = 8,
    gemm: dict[int, float | None] | None = None,
    copy: float = 4400.0,
    tests: tuple[str, ...] = ("gemm", "memory"),
    device: str = "cuda",
    **fields: Any,
) -> MeasurementResults:
    """Healthy results, with other figures of the matrix product by rank."""
    ranks = []
    for rank in range(nodes * devices):
        tflops = (gemm or {}).get(rank, 600.0)
        figures = [
            MeasuredFigure(test=GEMM, value=tflops, unit="TFLOP/s", problem="" if tflops else "HIP error: no memory")
        ]
        figures += [
            MeasuredFigure(test=f"memory_{kernel}", value=copy, unit="GB/s")
            for kernel in "copy mul add triad dot".split()
        ]
        node, local = divmod(rank, devices)
        ranks.append(
            RankResult(
                rank=rank,
                local_rank=local,
                node=node,
                host=f"node{node}.cluster",
                device=f"cuda:{local}" if device == "cuda" else "cpu",
                device_name=device,
                figures=tuple(figures),
            )
        )
    asked = MeasurementPlan(tests=tests, sizes_bytes=(64 * 2**20,), pair_bytes=2**20, gemm_size=8192)
    return MeasurementResults(asked=asked, world_size=len(ranks), ranks=tuple(ranks), **fields)


def judged(
    found: MeasurementResults, demands: Demands | None = None, facts: MachineFacts | None = None
) -> list[CheckFinding]:
    facts = machine() if facts is None else facts
    return list(
        PerformanceJudge(
            PerformanceBaseline(found, facts, MI300X if facts.devices else None, demands or Demands())
        ).judge_all()
    )


def of(findings: list[CheckFinding], check: str) -> list[CheckFinding]:
    return [finding for finding in findings if finding.check == f"performance.{check}"]


def test_healthy_devices_are_one_finding_for_each_node() -> None:
    found = of(judged(results(nodes=2)), GEMM)
    assert [(one.status, one.host) for one in found] == [("ok", "node0"), ("ok", "node1")]
    assert found[0].measured == "600 TFLOP/s (600 - 600, 8 devices), 46% of peak, 90% of the best measured"
    assert found[0].expected == "at least 530 TFLOP/s"


def test_a_device_below_its_floor_fails_and_is_named() -> None:
    bad = of(judged(results(nodes=2, gemm={11: 500.0})), GEMM)
    named = [one for one in bad if one.status == "fail"]
    assert [(one.subject, one.host, one.measured) for one in named] == [("rank 11 (GPU 3)", "node1", "500 TFLOP/s")]
    assert "ROCmValidationSuite" in named[0].reason
    assert named[0].advice


def test_a_device_five_per_cent_below_the_median_of_all_nodes_is_named() -> None:
    found = [one for one in of(judged(results(nodes=2, gemm={3: 565.0})), GEMM) if one.subject]
    assert [(one.subject, one.host, one.status) for one in found] == [("rank 3 (GPU 3)", "node0", "fail")]
    assert "6% below the median of 16 devices" in found[0].measured


def test_a_device_four_per_cent_below_is_well() -> None:
    assert not [one for one in of(judged(results(gemm={3: 576.0})), GEMM) if one.status != "ok"]


@pytest.mark.parametrize(("gemm", "copy", "check"), [({2: 1500.0}, 4400.0, GEMM), ({}, 5525.433, COPY)])
def test_a_figure_above_the_peak_is_not_believed(gemm: dict[int, float | None], copy: float, check: str) -> None:
    # AMD-AGI/Primus-SaFE ships the copy rate as a floor, above the 5.3 TB/s of MI300X.
    found = [one for one in of(judged(results(gemm=gemm, copy=copy)), check) if one.subject]
    assert {one.status for one in found} == {"unknown"}
    assert "wrong clock or wrong FLOP convention" in found[0].reason


def test_a_device_that_could_not_be_measured_fails_with_its_error() -> None:
    found = [one for one in of(judged(results(gemm={5: None})), GEMM) if one.subject]
    assert [(one.status, one.measured) for one in found] == [("fail", "HIP error: no memory")]


def test_wrong_elements_fail_however_fast() -> None:
    healthy = results()
    spoilt = structs.replace(healthy.ranks[0].figures[0], wrong=3, problem="3 elements differ")
    rank = structs.replace(healthy.ranks[0], figures=(spoilt, *healthy.ranks[0].figures[1:]))
    found = of(judged(structs.replace(healthy, ranks=(rank, *healthy.ranks[1:]))), GEMM)
    assert [(one.status, one.measured) for one in found if one.subject] == [("fail", "3 elements differ")]


def test_all_failed_is_not_counted_healthy() -> None:
    found = of(judged(results(gemm=dict.fromkeys(range(8)))), GEMM)
    assert [one.status for one in found] == ["fail"] * 8


def test_a_test_that_did_not_run_is_unknown() -> None:
    found = judged(results(tests=("gemm", "memory", "copies", "collectives", "pairs")))
    for check in ("host_to_device", "device_to_host", "collectives", "pairs"):
        assert {one.status for one in of(found, check)} == {"unknown"}, check


def test_ranks_that_never_spoke_fail() -> None:
    asked = MeasurementPlan(sizes_bytes=(8,), pair_bytes=8, gemm_size=8)
    found = judged(MeasurementResults(asked=asked, world_size=8, problem="no results of rank 0, 1"))
    assert of(found, "complete")[0].status == "fail"
    assert find_worst_status(found) == "fail"


def test_partitions_of_a_card_share_its_figures() -> None:
    quarter = results(devices=4, gemm=dict.fromkeys(range(4), 140.0), copy=1100.0)
    found = judged(quarter, facts=machine(cards=1, partitions=4))
    assert {one.status for one in of(found, GEMM) + of(found, COPY)} == {"ok"}
    assert of(found, GEMM)[0].expected == "at least 132.5 TFLOP/s"


def test_figures_of_a_cpu_are_told_and_not_judged() -> None:
    found = judged(results(devices=2, device="cpu", gemm={0: 0.1, 1: 0.02}, copy=9.0), facts=MachineFacts())
    assert {one.status for one in of(found, GEMM) + of(found, COPY)} == {"info"}
    assert "no floor" in of(found, GEMM)[0].reason


def test_what_the_user_demands_wins_over_the_profile() -> None:
    lax = Demands(gemm_tflops_min=400.0)
    assert {one.status for one in of(judged(results(gemm=dict.fromkeys(range(8), 450.0)), lax), GEMM)} == {"ok"}
    strict = Demands(hbm_gbs_min=4500.0)
    assert {one.status for one in of(judged(results(), strict), COPY)} == {"fail"}
    by_file = Demands(floors={GEMM: 610.0})
    assert {one.expected for one in of(judged(results(), by_file), GEMM)} == {"at least 610 TFLOP/s"}


def test_the_variables_of_the_existing_system_are_honoured(tmp_path: Path) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path)}  # without results of benchmarks
    environ = {"PRIMUS_PREFLIGHT_MIN_TFLOPS": "10", "PRIMUS_PREFLIGHT_MIN_FREE_MEM_GB": "2.5", **state}
    assert complete_demands(environ, Demands()) == Demands(gemm_tflops_min=10.0, free_memory_gb_min=2.5)
    assert complete_demands(environ, Demands(gemm_tflops_min=600.0)).gemm_tflops_min == 600.0
    assert complete_demands(state, Demands()) == Demands()


@pytest.mark.parametrize("text", ["ten", "-1", "nan", "inf"])
def test_a_variable_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="PRIMUS_PREFLIGHT_MIN_TFLOPS"):
        complete_demands({"PRIMUS_PREFLIGHT_MIN_TFLOPS": text}, Demands())


def collective(busbw: float | None, size: int = 64 * 2**20, n: int = 8, **fields: Any) -> Collective:
    operation = fields.pop("operation", "all_reduce")
    return Collective(
        operation=operation,
        scope="node",
        ranks=tuple(range(n)),
        size_bytes=size,
        time_s=1e-3 if busbw else None,
        busbw_gb_per_s=busbw,
        **fields,
    )


def communicated(*collectives: Collective, **fields: Any) -> MeasurementResults:
    return results(tests=("collectives",), collectives=collectives, **fields)


def test_the_bus_bandwidth_of_eight_devices_is_held_against_the_floor() -> None:
    low, high = (communicated(collective(value, 8 * 2**30)) for value in (290.0, 312.9))
    assert of(judged(low), "all_reduce")[0].status == "fail"
    assert of(judged(high), "all_reduce")[0].status == "ok"
    two = communicated(collective(47.7, 8 * 2**30, n=2))
    assert of(judged(two), "all_reduce")[0].status == "info"


@pytest.mark.parametrize(
    ("operation", "gib", "busbw", "status"),
    [
        ("all_reduce", 16, 303.0, "fail"),
        ("all_reduce", 1, 280.0, "ok"),
        ("all_reduce", 1, 270.0, "fail"),  # below 90 % of the floor of 304 at 8 GiB
        ("all_gather", 4, 270.0, "fail"),
        ("reduce_scatter", 16, 280.0, "ok"),
        ("all_to_all", 8, 40.0, "info"),
    ],
)
def test_large_collectives_of_a_node_are_held_against_the_floor_of_its_type(
    operation: str, gib: int, busbw: float, status: str
) -> None:
    found = communicated(collective(busbw, gib * 2**30, operation=operation))
    assert of(judged(found), operation)[0].status == status


@pytest.mark.parametrize(
    ("rate", "busbw", "status"), [(400, 230.0, "fail"), (400, 300.0, "ok"), (200, 230.0, "ok"), (200, 120.0, "fail")]
)
def test_collectives_between_nodes_are_held_against_what_their_adapters_can_do(
    rate: float, busbw: float, status: str
) -> None:
    port = RdmaPort(state="ACTIVE", physical_state="LinkUp", rate_gbps=rate)
    facts = structs.replace(machine(), rdma=tuple(RdmaDevice(name=f"mlx5_{i}", ports=(port,)) for i in range(8)))
    between = structs.replace(collective(busbw, 8 * 2**30, n=16), scope="all")
    found = of(judged(communicated(between, nodes=2), facts=facts), "all_reduce_between_nodes")
    assert [one.status for one in found] == [status]


def test_collectives_over_sockets_have_no_floor() -> None:
    between = structs.replace(collective(2.0, 8 * 2**30, n=16), scope="all")
    found = of(judged(communicated(between, nodes=2)), "all_reduce_between_nodes")
    assert [one.status for one in found] == ["info"]


def test_a_demanded_bandwidth_counts_at_its_size() -> None:
    found = communicated(collective(90.0, 64 * 2**20 - 4, n=2))
    assert of(judged(found, Demands(rccl_gbs_min=100.0)), "all_reduce")[0].status == "fail"
    assert of(judged(found, Demands(rccl_gbs_min=100.0, rccl_size_mb=128)), "all_reduce")[0].status == "info"


def test_a_single_rank_is_said_and_has_no_bandwidth() -> None:
    found = of(judged(communicated(collective(None, n=1, problem="single rank"), devices=1)), "collectives")
    assert [(one.status, one.measured) for one in found] == [("info", "single rank")]


def test_what_the_library_does_not_offer_is_unknown() -> None:
    found = communicated(collective(None, operation="reduce_scatter", problem="not offered by gloo"))
    assert [(one.status, one.measured) for one in of(judged(found), "reduce_scatter")] == [
        ("unknown", "not offered by gloo")
    ]


def test_wrong_elements_from_one_source_name_it() -> None:
    wrong = tuple(WrongElements(rank=rank, source=5, count=7) for rank in range(8) if rank != 5)
    found = of(judged(communicated(collective(300.0, operation="all_gather", wrong=wrong))), "all_gather")
    assert (found[0].status, found[0].measured) == ("fail", "49 wrong elements; attributed to: rank 5 on node0")


def test_a_wrong_sum_names_who_received_it() -> None:
    found = of(judged(communicated(collective(300.0, wrong=(WrongElements(rank=2, count=9),)))), "all_reduce")
    assert (found[0].status, found[0].measured) == ("fail", "9 wrong elements received by rank 2 on node0")


def test_a_dip_over_sizes_is_a_warning() -> None:
    sizes = {2**20: 100.0, 2**21: 80.0, 2**22: 200.0}
    found = communicated(*(collective(value, size) for size, value in sizes.items()))
    dips = of(judged(found), "all_reduce_dip")
    assert [(one.status, one.measured) for one in dips] == [("warn", "20% lower at 2.0 MiB than at 1.0 MiB")]


def scanned(bad: int | None, n: int = 8, **spoilt: Any) -> MeasurementResults:
    pairs = tuple(
        Pair(
            first=a, second=b, round=0, between_nodes=False, size_bytes=2**20,
            **({"gb_per_s": 45.0} | (spoilt if bad in (a, b) else {})),
        )
        for a, b in itertools.combinations(range(n), 2)
    )  # fmt: skip
    return results(devices=n, tests=("pairs",), pairs=pairs)


@pytest.mark.parametrize("spoilt", [{"gb_per_s": 20.0}, {"wrong": 4}, {"gb_per_s": None, "problem": "no connection"}])
def test_who_is_slow_or_wrong_with_several_partners_is_named(spoilt: dict[str, Any]) -> None:
    found = of(judged(scanned(3, **spoilt)), "pairs")
    assert [(one.status, one.subject, one.host) for one in found] == [("fail", "rank 3 on node0", "node0")]


def test_a_slow_pair_of_cpus_alarms_nobody_and_a_wrong_one_does() -> None:
    usual = [Pair(first=0, second=b, round=0, between_nodes=False, size_bytes=8, gb_per_s=1.0) for b in (1, 2)]
    slow = Pair(first=1, second=2, round=0, between_nodes=False, size_bytes=8, gb_per_s=0.1)
    wrong = structs.replace(slow, wrong=1)
    for last, status in ((slow, "ok"), (wrong, "fail")):
        found = results(devices=3, device="cpu", tests=("pairs",), pairs=(*usual, last))
        assert [one.status for one in of(judged(found, facts=MachineFacts()), "pairs")] == [status]


def test_healthy_pairs_are_ok() -> None:
    assert [one.status for one in of(judged(scanned(None)), "pairs")] == ["ok"]


def test_pairs_that_are_missing_are_unknown() -> None:
    found = scanned(None)
    some = structs.replace(found, pairs=found.pairs[:20])
    assert {one.status for one in of(judged(some), "pairs")} == {"ok", "unknown"}


@pytest.mark.parametrize("nodes", range(1, 10))
def test_any_number_of_nodes_is_judged_as_a_whole(nodes: int) -> None:
    between = tuple(
        Pair(first=a, second=b, round=0, between_nodes=True, size_bytes=8, gb_per_s=40.0)
        for a, b in itertools.combinations(range(nodes), 2)
    )
    whole = results(nodes=nodes, devices=1, tests=("pairs",), pairs=between)
    expected = {"ok"} if nodes > 1 else set()
    assert {one.status for one in of(judged(whole), "pairs_between_nodes")} == expected


def test_parts_of_ranks_are_read_where_the_gathering_never_happened(tmp_path: Path) -> None:
    whole = results(devices=2)
    write_json(
        tmp_path / measurements.find_measurements_file(1),
        RankMeasurements(rank=structs.replace(whole.ranks[1], problem="all_reduce hung")),
    )
    found = read_results(tmp_path, whole.asked, world_size=2)
    assert found.ranks[0].rank == 1
    assert found.problem == "rank 1: all_reduce hung; no results of rank 0"
    assert of(judged(found), "complete")[0].status == "fail"


def test_what_rank_0_gathered_is_read_as_it_is(tmp_path: Path) -> None:
    whole = results(devices=2)
    write_json(tmp_path / measurements.FILE, whole)
    assert read_results(tmp_path, whole.asked, world_size=2) == whole


def test_groups_of_the_sizes_that_are_asked_run_beside_those_of_all() -> None:
    asked = MeasurementPlan(
        sizes_bytes=(8,), pair_bytes=8, gemm_size=8, intra_group_sizes=(2, 3, 4), inter_group_sizes=(2, 3, 8)
    )
    nodes = [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    assert measurements.list_collective_groups(asked, nodes) == [
        ("node", nodes),
        ("node", [(0, 1), (3, 4), (6, 7)]),
        ("all", [(0, 1, 2, 3, 4, 5)]),
        ("all", [tuple(range(9))]),
    ]
    assert measurements.list_collective_groups(asked, [(0,)]) == [("node", [(0,)])]


def test_a_plan_for_a_cpu_is_small_and_holds_whole_powers() -> None:
    quick, full = (plan_measurements(MachineFacts(), Demands(), is_quick=quick) for quick in (True, False))
    assert max(quick.sizes_bytes) <= 4 * 2**20
    assert quick.gemm_size < full.gemm_size
    assert full.dtype == "fp32"


def test_a_plan_measures_the_size_that_is_demanded() -> None:
    unknown_model = MachineFacts(devices=(Device(index=0, vendor="amd"),))
    for is_quick in (True, False):
        asked = plan_measurements(unknown_model, Demands(rccl_size_mb=96), is_quick=is_quick)
        assert 96 * 2**20 in asked.sizes_bytes


def test_a_plan_measures_what_fits_into_the_memory_of_a_device() -> None:
    small = MachineFacts(
        devices=(Device(index=0, vendor="amd", partitions=(Partition(index=0, memory_bytes=24 * 2**30),)),)
    )
    assert max(plan_measurements(small, Demands(), is_quick=False).sizes_bytes) == 4 * 2**30
