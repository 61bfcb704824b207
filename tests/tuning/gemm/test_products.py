"""Products come from logs of every library, and what was tuned is found where it applies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from primus.errors import PrimusError
from primus.runs.files import write_json
from primus.runs.tuned_files import TunedFile, explain_mismatch, find_tuned_file, name_tuned_file
from primus.tuning.gemm.hipblaslt import build_problem
from primus.tuning.gemm.product_logs import parse_log, read_product_logs
from primus.tuning.gemm.products import MatrixProduct, Operator, Order

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
    with pytest.raises(PrimusError, match=r"c\.txt: no matrix products"):
        read_product_logs([tmp_path / "c.txt"])


def test_the_file_that_agrees_most_is_found_and_the_difference_is_named(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    now = {"device": "A", "torch": "2.13.0", "rocm": "2"}
    for number, other in enumerate(({"torch": "2.12.0"}, {}, {"device": "B"}, {"rocm": "1"})):
        valid_for = {**now, **other}
        file = TunedFile(created=number, valid_for=valid_for, text="", summary="")
        write_json(name_tuned_file(environ, "gemm", valid_for), file)
    best = find_tuned_file(environ, "gemm", now)
    assert best is not None and best[0] == name_tuned_file(environ, "gemm", now)
    os.unlink(name_tuned_file(environ, "gemm", now))
    (tmp_path / "primus" / "tuned" / "gemm-0.json").write_text("{")
    found = find_tuned_file(environ, "gemm", {**now, "rocm": "4"})
    assert found is not None
    assert found[1] is not None
    reason = explain_mismatch(found[1].valid_for, {**now, "rocm": "4"})
    assert reason in ("tuned for torch 2.12.0, this is 2.13.0", "tuned for rocm 1, this is 4")
    # A damaged file is found if there is no other: the run says so.
    other = find_tuned_file(environ, "gemm", {**now, "device": "C"})
    assert other is not None and (other[0].name, other[1]) == ("gemm-0.json", None)
    other[0].unlink()
    assert find_tuned_file(environ, "gemm", {**now, "device": "C"}) is None


@pytest.mark.parametrize("order_b", ["N", "T"])
@pytest.mark.parametrize("order_a", ["N", "T"])
def test_a_product_of_a_step_is_the_problem_that_hipblaslt_logs(order_a: Order, order_b: Order) -> None:
    product = MatrixProduct(operator="mm", m=512, n=2048, k=1024, order_a=order_a, order_b=order_b, dtype="bfloat16")
    problem = build_problem(product, 3)
    assert problem is not None
    assert list(parse_log(" ".join(["hipblaslt-bench", *problem.args]))) == [product]


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
