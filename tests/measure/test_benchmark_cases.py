"""Attention, memory and groups of ranks are counted by their published conventions, and wrong results are found."""

from __future__ import annotations

import itertools

import pytest
import torch

from primus.measure import collectives
from primus.measure.attention_benchmark import (
    AttentionShape,
    count_wrong,
    create_inputs,
    find_attention,
    make_window_mask,
)
from primus.measure.collective_benchmark import list_groups
from primus.measure.collectives import OPERATIONS

CPU = torch.device("cpu")


def test_attention_counts_what_flashattention_counts() -> None:
    full = AttentionShape(2, 1024, 16, 4, 64, 64, causal=False)
    assert full.count_flop(is_backward=False) == 4 * 2 * 16 * 1024**2 * 64
    assert full._replace(causal=True).count_flop(is_backward=False) == full.count_flop(is_backward=False) / 2
    assert full.count_flop(is_backward=True) == 2.5 * full.count_flop(is_backward=False)
    latent = full._replace(head_dim=192, v_head_dim=128)
    assert latent.count_flop(is_backward=False) == 2 * 2 * 16 * 1024**2 * (192 + 128)


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 5), (True, 16), (False, None)])
def test_the_counted_keys_are_those_that_the_mask_shows(causal: bool, window: int | None) -> None:
    shape = AttentionShape(1, 16, 1, 1, 8, 8, causal, window)
    seen = make_window_mask(shape).sum().item() / 16
    assert shape.count_keys() == pytest.approx(seen, abs=0.51)  # the diagonal counts as half, as in s/2


@pytest.mark.parametrize(("groups", "v_head_dim", "window"), [(4, 16, None), (2, 8, None), (1, 16, 7)])
def test_attention_with_groups_other_value_widths_and_windows_is_right(
    groups: int, v_head_dim: int, window: int | None
) -> None:
    # AMD-AGI/Primus gives the keys the width of the values.
    shape = AttentionShape(2, 40, 4, groups, 16, v_head_dim, causal=True, window=window)
    inputs = create_inputs(shape, torch.float32, CPU, needs_grad=False)
    out = find_attention("math", shape, CPU)(*inputs)
    assert out.shape == (2, 4, 40, v_head_dim)
    assert count_wrong(shape, inputs, out) == 0
    out[0, 1, 0, 0] += 0.01
    assert count_wrong(shape, inputs, out) == 1


def test_groups_of_ranks_are_all_nodes_or_strided() -> None:
    assert list_groups(4, None, None)[0].groups == [(0, 1, 2, 3)]
    assert list_groups(4, [(0, 1), (2, 3)], None)[0].groups == [(0, 1), (2, 3)]
    assert list_groups(6, None, 4)[0].groups == [(0, 4), (1, 5), (2,), (3,)]


@pytest.mark.parametrize("n", [2, 3, 8, 255])
def test_sums_of_small_types_are_exact_and_known(n: int) -> None:
    index = torch.arange(64)
    for name, rank in itertools.product(("all_reduce", "reduce_scatter"), (0, n - 1)):
        operation = OPERATIONS[name]
        sent = sum(
            collectives.make_sent_values(operation, torch.bfloat16, each, n, 64)(
                index + (0 if name == "all_reduce" else rank * 64)
            )
            for each in range(n)
        )
        assert isinstance(sent, torch.Tensor)
        expected = collectives.make_expected_values(operation, torch.bfloat16, rank, n, 64)(index)
        assert torch.equal(sent, expected)
        assert torch.equal(expected, expected.to(torch.bfloat16).long())
