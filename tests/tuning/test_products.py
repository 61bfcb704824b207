"""Products come from logs of every library, tables keep what applies, and comparisons see gains beyond the noise."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from primus.errors import PrimusError
from primus.runs.tuned_files import explain_mismatch, find_tuned_file, name_tuned_file
from primus.tuning.hipblaslt import build_problem
from primus.tuning.product_logs import parse_log, read_product_logs
from primus.tuning.product_table import (
    ProductTable,
    StepComparison,
    TunedProduct,
    is_tuned_step,
    keep_products,
    merge_tables,
    read_product_table,
    write_product_table,
)
from primus.tuning.products import MatrixProduct, Operator, Order, read_product_list, sort_products, write_product_list
from primus.tuning.step_comparison import compare_step_times

ONEDNN = """\
onednn_verbose,v1,info,oneDNN v3.10.2 (commit 1)
onednn_verbose,v1,primitive,info,template:operation,engine,primitive,implementation,prop_kind,memory_descriptors,\
attributes,auxiliary,problem_desc,exec_time
onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx10_1_512_amx,undef,src:bf16::blocked:ab::f0 \
wei:bf16::blocked:ba::f0 dst:bf16::blocked:ab::f0,attr-scratchpad:user,,512x1024:1024x2048,25.8
onednn_verbose,v1,ukernel,exec,cpu,brgemm,undef,src:bf16 wei:bf16 dst:f32,,,32x64:64x32,0.01
"""
MKL = (
    "MKL_VERBOSE SGEMM(T,N,2048,512,1024,0x7f,0x7f,1024,0x7f,1024,0x7f,0x7f,2048) 141.31ms CNR:OFF Dyn:0 FastMM:1"
    " TID:0  NThr:1\nMKL_VERBOSE SGEMM(T,N,2048"
)
TUNABLE = "Validator,PT_VERSION,2.13.0\nGemmTunableOp_BFloat16_TN,tn_2048_512_1024_ld_1024_1024_2048\n"
BATCHED = "GemmStridedBatchedTunableOp_float_NT,nt_64_32_16_B_8_ld_1_1_1\n"
HIPBLASLT = (
    "hipblaslt-bench --api_method c -m 2048 -n 512 -k 1024 --transA T --transB N --batch_count 1 --bias_vector"
    " --a_type bf16_r --d_type bf16_r --algo_method index --solution_index 5\nhipblaslt-bench --api_method c -m 20"
    '\nhipblaslt-bench -m "cut off by another line'
)
LINEAR = "mm 512x2048x1024 NT bfloat16"
"""torch.nn.functional.linear of 512 x 1024 by a weight of 2048 x 1024."""


@pytest.mark.parametrize(
    ("log", "keys"),
    [
        (ONEDNN, [LINEAR]),
        (MKL, ["mm 512x2048x1024 NT float32"]),
        (TUNABLE, [LINEAR]),
        (BATCHED, ["bmm 8*32x64x16 TN float32"]),
        (HIPBLASLT, [LINEAR]),
    ],
)
def test_logs_of_all_libraries_name_the_same_product(log: str, keys: list[str]) -> None:
    assert [product.key for product in parse_log(log)] == keys


def test_logs_are_added_up_and_a_log_without_products_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(HIPBLASLT)
    (tmp_path / "b.csv").write_text(TUNABLE)
    (tmp_path / "c.txt").write_text("no product\n")
    found = read_product_logs([tmp_path / "a.txt", tmp_path / "b.csv"])
    assert [(each.product.key, each.calls) for each in found.products] == [(LINEAR, 2)]
    write_product_list(tmp_path / "d.json", found)
    assert read_product_logs([tmp_path / "d.json"]).products == found.products
    with pytest.raises(PrimusError, match=r"c\.txt: no matrix products"):
        read_product_logs([tmp_path / "c.txt"])


def test_an_edited_list_with_impossible_sizes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "products.json"
    write_product_list(file, sort_products({make_product(8): 1}, "test"))
    file.write_text(file.read_text().replace('"m": 8', '"m": 0'))
    with pytest.raises(PrimusError, match="sizes and calls are at least 1"):
        read_product_list(file)


def make_product(m: int) -> MatrixProduct:
    return MatrixProduct(operator="mm", m=m, n=8, k=8)


def make_comparison(low: float, high: float, experiment: str = "night") -> StepComparison:
    middle = (low + high) / 2
    return StepComparison(experiment=experiment, created=1.0, num_steps=40, ratio=middle, low=low, high=high)


def test_tuned_products_are_kept_only_if_the_interval_contains_gains_only() -> None:
    tuned = [TunedProduct(product=make_product(1), form="onednn"), TunedProduct(product=make_product(2))]
    assert [each.is_kept for each in keep_products(tuned, make_comparison(0.9, 0.99))] == [True, False]
    for comparison in (make_comparison(0.9, 1.01), make_comparison(1.01, 1.1), None):
        assert not any(each.is_kept for each in keep_products(tuned, comparison))


def test_a_table_keeps_the_products_of_other_models_unless_the_library_changed() -> None:
    valid_for = {"device": "A", "torch": "2.13.0"}
    old = ProductTable(valid_for=valid_for, products=[TunedProduct(product=make_product(1), form="onednn")])
    new = ProductTable(valid_for=valid_for, products=[TunedProduct(product=make_product(2))])
    assert {each.product.m for each in merge_tables(old, new).products} == {1, 2}
    changed = ProductTable(valid_for={**valid_for, "torch": "2.14.0"})
    assert merge_tables(old, changed) == changed


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [('"format": 1', '"format": 9', "format 9"), ('"products"', "products", "damaged"), ('"k": 8', '"k": "8"', "dam")],
)
def test_an_edited_table_is_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    write_product_table(tmp_path / "t.json", ProductTable(products=[TunedProduct(product=make_product(1))]))
    (tmp_path / "t.json").write_text((tmp_path / "t.json").read_text().replace(old, new))
    with pytest.raises(PrimusError, match=message):
        read_product_table(tmp_path / "t.json")


def test_the_file_that_agrees_most_is_found_and_the_difference_is_named(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    now = {"device": "A", "torch": "2.13.0", "threads": "2"}
    for number, other in enumerate(({"torch": "2.12.0"}, {}, {"device": "B"}, {"threads": "1"})):
        valid_for = {**now, **other}
        write_product_table(
            name_tuned_file(environ, "gemm", valid_for), ProductTable(created=number, valid_for=valid_for)
        )
    best = find_tuned_file(environ, "gemm", now)
    assert best is not None and best[0] == name_tuned_file(environ, "gemm", now)
    os.unlink(name_tuned_file(environ, "gemm", now))
    (tmp_path / "primus" / "tuned" / "gemm-0.json").write_text("{")
    found = find_tuned_file(environ, "gemm", {**now, "threads": "4"})
    assert found is not None
    reason = explain_mismatch(found[1].valid_for, {**now, "threads": "4"})
    assert reason in ("tuned for torch 2.12.0, this is 2.13.0", "tuned for threads 1, this is 4")
    # A damaged file is found if there is no other: its reader says what is wrong.
    other = find_tuned_file(environ, "gemm", {**now, "device": "C"})
    assert other is not None and other[0].name == "gemm-0.json"
    other[0].unlink()
    assert find_tuned_file(environ, "gemm", {**now, "device": "C"}) is None


@pytest.mark.parametrize("order_b", ["N", "T"])
@pytest.mark.parametrize("order_a", ["N", "T"])
def test_a_product_of_a_step_is_the_problem_that_hipblaslt_logs(order_a: Order, order_b: Order) -> None:
    product = MatrixProduct(operator="mm", m=512, n=2048, k=1024, order_a=order_a, order_b=order_b, dtype="bfloat16")
    problem = build_problem(product, 3)
    assert problem is not None
    assert list(parse_log(" ".join(["hipblaslt-bench", *problem.args]))) == [product]


@pytest.mark.parametrize(("gain", "is_faster"), [(0.04, True), (0.0, False), (-0.04, False)])
def test_a_comparison_sees_a_gain_of_four_percent_in_a_drifting_noise(gain: float, is_faster: bool) -> None:
    rng = random.Random(gain)
    times = [
        (2.0 if step == 1 else 0.4 + 0.0005 * step) * rng.gauss(1, 0.02) * (1 - gain if is_tuned_step(step) else 1)
        for step in range(1, 121)
    ]
    comparison = compare_step_times(times, "night", 0.0)
    assert comparison.is_faster == is_faster
    assert comparison.low - 0.01 < 1 - gain < comparison.high + 0.01


def test_the_steps_that_also_initialize_are_not_compared() -> None:
    slow_start = [9.0, 1.0, 1.0, 1.0] + [2.0, 1.0, 1.0, 2.0] * 6
    comparison = compare_step_times(slow_start, "night", 0.0)
    assert (comparison.ratio, comparison.low, comparison.high, comparison.num_steps) == (0.5, 0.5, 0.5, 24)


def test_a_group_that_the_run_did_not_finish_is_not_compared() -> None:
    complete = [1.0] * 4 + [2.0, 1.0, 1.0, 2.0] * 5
    for rest in ([], [2.0], [2.0, 1.0, 1.0]):
        comparison = compare_step_times([*complete, *rest], "night", 0.0)
        assert (comparison.ratio, comparison.high, comparison.num_steps) == (0.5, 0.5, 20)


@pytest.mark.parametrize(("operator", "batch"), [("mm", 1), ("addmm", 1), ("bmm", 2), ("baddbmm", 2)])
def test_a_problem_of_hipblaslt_has_the_strides_of_a_batch_and_adds_what_pytorch_adds(
    operator: Operator, batch: int
) -> None:
    product = MatrixProduct(operator=operator, m=8, n=4, k=2, batch=batch)
    problem = build_problem(product, 1)
    assert problem is not None
    words = dict(zip(problem.args[::2], problem.args[1::2], strict=True))
    assert words["--beta"] == ("1" if "add" in operator else "0")
    # By columns: the result is n x m.
    strides = {"--stride_a": "8", "--stride_b": "16", "--stride_c": "32", "--stride_d": "32"} if batch > 1 else {}
    assert {name: value for name, value in words.items() if "stride" in name} == strides


def test_too_few_steps_are_no_comparison() -> None:
    with pytest.raises(PrimusError, match="a comparison needs"):
        compare_step_times([1.0] * 12, "night", 0.0)
