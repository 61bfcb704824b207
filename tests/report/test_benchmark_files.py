"""Results of benchmarks are written in every format, read back, and compared."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

import browser
from primus.benchmark import BenchmarkRank, BenchmarkResult, BenchmarkRow, CaseValue
from primus.errors import UsageError
from primus.machine.measurements import Timing
from primus.report.benchmark_comparison import compare_records, format_comparison
from primus.report.benchmark_files import READABLE, SUFFIXES, find_suffix, read_records, write_result
from primus.report.benchmark_history import find_history_file, keep_result, read_best_figures
from primus.report.benchmark_nccl import format_nccl_table
from primus.report.benchmark_page import draw_pictures, format_page
from primus.report.benchmark_table import find_slow_ranks, format_result_table, list_records


def make_row(size: int, tflops: float, rank: int = 0) -> BenchmarkRow:
    median_s = 2 * size**3 / tflops / 1e12
    times = {"median_s": median_s, "p5_s": median_s, "p95_s": median_s, "min_s": median_s, "max_s": median_s}
    timing = Timing(n=20, mad_s=0.0, interval_s=(median_s * 0.99, median_s * 1.01), **times)
    return BenchmarkRow(
        case={"M": size, "dtype": "bf16", "mode": "steady"},
        rank=rank,
        value=tflops,
        unit="TFLOP/s",
        interval=(tflops / 1.01, tflops / 0.99),
        timing=timing,
        figures={"gb_per_s": 12.5},
        peak=1.0,
        share=tflops,
        bound="compute",
        convention="2MNK / median time",
    )


def make_result(*tflops: float) -> BenchmarkResult:
    rows = tuple(make_row(64 << number, value) for number, value in enumerate(tflops))
    failed = BenchmarkRow(case={"M": 7, "dtype": "fp8", "mode": "steady"}, rank=0, problem="not | offered")
    rank = BenchmarkRank(rank=0, host="n1", device="cpu", device_name="CPU", rows=(*rows, failed), is_complete=True)
    return BenchmarkResult(benchmark="gemm", ranks=(rank,))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_format_holds_every_row(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"r{suffix}"
    write_result(make_result(0.5, 0.25), str(path), format_page)
    data = path.read_bytes()
    text = (gzip.decompress(data) if suffix.endswith(".gz") else data).decode()
    for word in ("64", "128", "bf16", "compute", "0.25", "offered"):
        assert word in text
    assert find_suffix(str(path)) == suffix


def test_a_bar_is_labeled_by_words_then_numbers_that_fit() -> None:
    cases = [{"product": name, "direction": "dgrad", "M": 8, "N": 129280} for name in ("kv_up", "expert_gate_up" * 2)]
    rows = [structs.replace(make_row(64, 0.5), case={**case, "K": size}) for size, case in enumerate(cases, 1)]
    (picture,) = draw_pictures(rows)
    assert ">kv_up K=1</text>" in picture
    assert ">expert_gate_upexpert_gate_up K=2</text>" in picture
    (alone,) = draw_pictures(rows[1:])
    assert ">expert_gate_upexpert_gate_up dgrad ...</text>" in alone


@pytest.mark.parametrize("suffix", READABLE)
def test_a_file_that_was_written_is_equal_as_a_baseline(tmp_path: Path, suffix: str) -> None:
    path = str(tmp_path / f"r{suffix}")
    write_result(make_result(0.5, 0.25), path, format_page)
    found = compare_records(read_records(path), list_records(make_result(0.5, 0.25)), 0.05)
    assert [(each.change, each.is_slower) for each in found] == [(0.0, False)] * 2


def test_rows_are_appended(tmp_path: Path) -> None:
    for suffix in (".jsonl", ".csv", ".md", ".markdown"):
        path = tmp_path / f"r{suffix}"
        write_result(make_result(0.5), str(path), format_page)
        before = path.read_text()
        write_result(make_result(0.25), str(path), format_page, appends=True)
        assert path.read_text().startswith(before.splitlines()[0])
        assert "0.5" in path.read_text() and "0.25" in path.read_text()


def test_a_row_beyond_the_tolerance_is_slower_unless_the_intervals_overlap() -> None:
    before = list_records(make_result(0.5, 0.25))
    found = compare_records(before, list_records(make_result(0.4, 0.245)), 0.05)
    assert [each.is_slower for each in found] == [True, False]
    assert "M=64" in format_comparison(found, 0.05) and "-20.0%" in format_comparison(found, 0.05)
    wide = make_result(0.4, 0.25)
    row = structs.replace(wide.ranks[0].rows[0], interval=(0.3, 0.6))
    noisy = structs.replace(wide, ranks=(structs.replace(wide.ranks[0], rows=(row,)),))
    assert not compare_records(before, list_records(noisy), 0.05)[0].is_slower


@pytest.mark.parametrize(("now_us", "change", "is_slower"), [(25.0, -0.2, True), (16.0, 0.25, False)])
def test_a_longer_time_is_slower(now_us: float, change: float, is_slower: bool) -> None:
    def take(value: float) -> BenchmarkResult:
        result = make_result(0.5)
        row = structs.replace(result.ranks[0].rows[0], value=value, unit="us", interval=None)
        return structs.replace(result, ranks=(structs.replace(result.ranks[0], rows=(row,)),))

    (found,) = compare_records(list_records(take(20.0)), list_records(take(now_us)), 0.05)
    assert (found.change, found.is_slower) == (pytest.approx(change), is_slower)


def test_a_case_that_fails_now_is_slower_than_its_baseline() -> None:
    result = make_result(0.5)
    row = structs.replace(result.ranks[0].rows[0], value=None, unit="", interval=None, timing=None, problem="no memory")
    now = structs.replace(result, ranks=(structs.replace(result.ranks[0], rows=(row,)),))
    assert compare_records(list_records(result), list_records(now), 0.05)[0].is_slower


def test_results_without_a_common_case_are_not_compared() -> None:
    other = structs.replace(make_result(0.5), ranks=(structs.replace(make_result(0.5).ranks[0], device_name="H100"),))
    with pytest.raises(UsageError, match="no row of the baseline has the same case: it was measured on H100, not on "):
        compare_records(list_records(other), list_records(make_result(0.5)), 0.05)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"M": 64, "rank": 0, "value": "fast", "unit": "TFLOP/s"}\n'),
        ("a.jsonl", '{"M": 64, "rank": 0, "value": -1, "unit": "TFLOP/s"}\n'),
        ("a.jsonl", '{"M": 64, "rank": 0, "value": 1'),
        ("a.jsonl", "[1]\n"),
        ("a.csv", "M,value,unit\n64,1,TFLOP/s\n"),
        ("a.csv", "M,rank,value,unit\n64,0,quick,TFLOP/s\n"),
        ("a.json", '{"benchmark": 3}'),
        ("a.jsonl.gz", "not compressed"),
        ("a.md", "| M |"),
        ("a.xlsx", ""),
    ],
)
def test_a_baseline_that_was_edited_by_hand_gives_one_message(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UsageError, match=re.escape(str(path))):
        read_records(str(path))


def test_a_value_of_zero_in_a_baseline_gives_one_message(tmp_path: Path) -> None:
    result = make_result(0.5)
    row = structs.replace(result.ranks[0].rows[0], value=0.0)
    path = tmp_path / "a.json"
    zero = structs.replace(result, ranks=(structs.replace(result.ranks[0], rows=(row,)),))
    path.write_bytes(msgspec.json.encode(zero))
    with pytest.raises(UsageError, match=r"a.json: row:1: value: 0.0 is not a positive number"):
        read_records(str(path))


def test_the_slow_rank_is_named() -> None:
    ranks = tuple(
        BenchmarkRank(rank=rank, host=f"n{rank}", device="cpu", device_name="CPU", rows=(make_row(64, tflops, rank),))
        for rank, tflops in enumerate((0.5, 0.49, 0.3, 0.51))
    )
    assert find_slow_ranks(BenchmarkResult(benchmark="gemm", ranks=ranks, world_size=4)) == [
        "rank 2 on n2 is slow: 61% of the median of all ranks"
    ]


def test_the_table_shows_errors_as_errors_and_no_zeros() -> None:
    lines = format_result_table(make_result(0.5)).splitlines()
    failed = next(line for line in lines if "offered" in line)
    assert "0.5 \u00b11.0%" in "\n".join(lines)
    assert re.findall(r"\d+", failed) == ["7", "8"]  # the size, and fp8


def test_tables_and_pages_have_units_as_people_write_them_and_files_have_keys(tmp_path: Path) -> None:
    result = make_result(0.5)
    figures = {"busbw_gb_per_s": 2.0, "layer_us": 3.0, "tflops": 4.0, "slowest_to_fastest_rank": 5.0, "iops": 6.0}
    row = structs.replace(result.ranks[0].rows[0], case={"size_bytes": 64, "s": 1}, figures=figures)
    result = structs.replace(result, ranks=(structs.replace(result.ranks[0], rows=(row,)),))
    header = re.split(r"  +", format_result_table(result).splitlines()[0])
    assert header[:2] == ["size B", "s"]
    assert header[4:10] == ["TFLOP/s", "busbw GB/s", "layer \u00b5s", "slowest to fastest rank", "IOPS", "of peak"]
    write_result(result, str(tmp_path / "r.html"), format_page)
    assert "busbw GB/s" in (tmp_path / "r.html").read_text() and "gb_per_s" not in (tmp_path / "r.html").read_text()
    write_result(result, str(tmp_path / "r.csv"), format_page)
    assert "busbw_gb_per_s" in (tmp_path / "r.csv").read_text().splitlines()[0]


def test_the_history_of_a_machine_keeps_the_last_result_of_each_case(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    keep_result(make_result(0.5, 0.25), environ)
    keep_result(make_result(0.4), environ)
    lines = find_history_file("gemm", environ).read_text().splitlines()
    assert {json.loads(line)["M"]: json.loads(line)["value"] for line in lines} == {64: 0.4, 128: 0.25}


def test_preflight_shows_the_best_value_of_this_machine(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    result = make_result(0.5, 0.25)
    rows = tuple(
        structs.replace(row, case={**row.case, "N": row.case["M"], "K": row.case["M"], "trans": "NN"})
        for row in result.rows
    )
    keep_result(structs.replace(result, ranks=(structs.replace(result.ranks[0], rows=rows),)), environ)
    assert read_best_figures(environ) == {"CPU": {"gemm_bf16": 0.5}}
    find_history_file("gemm", environ).write_text("damaged")
    assert read_best_figures(environ) == {}


def test_the_page_is_drawn_in_light_and_in_dark(tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    write_result(make_result(0.5, 0.25), str(page), format_page)
    light = browser.screenshot(page, tmp_path / "light.png").read_bytes()
    dark = browser.screenshot(page, tmp_path / "dark.png", is_dark=True).read_bytes()
    assert min(len(light), len(dark)) > 10_000
    assert light != dark
    assert 'class="fill c6"' in browser.dom(page), "the limit of the device"


def test_collectives_are_printed_as_nccl_tests_print_them() -> None:
    # nccl-tests prints 8589934592 B in 40903 us on 8 ranks as algbw 210.01, busbw 367.51.
    seconds = 40903e-6
    timing = Timing(n=1, median_s=seconds, p5_s=seconds, p95_s=seconds, min_s=seconds, max_s=seconds, mad_s=0.0)
    case: dict[str, CaseValue] = {
        "op": "all_reduce",
        "dtype": "fp32",
        "group": "all",
        "first_rank": 0,
        "ranks": 8,
        "size_bytes": 8589934592,
    }
    row = BenchmarkRow(case=case, timing=timing, figures={"algbw_gb_per_s": 210.007, "busbw_gb_per_s": 367.513})
    gathered = structs.replace(row, case={**case, "op": "all_gather"})
    single = BenchmarkRow(case={**case, "ranks": 1}, problem="single rank: no peer to communicate with")
    rank = BenchmarkRank(rank=0, host="n1", device="cpu", device_name="CPU", rows=(row, gathered, single))
    lines = format_nccl_table(BenchmarkResult(benchmark="collectives", ranks=(rank,))).splitlines()
    figures = [line.split() for line in lines if not line.startswith("#")]
    assert figures[0] == ["8589934592", "2147483648", "float", "sum", "-1", "40903.00", "210.01", "367.51", "0"]
    assert figures[1][1:4] == [str(2147483648 // 8), "float", "none"]
    assert lines[-1].endswith("no peer to communicate with")
