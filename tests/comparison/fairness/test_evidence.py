"""Evidence from results of logs and of others, published results, and how cells are told apart."""

from __future__ import annotations

import datetime

import pytest
from msgspec import structs
from tests.comparison.fair_results import change_settings, make_result

from primus.comparison.fairness.evidence import collect_evidence
from primus.comparison.folder.archive import LoadedResults
from primus.comparison.report.cell_results import group_cells
from primus.comparison.report.comparison_report import ReportOptions, build_comparison_report
from primus.comparison.report.page import draw_comparison_pictures
from primus.comparison.report.published_results import PublishedLayout, PublishedResult, read_published_results
from primus.comparison.results.result import ComparisonResult, ResultCell, ResultDevice, ResultSteps, ResultTraining
from primus.comparison.speed.efficiency import DevicePrice, estimate_utilization, find_price
from primus.config.extended_files import load_model
from primus.models.counts import detect_convention


def read_log(**steps: list[float | None]) -> ComparisonResult:
    return ComparisonResult(
        platform="nvd",
        source="log",
        gpu_info=ResultDevice(device_count=8, device_name="NVIDIA H100 80GB HBM3"),
        training_config=ResultTraining(global_batch_size=128, sequence_length=8192),
        cell=ResultCell(platform="nvidia", framework="megatron-bridge", model="llama3_8B"),
        settings={"lr": "3.0e-4", "bf16": "True", "recompute_granularity": "None", "data_path": "7"},
        steps=ResultSteps(number=[1, 2], tokens=[128 * 8192.0] * 2, **steps),
    )


def test_values_of_logs_are_read_from_text_and_flops_from_reported_rates() -> None:
    time_s = 128 * 8192 / (14451 * 8)
    log = read_log(time_s=[time_s, time_s], tflops_per_device=[744.0, 744.0], learning_rate=[1e-6, 2e-6])
    found = collect_evidence(log, "a")
    assert (found.settings["lr"], found.settings["precision"], found.settings["recompute"]) == (3e-4, "bf16", "none")
    assert found.gflop_per_token == pytest.approx(51.48, abs=0.01)
    assert found.flops_convention == "causal"
    assert found.learning_rates == {2: 1e-6, 3: 2e-6}
    assert (found.tokens, found.weights, found.precision, found.timer) == ({}, None, None, None)


@pytest.mark.parametrize(
    ("model", "tflops", "rate", "convention"),
    [
        ("llama3_8B", 744, 14451, "causal"),  # Megatron-Bridge 25.11
        ("llama3.1_8B", 615.5, 11941.8, "causal"),  # Primus, with a padded vocabulary
        ("llama3.1_8B", 323.92, 5593, "full"),  # torchtitan
        ("llama3_8B", 711, 12273, "full"),  # NeMo 24.12
        ("llama3_8B", 744, 10000, None),
    ],
)
def test_the_convention_of_published_rates_is_recognized(
    model: str, tflops: float, rate: float, convention: str | None
) -> None:
    assert detect_convention(load_model(model), 8192, tflops * 1e12 / rate) == convention


COUNTED_OTHERWISE = ("gpt_oss", "zebra_llama", "deepseek_v4")
"""Models whose FLOPs their sources count in another way: 0.8, 1.9 and 0.97 times ours."""


def place_published(each: PublishedResult) -> ComparisonResult:
    return ComparisonResult(
        platform="nvd",
        gpu_info=ResultDevice(device_name=each.device),
        training_config=ResultTraining(sequence_length=each.seq_length or 8192),
        cell=ResultCell(model=each.model),
        precision=each.precision,
    )


@pytest.mark.parametrize("each", read_published_results(), ids=lambda each: f"{each.label} {each.model}")
def test_no_published_result_that_is_shipped_is_above_the_peak_of_its_device(each: PublishedResult) -> None:
    found = estimate_utilization(place_published(each), each.tokens_per_s_per_device)
    lowest = 0.1 if load_model(each.model).num_experts is None else 0.03
    assert found.causal is not None and lowest < found.causal < 0.75
    assert not found.problem and not found.doubt
    if each.tflops_per_device and not each.model.startswith(COUNTED_OTHERWISE):  # a digit that is wrong shows here
        rounding = 0 if each.tokens_per_s_per_device % 16 else 0.02  # some releases round to "26.5 K", 27136
        shares = [share * found.peak_tflops for share in (found.causal, found.full) if share and found.peak_tflops]
        assert min(abs(share / each.tflops_per_device - 1) for share in shares) < 0.005 + rounding


def test_a_layout_names_what_is_divided() -> None:
    assert str(PublishedLayout(tensor=4, pipeline=8, virtual=5)) == "tensor 4, pipeline 8, virtual 5"
    assert str(PublishedLayout(context=2, is_sharded=True)) == "context 2, sharded"


def test_a_published_layout_divides_its_devices() -> None:
    laid_out = [each for each in read_published_results() if each.layout and each.devices]
    assert len(laid_out) > 40
    for each in laid_out:
        layout, batch = each.layout, each.global_batch_size
        assert layout and each.devices and batch and each.micro_batch_size
        ranks = each.devices // layout.pipeline
        assert ranks % (layout.tensor * layout.context) == 0 == ranks % layout.expert, each.label
        assert batch % (each.micro_batch_size * ranks // (layout.tensor * layout.context)) == 0, each.label


def test_shipped_results_cover_both_vendors_sizes_experts_and_times_to_train() -> None:
    rows = read_published_results()
    assert {"MI300X", "MI325X", "MI350X", "MI355X", "H100", "H200", "B200", "B300", "GB200", "GB300"} == {
        each.device for each in rows
    }
    assert not any(each.precision == "not stated" for each in rows)
    assert {each.device for each in rows if "70B" in each.model and each.framework == "megatron-bridge"} >= {"H100"}
    assert {each.device for each in rows if load_model(each.model).num_experts} >= {"MI355X", "H100", "GB300"}
    trained = [each for each in rows if each.framework == "mlperf"]
    assert trained and all(each.minutes_to_train for each in trained)
    assert len({tuple(structs.asdict(each).items()) for each in rows}) == len(rows)


@pytest.mark.parametrize(
    ("precision", "peak"), [("fp8 hybrid", 5000), ("mxfp8", 5000), ("nvfp4", 10000), ("bf16", 2500)]
)
def test_the_peak_is_that_of_the_width_of_the_format(precision: str, peak: float) -> None:
    each = PublishedResult(
        device="GB200", framework="x", model="llama3_8B", tokens_per_s_per_device=30000, precision=precision, source="S"
    )
    assert estimate_utilization(place_published(each), 30000).peak_tflops == peak


def test_doubtful_and_impossible_speeds_are_told_apart_without_a_known_shape() -> None:
    base = read_log(time_s=[1.0, 1.0])
    unknown = structs.replace(base, cell=ResultCell(model="mine"), precision="bfloat16")
    unknown = structs.replace(unknown, model_info=structs.replace(unknown.model_info, total_params=8_000_000_000))
    for rate, problem, doubt in ((10_000, False, False), (17_000, False, True), (21_000, True, False)):
        found = estimate_utilization(unknown, rate)
        assert (bool(found.problem), bool(found.doubt)) == (problem, doubt)
    nameless = structs.replace(unknown, gpu_info=ResultDevice(device_name="Some CPU"))
    assert estimate_utilization(nameless, 1e9).problem == ""


def test_cells_come_from_the_results_and_pairs_share_model_and_class() -> None:
    def place(framework: str, model: str, settings_class: str) -> ComparisonResult:
        cell = ResultCell(platform="cpu", framework=framework, model=model, settings_class=settings_class)
        return structs.replace(make_result(framework), cell=cell)

    results = [place("native", "a", "identical"), place("jax", "a", "identical"), place("jax", "a", "tuned"),
               place("jax", "b", "identical"), place("native", "a", "identical")]  # fmt: skip
    failed = structs.replace(results[0], state="failed", reason="out of memory", gpu_info=ResultDevice())
    files = ["train_amd_nemo_qwen.json", *(f"{number}.json" for number in range(5))]
    cells = group_cells(LoadedResults(results=[*results, failed], files=files, skipped=[]))
    assert list(cells) == ["native a", "jax a (identical)", "jax a (tuned)", "jax b"]
    assert (len(cells["native a"].runs), len(cells["native a"].failed)) == (1, 1)
    report = build_comparison_report(cells, [], ReportOptions())
    assert [(pair.a, pair.b) for pair in report.pairs] == [("native a", "jax a (identical)")]
    assert "failed: out of memory" in report.cells[0].problems


def test_other_numbers_of_devices_are_other_cells_and_drawn_as_scaling() -> None:
    more = ResultDevice(device_count=4, device_name="Test CPU")
    results = [make_result(), structs.replace(make_result(step_s=0.06), gpu_info=more)]
    cells = group_cells(LoadedResults(results=results, files=["a", "b"], skipped=[]))
    assert list(cells) == ["cpu native tiny on 2 x Test CPU", "cpu native tiny on 4 x Test CPU"]
    report = build_comparison_report(cells, [], ReportOptions())
    assert report.pairs[0].verdict.list_reasons()[0].startswith("setting world_size")
    pictures = dict(draw_comparison_pictures(report, cells))
    wide, _, narrow = pictures["scaling"].partition("</svg>")
    assert wide.count('class="mark') == 2 and narrow.count('class="mark') == 4, "with those of the legend"


def test_speeds_are_compared_by_token_also_where_only_the_batch_size_is_stated() -> None:
    bare = structs.replace(make_result("jax"), steps=structs.replace(make_result("jax").steps, tokens=[]))
    unknown = structs.replace(bare, training_config=ResultTraining())
    for other, has_ratio in ((bare, True), (unknown, False)):
        cells = group_cells(LoadedResults(results=[make_result(), other], files=["a", "b"], skipped=[]))
        pair = build_comparison_report(cells, [], ReportOptions(allow_unfair=True)).pairs[0]
        assert (pair.ratio is not None) == has_ratio
        if pair.ratio is not None:
            assert 0.9 < pair.ratio.value < 1.1
        else:
            assert "unknown batch size" in pair.refusal


def test_runs_of_one_name_and_other_settings_are_cells_of_their_own() -> None:
    """Another version of a matrix, or logs of several runs: their steps must not be pooled."""
    runs = [make_result(seed=seed) for seed in range(2)]
    runs += [change_settings(make_result(seed=seed), global_batch_size=16, seed=seed) for seed in range(2)]
    failed = structs.replace(runs[0], state="failed", steps=ResultSteps())
    loaded = LoadedResults(results=[*runs, failed, make_result("jax")], files=["a.json"] * 6, skipped=[])
    cells = group_cells(loaded)
    assert {label: len(cell.runs) for label, cell in cells.items()} == {
        "native, global_batch_size 8": 2, "native, global_batch_size 16": 2, "jax": 1,
    }  # fmt: skip
    other = structs.replace(runs[0], inputs=structs.replace(runs[0].inputs, tokens=["0" * 16] * 60))
    found = group_cells(LoadedResults(results=[runs[0], other], files=["a.json"] * 2, skipped=[]))
    assert list(found) == ["cpu native tiny, tokens 00000001", "cpu native tiny, tokens 000000000000"], "other data"
    report = build_comparison_report(cells, [], ReportOptions())
    status = {(pair.a, pair.b): pair.verdict.status for pair in report.pairs}
    assert [status["native, global_batch_size 8", "jax"], status["native, global_batch_size 16", "jax"]] == [
        "fair", "unfair",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA GB200", None),
        ("NVIDIA B200", "B200"),
        ("AMD Instinct MI300A", None),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM"),
        ("AMD EPYC 9654 96-Core Processor", "amd epyc 9654 96-core processor"),
        ("AMD EPYC 9654P 96-Core Processor", None),
    ],
)
def test_a_price_is_that_of_exactly_its_model(device: str, expected: str | None) -> None:
    names = ("H20", "H200", "B200", "MI300X", "NVIDIA H100 SXM", "amd epyc 9654 96-core processor", "9654")
    prices = [
        DevicePrice(device=name, per_device_hour=1.0, currency="EUR", source="a list", date=datetime.date(2026, 1, 31))
        for name in names
    ]
    found = find_price(prices, device)
    assert (found.device if found else None) == expected
