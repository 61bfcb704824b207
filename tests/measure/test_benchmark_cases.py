"""Attention, memory and groups of ranks are counted by their published conventions, and wrong results are found."""

from __future__ import annotations

import itertools

import pytest
import torch
from msgspec import structs

from primus.config.extended_files import load_model
from primus.measure.kernels.attention import (
    AttentionShape,
    count_wrong,
    create_inputs,
    find_attention,
    make_window_mask,
)
from primus.measure.kernels.dense_layer import DenseLayer
from primus.measure.kernels.gemm import GemmShape
from primus.measure.kernels.model_gemm import list_dense_products, list_head_products, list_moe_products
from primus.measure.network import collectives
from primus.measure.network.collectives import OPERATIONS
from primus.measure.network.group_collectives import list_groups
from primus.models.counts import count_parameters
from primus.models.layers import mixer_size

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


def test_the_products_of_a_layer_have_the_published_shapes() -> None:
    spec = load_model("llama3.1_8B")
    found = {layer.name: layer for layer in list_dense_products(spec, 4096)}
    assert found["qkv"][1:] == (4096, 4096, (32 + 2 * 8) * 128, 1)
    assert found["gate_up"].find_shape("forward") == GemmShape(4096, 2 * 14336, 4096, trans_b=True)
    assert found["gate_up"].find_shape("dgrad") == GemmShape(4096, 4096, 2 * 14336)
    assert found["gate_up"].find_shape("wgrad") == GemmShape(2 * 14336, 4096, 4096, trans_a=True)
    # 2 FLOP a weight and token forward; the layers and the head are all matrices of the model but the embedding.
    products = [*list_dense_products(spec, 1)] * spec.num_layers + list_head_products(spec, 1)
    matrices = sum(layer.find_shape("forward").flop for layer in products) / 2
    count = count_parameters(spec)
    assert matrices == count.total_parameters - count.embedding - count.norm


def test_the_products_of_experts_and_latent_attention_hold_every_active_weight() -> None:
    spec = load_model("deepseek_v3")
    layer = list_moe_products(spec, spec.num_experts or 1)
    [gate_up] = [each for each in layer if each.name == "expert_gate_up"]
    assert (gate_up.tokens, gate_up.repeats, gate_up.outputs) == (8, 256, 2 * 2048)
    attention = sum(each.inputs * each.outputs for each in list_moe_products(spec, 1) if "expert" not in each.name)
    shared = sum(each.inputs * each.outputs for each in layer if each.name.startswith("shared"))
    assert attention - shared - 7168 * 256 == pytest.approx(mixer_size(spec, "attention").matrices, rel=1e-3)


def test_every_operator_of_a_layer_computes_what_the_layer_computes() -> None:
    spec = structs.replace(
        load_model("llama3.1_8B"), hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, num_query_groups=2,
        kv_channels=8,
    )  # fmt: skip
    operators = DenseLayer(spec, 2, 6).list_operators()
    for operator in operators:
        out = operator.run(*(torch.randn(shape) for shape in operator.shapes))
        assert torch.isfinite(out).all()
    whole = operators[-1]
    assert whole.flop == sum(operator.flop for operator in operators[:-1])
    assert 2.0 < whole.backward_factor < 2.5
