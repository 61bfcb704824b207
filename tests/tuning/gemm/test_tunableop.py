"""TunableOp's records and results of old and new versions are read, and PyTorch's own reader takes what is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from primus.errors import PrimusError
from primus.tuning.gemm.products import MatrixProduct, Operator, Order
from primus.tuning.gemm.tunableop import (
    TunableProblem,
    build_tunable_problem,
    format_results,
    merge_results,
    parse_results,
    read_tunable_problems,
)

OLD = "Validator,PT_VERSION,2.4.0\nGemmTunableOp_float_NT,nt_25088_4096_64\nGemmTunableOp_float_TN,tn_64_32_1"
NEW = (
    "GemmTunableOp_BFloat16_TN,tn_2048_512_1024_ld_1024_1024_2048,- { function: matmul, M: 2048, N: 512 }\n"
    "GemmStridedBatchedTunableOp_Half_NN,nn_64_32_16_B_8_ld_64_16_64\n"
    "ScaledGemmTunableOp_Float8_e4m3fn_Float8_e4m3fn_BFloat16_TN,tn_64_32_16_ld_16_16_64_rw_0_bias_None\n"
    "GemmAndBiasTunableOp_BFloat16_TN,tn_2048_512_1024_ld_1024_1024_2048\n"
)
RESULTS = (
    "Validator,PT_VERSION,2.4.0\r\nValidator,GCN_ARCH_NAME,gfx942:sramecc+:xnack-\r\n"
    "GemmTunableOp_float_TN,tn_200_100_20,Gemm_Rocblas_32323,0.00669595\r\n"
    "GemmTunableOp_float_NN,nn_8_8_8_ld_8_8_8,Default\r\n"
    "GemmTunableOp_BFloat16_NN,nn_9_8_8_ld_9_8_9,Gemm_Hipblaslt_5,1e-05,- { M: 9, N: 8 }\r\n"
)


def read(tmp_path: Path, *texts: str) -> list[TunableProblem]:
    files = []
    for number, text in enumerate(texts):
        files.append(tmp_path / f"tunableop_untuned{number}.csv")
        files[-1].write_text(text)
    return read_tunable_problems(files)


def test_records_of_both_formats_and_several_gpus_name_each_product_once(tmp_path: Path) -> None:
    problems = read(tmp_path, OLD, NEW, NEW)
    assert [problem.count for problem in problems] == [2, 2, 2, 2, 1]
    assert problems[-1].line == "GemmTunableOp_float_NT,nt_25088_4096_64_ld_25088_4096_25088"
    assert problems[0].shape == "2048 x 512 x 1024 TN BFloat16"
    assert len({problem.key for problem in problems}) == 5
    with pytest.raises(PrimusError, match=r"no line of TunableOp in .*untuned0\.csv"):
        read(tmp_path, OLD.rpartition("\n")[2])


def test_results_keep_validators_and_what_was_chosen() -> None:
    found = parse_results(RESULTS, "results0.csv")
    assert found.validators == {"PT_VERSION": "2.4.0", "GCN_ARCH_NAME": "gfx942:sramecc+:xnack-"}
    assert [(each.solution, each.time_ms) for each in found.solutions] == [
        ("Gemm_Rocblas_32323", "0.00669595"),
        ("Default", ""),
        ("Gemm_Hipblaslt_5", "1e-05"),
    ]
    text = format_results(merge_results([found, found]))
    assert "\r" not in text, "PyTorch compares validators by characters"
    assert parse_results(text, "merged").validators == found.validators and text.count("TunableOp") == 3


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (RESULTS.replace("PT_VERSION", "OTHER"), "no line 'Validator,PT_VERSION"),
        (RESULTS.replace("tn_200_100_20", "tn_200_100"), "not a solution of TunableOp"),
        (RESULTS.replace("0.00669595", "fast"), "not a solution of TunableOp"),
        (RESULTS[:-4], "ends without a complete line"),
        ("Validator,PT_VERSION,2.4.0\n", "ends without a solution"),
    ],
)
def test_results_that_were_edited_or_cut_off_are_refused(text: str, reason: str) -> None:
    with pytest.raises(PrimusError, match=reason):
        parse_results(text, "results0.csv")


@pytest.mark.parametrize(
    ("operator", "batch", "orders"),
    [("mm", 1, "NN"), ("mm", 1, "NT"), ("mm", 1, "TN"), ("bmm", 4, "NT"), ("bmm", 4, "NN"), ("addmm", 1, "NT")],
)
def test_pytorch_tunes_the_product_that_a_built_line_names(
    operator: Operator, batch: int, orders: tuple[Order, Order]
) -> None:
    pytest.importorskip("torch")
    tunable = pytest.importorskip("torch.cuda.tunable")
    if not hasattr(tunable, "_process_single_offline_gemm"):
        pytest.skip("this version of PyTorch has no offline tuning")
    from torch._subclasses.fake_tensor import FakeTensorMode

    from primus.tuning.gemm.product_recorder import ProductRecorder

    a, b = orders
    product = MatrixProduct(
        operator=operator, m=96, n=64, k=32, batch=batch, order_a=a, order_b=b, dtype="bfloat16", out_dtype=""
    )
    problem = build_tunable_problem(product, 1)
    assert problem is not None
    recorder: Any = ProductRecorder()
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        tunable._process_single_offline_gemm(problem.line + "\n", 0)
    assert dict(recorder.counts) == {product: 1}
