"""FLOPs and bytes of operators from the shapes of their inputs: against PyTorch's own counter."""

from __future__ import annotations

import pytest

pytest.importorskip("numpy")
counter = pytest.importorskip("torch.utils.flop_counter")

from primus.traces.operators import count_bytes, count_flops  # noqa: E402 - needs numpy
from primus.traces.trace import OperatorShape  # noqa: E402

Q, K = (2, 4, 16, 8), (2, 4, 24, 8)
SEQUENCE_FIRST = [(2, 16, 4, 8), (2, 24, 4, 8), (2, 24, 4, 8)]


@pytest.mark.parametrize(
    ("name", "dims", "counted"),
    [
        ("aten::mm", [(3, 4), (4, 5)], counter.mm_flop((3, 4), (4, 5))),
        ("aten::_scaled_mm", [(3, 4), (4, 5)], counter.mm_flop((3, 4), (4, 5))),
        ("aten::addmm", [(5,), (3, 4), (4, 5)], counter.addmm_flop((5,), (3, 4), (4, 5))),
        ("aten::bmm", [(2, 3, 4), (2, 4, 5)], counter.bmm_flop((2, 3, 4), (2, 4, 5))),
        (
            "aten::baddbmm",
            [(2, 3, 5), (2, 3, 4), (2, 4, 5)],
            counter.baddbmm_flop((2, 3, 5), (2, 3, 4), (2, 4, 5)),
        ),
        ("mkldnn::_linear_pointwise", [(6, 7, 4), (5, 4), (5,)], counter.mm_flop((42, 4), (4, 5))),
        ("aten::_scaled_dot_product_flash_attention", [Q, K, K], counter.sdpa_flop_count(Q, K, K)),
        ("aten::_flash_attention_forward", SEQUENCE_FIRST, counter.sdpa_flop_count(Q, K, K)),
        (
            "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
            [Q, Q, K, K, Q],
            counter.sdpa_backward_flop_count(Q, Q, K, K),
        ),
        ("aten::bmm", [(2, 3), (2, 4, 5)], None),
        ("aten::_flash_attention_backward", [Q], None),
        ("aten::add", [(3, 4), (3, 4)], None),
    ],
)
def test_flops_are_those_of_the_counter_of_pytorch(name: str, dims: list[tuple[int, ...]], counted: int | None) -> None:
    shape = OperatorShape(tuple(dims), ("float",) * len(dims))
    assert count_flops(name, shape) == counted
    if counted and "attention" in name:
        causal = OperatorShape(tuple(dims), ("float",) * len(dims), is_causal=True)
        assert count_flops(name, causal) == counted / 2


def test_bytes_are_those_of_the_inputs_and_of_the_output() -> None:
    product = OperatorShape(((3, 4), (4, 5)), ("c10::BFloat16",) * 2)
    assert count_bytes("aten::mm", product) == 2 * (12 + 20 + 15)
    batched = OperatorShape(((2, 3, 4), (2, 4, 5)), ("float",) * 2)
    assert count_bytes("aten::bmm", batched) == 4 * (24 + 40 + 30)
    attention = OperatorShape((Q, K, K), ("c10::BFloat16",) * 3)
    assert count_bytes("aten::_flash_attention_forward", attention) == 2 * (2 * 1024 + 2 * 1536)
    assert count_bytes("aten::relu", OperatorShape(((3, 4),), ("float",))) == 4 * 12
