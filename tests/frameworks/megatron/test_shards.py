"""What a rank of Megatron holds, cut from weights in hub names."""

from __future__ import annotations

import pytest
import torch

from checkpoint_models import DENSE, SPARSE, draw_hub_tensors, make_spec
from primus.checkpoint.weights import TensorDict
from primus.errors import UsageError
from primus.frameworks.megatron.shards import MegatronShard, RankLayout


def test_tensor_parallel_ranks_hold_gate_and_up_of_the_same_channels() -> None:
    spec = make_spec()
    hub = draw_hub_tensors(spec)
    for rank in range(2):
        shard = MegatronShard(TensorDict(hub), spec, RankLayout(tensor_rank=rank, tensor_size=2))
        gate, up = shard.read("decoder.layers.1.mlp.linear_fc1.weight").chunk(2)
        rows = slice(rank * 20, rank * 20 + 20)
        assert torch.equal(gate, hub["model.layers.1.mlp.gate_proj.weight"][rows])
        assert torch.equal(up, hub["model.layers.1.mlp.up_proj.weight"][rows])
        down = shard.read("decoder.layers.1.mlp.linear_fc2.weight")
        assert torch.equal(down, hub["model.layers.1.mlp.down_proj.weight"][:, rows])


@pytest.mark.parametrize("size", [1, 2])
def test_rows_of_a_ranks_tensor_are_rows_of_the_whole_tensor(size: int) -> None:
    spec = make_spec(**SPARSE["qwen3_moe"])
    shard = MegatronShard(TensorDict(draw_hub_tensors(spec)), spec, RankLayout(tensor_rank=size - 1, tensor_size=size))
    for name, info in shard.list_tensors().items():
        whole = shard.read(name)
        assert tuple(whole.shape) == info.shape
        half = len(whole) // 2
        for rows in (slice(0, half), slice(half - 1, half + 1), slice(half, None), slice(0, 0)):
            assert torch.equal(shard.read(name, rows), whole[rows]), name


def test_query_groups_stay_whole_on_a_rank() -> None:
    spec = make_spec(**DENSE["qwen2.5"])
    hub = draw_hub_tensors(spec)
    shard = MegatronShard(TensorDict(hub), spec, RankLayout(tensor_rank=1, tensor_size=2))
    for kind in ("weight", "bias"):
        q, k, v = (hub[f"model.layers.0.self_attn.{part}_proj.{kind}"] for part in "qkv")
        # 6 query heads of 4 channels in 2 groups: the second rank has query heads 3 to 5, key 1 and value 1.
        expected = torch.cat([q[12:], k[4:], v[4:]])
        assert torch.equal(shard.read(f"decoder.layers.0.self_attention.linear_qkv.{kind}"), expected)


def test_last_stage_of_a_tied_model_has_a_copy_of_the_embedding_as_output_head() -> None:
    spec = make_spec(**DENSE["tied llama"])
    hub = draw_hub_tensors(spec)
    last = MegatronShard(TensorDict(hub), spec, RankLayout(first_layer=1, num_layers=1, is_first_stage=False))
    names = set(last.list_tensors())
    assert "embedding.word_embeddings.weight" not in names
    assert {name.split(".")[2] for name in names if name.startswith("decoder.layers.")} == {"0"}
    assert torch.equal(
        last.read("decoder.layers.0.input_layernorm.weight"), hub["model.layers.1.input_layernorm.weight"]
    )
    assert torch.equal(last.read("output_layer.weight"), hub["model.embed_tokens.weight"])


def test_padding_of_the_vocabulary_is_zeros_on_the_last_rank() -> None:
    spec = make_spec()
    hub = draw_hub_tensors(spec)
    layout = RankLayout(tensor_rank=1, tensor_size=2, padded_vocab_size=64)
    embedding = MegatronShard(TensorDict(hub), spec, layout).read("embedding.word_embeddings.weight")
    assert torch.equal(embedding[:18], hub["model.embed_tokens.weight"][32:])
    assert embedding.shape == (32, 24) and not embedding[18:].any()


@pytest.mark.parametrize("extra", SPARSE.values(), ids=SPARSE)
def test_each_norm_has_one_name_with_either_layer_spec(extra) -> None:
    spec = make_spec(**extra)
    weights = TensorDict(draw_hub_tensors(spec))
    local = MegatronShard(weights, spec, layer_spec="local").list_tensors()
    fused = MegatronShard(weights, spec, layer_spec="transformer_engine").list_tensors()
    assert len(local) == len(fused)
    assert not any("layer_norm_weight" in name for name in local)
    assert "decoder.layers.1.pre_mlp_layernorm.weight" in fused
    assert sum(info.num_bytes for info in local.values()) == sum(info.num_bytes for info in fused.values())


def test_a_size_that_cuts_through_a_vocabulary_is_refused() -> None:
    spec = make_spec(vocab_size=51)
    with pytest.raises(UsageError, match=r"2 does not divide embedding\.word_embeddings\.weight"):
        MegatronShard(TensorDict(draw_hub_tensors(spec)), spec, RankLayout(tensor_size=2))
