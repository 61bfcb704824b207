"""Parameter counts against published models, FLOPs against recomputed figures, and shapes that cannot be built."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from primus import registry
from primus.config.extended_files import load_model
from primus.config.schema import ModelSpec, ParallelConfig
from primus.errors import UsageError
from primus.models.counts import (
    count_parameters,
    flops_per_token,
    head_dim,
    list_layers,
    num_moe_layers,
    num_query_groups,
)
from primus.models.model_checks import check, check_parallel, find_parallel_problems, has_own_stages

PUBLISHED = {
    # Equal to the tensor counts of the weights on the Hugging Face hub
    "llama2_7B": 6_738_415_616,
    "llama2_13B": 13_015_864_320,
    "llama2_70B": 68_976_648_192,
    "llama3_8B": 8_030_261_248,
    "llama3_70B": 70_553_706_496,
    "llama3.1_8B": 8_030_261_248,
    "llama3.1_70B": 70_553_706_496,
    "llama3.1_405B": 405_853_388_800,
    "llama3.2_1B": 1_235_814_400,
    "llama3.2_3B": 3_212_749_824,
    "llama3.3_70B": 70_553_706_496,
    "qwen2.5_0.5B": 494_032_768,
    "qwen2.5_1.5B": 1_543_714_304,
    "qwen2.5_3B": 3_085_938_688,
    "qwen2.5_7B": 7_615_616_512,
    "qwen2.5_14B": 14_770_033_664,
    "qwen2.5_32B": 32_763_876_352,
    "qwen2.5_72B": 72_706_203_648,
    # The files of 0.6B and 1.7B store the shared matrix twice: 751,632,384 and 2,031,739,904
    "qwen3_0.6B": 596_049_920,
    "qwen3_1.7B": 1_720_574_976,
    "qwen3_4B": 4_022_468_096,
    "qwen3_8B": 8_190_735_360,
    "qwen3_14B": 14_768_307_200,
    "qwen3_32B": 32_762_123_264,
    "mixtral_8x7B_v0.1": 46_702_792_704,
    "mixtral_8x22B_v0.1": 140_620_634_112,
    "mixtral_8x22B_instruct_v0.1": 140_630_071_296,
    "qwen3_30B_A3B": 30_532_122_624,
    "qwen3_235B_A22B": 235_093_634_560,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v2": 235_741_434_880,
    "deepseek_v3": 671_026_419_200,
    "gpt_oss_20B": 20_914_757_184,
    "gpt_oss_120B": 116_829_156_672,
    "gemma2_2B": 2_614_341_888,
    "gemma2_9B": 9_241_705_984,
    "gemma2_27B": 27_227_128_320,
    "gemma3_270M": 268_098_176,
    "gemma3_1B": 999_885_952,
    # Their text parts: without embeddings 3,209M, 10,759M and 25,600M (Gemma 3 report, table 1)
    "gemma3_4B": 3_880_263_168,
    "gemma3_12B": 11_766_034_176,
    "gemma3_27B": 27_009_346_304,
    "phi3_mini_4K": 3_821_079_552,
    "phi3_medium_4K": 13_960_238_080,
    "phi4_14B": 14_659_507_200,
    "olmo2_1B": 1_484_916_736,
    "olmo2_7B": 7_298_617_344,
    "olmo2_13B": 13_716_198_400,
    "olmo2_32B": 32_234_279_936,
    "deepseek_r1_distill_qwen_1.5B": 1_777_088_000,
    "lfm2_8B_A1B": 8_339_930_560,
    "mamba_130M": 128_989_632,
    # Equal to the tensors of transformers 5.23 for the shape; without the buffers that balance experts, see below
    "gemma4_26B": 25_233_141_760,
    "gemma4_31B": 30_697_345_280,
    "llama4_17B16E": 107_769_861_120,
    "llama4_17B128E": 400_711_848_960,
    "mamba_370M": 368_346_624,
    "qwen3_235B_A22B_4layer": 11_195_683_840,
    "qwen3_5_35B_A3B": 34_660_610_688,
}

WITHOUT_BALANCING_BIAS = {
    "deepseek_v4_flash": 284_332_230_231,
    "glm5": 743_911_199_232,
    "kimi_k2": 1_026_408_209_408,
    "minimax_m2.5": 228_689_748_992,
}
"""Tensors of transformers 5.23, where the bias that balances experts is a buffer."""

ALIASES = {
    "deepseek_v2_16B": "deepseek_v2_lite",
    "deepseek_v3_16B": "deepseek_v2_lite",
    "deepseek_v3_236B": "deepseek_v2",
    "deepseek_v3_671B": "deepseek_v3",
    "llama31_70B": "llama3.1_70B",
    "llama4_17Bx16E": "llama4_17B16E",
    "llama4_17Bx128E": "llama4_17B128E",
    "mixtral_8x7B": "mixtral_8x7B_v0.1",
    "mixtral_8x22B": "mixtral_8x22B_v0.1",
}
"""Names of torchtitan, MaxText and Megatron-Bridge for a model that has another name here."""

ACTIVE = {
    "mixtral_8x7B_v0.1": 12_879_925_248,
    "mixtral_8x22B_v0.1": 39_152_031_744,
    "mixtral_8x22B_instruct_v0.1": 39_161_468_928,
    "qwen3_30B_A3B": 3_353_032_704,
    "qwen3_235B_A22B": 22_190_763_520,
    "deepseek_v2_lite": 2_661_150_208,
    "deepseek_v2": 21_375_800_320,
    "deepseek_v3": 37_552_297_472,
    "gpt_oss_20B": 4_187_440_704,
    "gpt_oss_120B": 5_711_982_912,
}

GOLDEN_FLOPS = [
    # model, sequence, `causal` (Megatron-LM), `full` (torchtitan), `6N`
    ("llama2_7B", 4096, 42863689728, 46086512640, 40430493696),
    ("llama2_13B", 4096, 82142822400, 87178475520, 78095185920),
    ("llama2_70B", 4096, 428385239040, 444499279872, 413859889152),
    ("llama3.1_8B", 2048, 46638563328, 48250773504, 48181567488),
    ("llama3.1_8B", 4096, 48249176064, 51471998976, 48181567488),
    ("llama3_8B", 8192, 51470401536, 57914449920, 48181567488),
    ("llama3.1_70B", 8192, 449222541312, 481442709504, 423322238976),
    ("llama3.1_405B", 8192, 2523955986432, 2625449459712, 2435120332800),
    ("llama3.2_1B", 8192, 9025093632, 10636111872, 7414886400),
    ("llama3.2_3B", 8192, 23503306752, 27732215808, 19276498944),
    ("qwen2.5_7B", 2048, 43654840320, 44889965568, 45693699072),
    ("qwen2.5_7B", 8192, 47354216448, 52288717824, 45693699072),
    ("qwen2.5_14B", 8192, 96023347200, 108107986944, 88620201984),
    ("qwen2.5_32B", 8192, 208011264000, 224124106752, 196583258112),
    ("qwen2.5_72B", 8192, 460962398208, 493187481600, 436237221888),
    ("qwen3_8B", 8192, 52656340992, 59905947648, 49144412160),
    ("qwen3_14B", 8192, 94006149120, 104075028480, 88609843200),
    ("qwen3_32B", 8192, 217671008256, 243444873216, 196572739584),
    ("mixtral_8x7B_v0.1", 4096, 79706456064, 82935570432, 77279551488),
    ("mixtral_8x22B_v0.1", 4096, 242167578624, 250643976192, 234912190464),
    ("qwen3_30B_A3B", 4096, 23006281728, 27914883072, 20118196224),
    ("qwen3_235B_A22B", 4096, 148034813952, 167260001280, 133144581120),
    ("deepseek_v2_lite", 4096, 16386180096, 18105996288, 15966901248),
    ("deepseek_v2", 4096, 155014348800, 185507051520, 128254801920),
]


@pytest.mark.parametrize(("name", "total"), PUBLISHED.items())
def test_parameters_of_a_preset_equal_the_published_weights(name: str, total: int) -> None:
    assert count_parameters(load_model(name)).total_parameters == total


@pytest.mark.parametrize(("name", "active"), ACTIVE.items())
def test_active_parameters_of_a_mixture_of_experts(name: str, active: int) -> None:
    assert count_parameters(load_model(name)).active_parameters == active


@pytest.mark.parametrize(("name", "total"), WITHOUT_BALANCING_BIAS.items())
def test_parameters_without_the_balancing_bias_equal_those_of_transformers(name: str, total: int) -> None:
    assert count_parameters(replace(load_model(name), moe_router_enable_expert_bias=False)).total_parameters == total


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_a_model_has_the_same_shape_under_the_name_of_another_framework(alias: str, name: str) -> None:
    assert load_model(alias) == load_model(name)


def test_every_preset_can_be_built_and_counted() -> None:
    for name in registry.list_plug_ins("models"):
        spec = load_model(name)
        check(spec)
        assert count_parameters(spec).total_parameters > 0
        assert flops_per_token(spec, 4096) > 0


def test_kimi_k3_has_the_parameters_of_its_tensors() -> None:
    spec = load_model("kimi_k3_curve")
    h, heads, d, r_q, r_kv, latent = 2048, 16, 128, 512, 256, 1024
    width = heads * d
    delta = 5 * h * width + (h * d + d * width) + h * heads + 4 * 3 * width + width + heads + d  # g_proj is full rank
    latent_attention = h * r_q + r_q + r_q * heads * 192 + h * (r_kv + 64) + r_kv + r_kv * heads * 256 + 2 * h * width
    dense = 3 * h * 9728
    experts = 32 * 3 * latent * 1024 + 3 * h * 2048 + 2 * h * latent + latent + 32 * h + 32
    residuals = 2 * 24 * 2 * h
    norms = (2 * 24 + 1) * h
    total = 18 * delta + 6 * latent_attention + dense + 23 * experts + residuals + norms + 2 * 151665 * h
    assert count_parameters(spec).total_parameters == total


def test_feed_forwards_of_a_megatron_hybrid_are_layers() -> None:
    kinds = list_layers(load_model("zebra_llama_1B"))
    assert [layer.mixer for layer in kinds[:4]] == ["attention", "none", "mamba", "none"]
    assert [layer.feed_forward for layer in kinds[:4]] == [False, True, False, True]


def test_every_second_layer_of_maverick_has_experts_beginning_with_the_second() -> None:
    assert [layer.moe for layer in list_layers(load_model("llama4_17B128E"))][:4] == [False, True, False, True]


def test_recurrent_layers_do_not_cost_more_for_a_longer_sequence() -> None:
    spec = load_model("mamba_370M")
    assert flops_per_token(spec, 1024) == flops_per_token(spec, 1_000_000)
    assert flops_per_token(spec, 1024) > 6 * (
        count_parameters(spec).total_parameters - count_parameters(spec).embedding
    )


def test_flops_of_a_hybrid_equal_the_formula_of_megatron_lm() -> None:
    # Megatron-LM megatron/training/training.py, gdn_layer_flops and attn_layer_flops, for Qwen3.5-35B-A3B
    spec = load_model("qwen3_5_35B_A3B")
    h, seq = 2048, 4096
    delta = h * (2 * 2048 + 2 * 4096 + 2 * 32) + 4 * (2 * 2048 + 4096) + 32 * 128**2 * 4 + h * 4096
    attention = h * (3 * 4096 + 2 * 512) + 4096 * seq  # query with its gate, output, keys, values; scores and values
    ffn = 3 * h * (8 * 512 + 512)
    assert flops_per_token(spec, seq) == 6 * (30 * delta + 10 * attention + 40 * ffn + h * 248320)


def test_every_parameter_of_a_dense_model_is_active() -> None:
    count = count_parameters(load_model("llama3.1_8B"))
    assert count.active_parameters == count.total_parameters
    assert count.experts == count.router == 0


def test_published_active_counts_of_gpt_oss_leave_out_the_input_embedding() -> None:
    for name, billions in (("gpt_oss_20B", 3.61), ("gpt_oss_120B", 5.13)):
        count = count_parameters(load_model(name))
        assert round((count.active_parameters - count.embedding) / 1e9, 2) == billions


def test_deepseek_v3_parts_equal_the_published_ones() -> None:
    spec = load_model("deepseek_v3")
    count = count_parameters(spec)
    assert count.attention == 61 * 187_107_328
    assert count.mtp == 11_610_068_224
    assert (
        count.total_parameters - count_parameters(replace(spec, moe_router_enable_expert_bias=False)).total_parameters
        == 58 * 256
    )


@pytest.mark.parametrize(("name", "layers", "experts"), [("deepseek_v4_flash", 43, 256), ("deepseek_v4_pro", 61, 384)])
def test_layers_with_hash_routing_have_no_balancing_bias(name: str, layers: int, experts: int) -> None:
    spec = load_model(name)
    without = count_parameters(replace(spec, moe_router_enable_expert_bias=False)).router
    assert count_parameters(spec).router - without == (layers - 3) * experts


def test_a_tied_model_has_one_vocabulary_matrix() -> None:
    tied = load_model("llama3.2_1B")
    untied = replace(tied, untie_embeddings_and_output_weights=True)
    assert count_parameters(tied).output == 0
    assert count_parameters(untied).total_parameters == 1_498_482_688  # what a preset that forgets to tie gives
    assert flops_per_token(tied, 8192) == flops_per_token(untied, 8192), "the head multiplies all the same"


@pytest.mark.parametrize(("name", "query_width", "hidden"), [("qwen3_0.6B", 2048, 1024), ("qwen3_4B", 4096, 2560)])
def test_heads_may_be_wider_together_than_the_residual_stream(name: str, query_width: int, hidden: int) -> None:
    spec = load_model(name)
    assert (spec.num_attention_heads * head_dim(spec), spec.hidden_size) == (query_width, hidden)


def test_qwen2_5_differs_from_a_model_without_bias() -> None:
    spec = replace(load_model("qwen2.5_7B"), add_qkv_bias=False)
    assert count_parameters(spec).total_parameters == 7_615_487_488


@pytest.mark.parametrize(("name", "sequence", "causal", "full", "six_n"), GOLDEN_FLOPS)
def test_flops_per_token(name: str, sequence: int, causal: int, full: int, six_n: int) -> None:
    spec = load_model(name)
    assert flops_per_token(spec, sequence) == pytest.approx(causal, rel=1e-9)
    assert flops_per_token(spec, sequence, "full") == pytest.approx(full, rel=1e-9)
    assert flops_per_token(spec, sequence, "6N") == pytest.approx(six_n, rel=1e-9)


def test_flops_of_deepseek_v3_with_and_without_multi_token_prediction() -> None:
    spec = load_model("deepseek_v3")
    alone = replace(spec, mtp_num_layers=0)
    assert flops_per_token(spec, 4096) == pytest.approx(259992950784, rel=1e-9)
    assert flops_per_token(alone, 4096) == pytest.approx(249812054016, rel=1e-9)
    assert flops_per_token(spec, 4096, "full") == pytest.approx(281158321152, rel=1e-9)
    assert flops_per_token(spec, 4096, "6N") == pytest.approx(225313784832, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "ignored", "windowed"),
    [("gpt_oss_20B", 24045502464, 22911869952), ("gpt_oss_120B", 34330853376, 32630404608)],
)
def test_a_window_counts_only_where_it_is_asked_for(name: str, ignored: int, windowed: int) -> None:
    spec = load_model(name)
    assert flops_per_token(spec, 4096, "causal") == pytest.approx(ignored, rel=1e-9)
    assert flops_per_token(spec, 4096, "causal_window") == pytest.approx(windowed, rel=1e-9)
    assert flops_per_token(spec, 64, "causal_window") == flops_per_token(spec, 64, "causal")


def test_padding_the_vocabulary_adds_flops() -> None:
    spec = replace(load_model("llama3.1_8B"), vocab_size=131072)
    assert flops_per_token(spec, 8192) / 1e9 == pytest.approx(51.540, abs=1e-3)  # 11941.8 tok/s were 615.5 TFLOP/s


def test_every_second_layer_of_gpt_oss_has_a_window_beginning_with_the_first() -> None:
    assert [layer.window for layer in list_layers(load_model("gpt_oss_20B"))][:4] == [128, None, 128, None]


def test_the_first_layers_of_deepseek_are_dense() -> None:
    spec = load_model("deepseek_v3")
    assert [layer.moe for layer in list_layers(spec)][:4] == [False, False, False, True]
    assert num_moe_layers(spec) == 58


def dense(**changes: object) -> ModelSpec:
    shape = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 8, "vocab_size": 256}
    return ModelSpec(**(shape | changes))  # type: ignore[arg-type]


LATENT = {
    "multi_latent_attention": True,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
}

LINEAR = dict.fromkeys(
    ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"), 4
)
GROUPS = {"num_experts": 8, "moe_router_num_groups": 2}


@pytest.mark.parametrize(
    "changes",
    [
        {"num_query_groups": 8},
        {"num_attention_heads": 7, "kv_channels": 10},
        {"window_layer_period": 2, "window_size": 8},
        {"qk_layernorm_across_heads": True, "qk_layernorm": True},
        LATENT | {"num_attention_heads": 7, "q_lora_rank": 4},
        {"o_lora_rank": 4, "q_lora_rank": 4, "qk_pos_emb_head_dim": 2},
        {"rope_type": "llama3", "rotary_scaling_factor": 8.0, "rope_low_freq_factor": 3.5},
        {"rope_type": "yarn", "beta_slow": 32.0},
        {"hybrid_layer_pattern": "M*", "mamba_head_dim": 32},
        {"hybrid_layer_pattern": "*-", "mamba_head_dim": 60},  # a width that only a layer of kind M has
        {"hybrid_layer_pattern": "GK", **LINEAR},
        {"num_experts": 4, "moe_router_topk": 4},
        {"num_experts": 4, "first_k_dense_replace": 1},
        {"num_experts": 4, "moe_router_topk": 1, "moe_apply_probs_on_input": True},
        GROUPS | {"moe_router_group_topk": 2, "moe_router_topk": 8},
        GROUPS | {"moe_router_group_topk": 1, "moe_router_topk": 4},
    ],
)
def test_a_shape_at_the_edge_of_what_can_be_built_is_accepted(changes: dict[str, object]) -> None:
    check(dense(**changes))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_query_groups": 3}, "num_query_groups"),
        ({"num_attention_heads": 7}, "num_attention_heads"),
        ({"kv_channels": 7}, "kv_channels"),
        ({"hidden_size": 56}, "hidden_size"),
        ({"window_layer_period": 2}, "window_layer_period"),
        ({"hybrid_layer_pattern": "W*"}, "window_size"),
        ({"hybrid_layer_pattern": "G-"}, "linear_num_key_heads"),
        ({"hybrid_layer_pattern": "M", "mamba_head_dim": 60}, "mamba_head_dim"),
        ({"hybrid_layer_pattern": "*", "window_size": 8, "window_layer_period": 2}, "window_layer_period"),
        ({"qk_layernorm_across_heads": True}, "qk_layernorm_across_heads"),
        ({"kv_lora_rank": 16}, "kv_lora_rank"),
        ({"q_lora_rank": 16}, "q_lora_rank"),
        ({"multi_latent_attention": True}, "kv_lora_rank"),
        (LATENT | {"v_head_dim": None}, "v_head_dim"),
        (LATENT | {"qk_pos_emb_head_dim": 3}, "qk_pos_emb_head_dim"),
        (LATENT | {"qk_layernorm": True}, "qk_layernorm"),
        ({"rotary_scaling_factor": 8.0}, "rotary_scaling_factor"),
        ({"rope_type": "llama3", "rope_low_freq_factor": 4.0}, "rope_low_freq_factor"),
        ({"rope_type": "yarn", "beta_slow": 32.5}, "beta_slow"),
        ({"moe_ffn_hidden_size": 32}, "moe_ffn_hidden_size"),
        ({"moe_router_topk": 4}, "moe_router_topk"),
        ({"first_k_dense_replace": 1}, "first_k_dense_replace"),
        ({"num_hash_layers": 1}, "num_hash_layers"),
        ({"num_experts": 4, "moe_router_topk": 5}, "moe_router_topk"),
        ({"num_experts": 4, "first_k_dense_replace": 2}, "first_k_dense_replace"),
        ({"num_experts": 4, "moe_router_group_topk": 2}, "moe_router_num_groups"),
        ({"num_experts": 4, "moe_router_num_groups": 2}, "moe_router_group_topk"),
        ({"num_experts": 4, "moe_router_num_groups": 3, "moe_router_group_topk": 1}, "moe_router_num_groups"),
        ({"num_experts": 4, "moe_router_num_groups": 2, "moe_router_group_topk": 3}, "moe_router_group_topk"),
        ({"num_experts": 4, "moe_router_num_groups": 4, "moe_router_group_topk": 1}, "moe_router_group_topk"),
        ({"num_experts": 4, "moe_apply_probs_on_input": True}, "moe_apply_probs_on_input"),
        (LATENT | {"kv_lora_rank": None}, "kv_lora_rank"),
        (LATENT | {"qk_head_dim": None}, "qk_head_dim"),
        (LATENT | {"qk_pos_emb_head_dim": None}, "qk_pos_emb_head_dim"),
        (LATENT | {"add_qkv_bias": True}, "add_qkv_bias"),
        (LATENT | {"add_bias_linear": True}, "add_bias_linear"),
        (LATENT | {"attention_sinks": True}, "attention_sinks"),
        ({"o_lora_rank": 4, "kv_lora_rank": 16}, "kv_lora_rank"),
        ({"hybrid_layer_pattern": "*K", **LINEAR, "linear_value_head_dim": None}, "linear_value_head_dim"),
        ({"hybrid_layer_pattern": "H", "window_size": 8, "o_lora_rank": 4}, "q_lora_rank"),
        ({"hybrid_layer_pattern": "S", "window_size": 8, "q_lora_rank": 4, "o_lora_rank": 4}, "dsa_indexer_n_heads"),
    ],
)
def test_an_impossible_shape_is_refused_by_the_key_to_change(changes: dict[str, object], key: str) -> None:
    with pytest.raises(UsageError) as caught:
        check(dense(**changes))
    assert caught.value.problem.startswith(f"{key}: ")
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "layout", "seq_length", "key"),
    [
        ("llama3.1_8B", {"tensor_model_parallel_size": 3}, None, "tensor_model_parallel_size"),
        ("llama3.2_3B", {"tensor_model_parallel_size": 12}, None, "tensor_model_parallel_size"),
        ("qwen2.5_0.5B", {"tensor_model_parallel_size": 7}, None, "tensor_model_parallel_size"),
        ("llama3.1_405B", {"pipeline_model_parallel_size": 8}, None, "pipeline_model_parallel_size"),
        ("llama3.1_8B", {"expert_model_parallel_size": 2}, None, "expert_model_parallel_size"),
        ("mixtral_8x7B_v0.1", {"expert_model_parallel_size": 3}, None, "expert_model_parallel_size"),
        ("llama3.1_8B", {"sequence_parallel": True}, None, "sequence_parallel"),
        ("llama3.1_8B", {"context_parallel_size": 4}, 4100, "seq_length"),
        ("llama3.1_8B", {"tensor_model_parallel_size": 8, "sequence_parallel": True}, 4100, "seq_length"),
        ("llama3.1_8B", {"context_parallel_size": 2}, 4098, "seq_length"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(
    name: str, layout: dict[str, object], seq_length: int | None, key: str
) -> None:
    with pytest.raises(UsageError) as caught:
        check_parallel(load_model(name), ParallelConfig(**layout), seq_length)  # type: ignore[arg-type]
    assert caught.value.problem.startswith(f"{key}: ")


def test_the_message_of_a_wrong_layout_names_sizes_that_work() -> None:
    with pytest.raises(UsageError) as caught:
        check_parallel(load_model("llama3.1_8B"), ParallelConfig(tensor_model_parallel_size=3))
    assert str(caught.value) == (
        "tensor_model_parallel_size: 3 does not divide num_attention_heads 32\n  use one of 1, 2, 4, 8, 16, 32"
    )


def test_the_message_names_the_line_where_the_key_was_set() -> None:
    with pytest.raises(UsageError) as caught:
        check(dense(num_query_groups=3), {"num_query_groups": "exp.yaml:12"})
    assert caught.value.problem == "exp.yaml:12: num_query_groups: 3 does not divide num_attention_heads 8"
    with pytest.raises(UsageError) as caught:
        check(dense(multi_latent_attention=True), {"kv_lora_rank": "default"})
    assert caught.value.problem == "kv_lora_rank: latent attention needs it"


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama3.1_8B", {"tensor_model_parallel_size": 16, "context_parallel_size": 2}),  # key/value heads repeated
        ("llama3.1_405B", {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 9}),
        ("deepseek_v3", {"expert_model_parallel_size": 64, "tensor_model_parallel_size": 4}),
        ("gpt_oss_120B", {"expert_model_parallel_size": 8, "sequence_parallel": True, "tensor_model_parallel_size": 2}),
        ("deepseek_v3", {"tensor_model_parallel_size": 128}),  # latent attention shares no key/value heads
    ],
)
def test_a_layout_that_divides_the_model_is_accepted(name: str, layout: dict[str, object]) -> None:
    check_parallel(load_model(name), ParallelConfig(**layout), 8192)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "layout", "key"),
    [
        ({"ffn_hidden_size": 12}, {"tensor_model_parallel_size": 8}, "ffn_hidden_size 12"),
        ({"num_experts": 4, "ffn_hidden_size": 16, "moe_ffn_hidden_size": 12}, {"tensor_model_parallel_size": 8},
         "moe_ffn_hidden_size 12"),
        ({"num_experts": 4, "ffn_hidden_size": 12, "moe_ffn_hidden_size": 16}, {"tensor_model_parallel_size": 8}, ""),
        ({"num_experts": 4, "ffn_hidden_size": 12, "moe_ffn_hidden_size": 16, "first_k_dense_replace": 1},
         {"tensor_model_parallel_size": 8}, "ffn_hidden_size 12"),
        ({"num_attention_heads": 12, "hidden_size": 96, "ffn_hidden_size": 96, "num_query_groups": 4},
         {"tensor_model_parallel_size": 6}, "num_query_groups 4"),
        ({}, {"expert_model_parallel_size": 1}, ""),
        ({"num_experts": 4}, {"expert_model_parallel_size": 4}, ""),
    ],
)  # fmt: skip
def test_widths_of_dense_layers_and_of_experts_are_divided_where_there_are_such_layers(
    changes: dict[str, object], layout: dict[str, object], key: str
) -> None:
    found = list(find_parallel_problems(dense(**changes), ParallelConfig(**layout), 64))  # type: ignore[arg-type]
    assert [key for problem in found if key in problem.text] == ([key] if key else [])
    assert len(found) == bool(key)


def test_settings_of_megatron_lm_may_place_layers_unevenly_and_nothing_else() -> None:
    assert has_own_stages({"decoder_first_pipeline_num_layers": 5})
    assert not has_own_stages({"decoder_first_pipeline_num_layers": None, "seed": 5})
    uneven = ParallelConfig(pipeline_model_parallel_size=3)
    check_parallel(dense(num_layers=4), uneven, has_own_stages=True)
    with pytest.raises(UsageError, match="pipeline_model_parallel_size: 3 does not divide num_layers 4"):
        check_parallel(dense(num_layers=4), uneven)
    with pytest.raises(UsageError, match="seq_length"):
        check_parallel(dense(num_layers=3), replace(uneven, context_parallel_size=2), 66, has_own_stages=True)


SHAPES = st.builds(
    dense,
    num_layers=st.integers(1, 4),
    hidden_size=st.integers(1, 96),
    num_attention_heads=st.integers(1, 12),
    num_query_groups=st.none() | st.integers(1, 12),
    kv_channels=st.none() | st.integers(1, 32),
    vocab_size=st.integers(1, 300),
    untie_embeddings_and_output_weights=st.booleans(),
    add_qkv_bias=st.booleans(),
    qk_layernorm=st.booleans(),
    num_experts=st.none() | st.integers(1, 8),
    moe_router_topk=st.integers(1, 4),
)


@given(SHAPES)
def test_an_accepted_shape_has_the_parameters_of_its_tensors(spec: ModelSpec) -> None:
    try:
        check(spec)
    except UsageError:
        return
    assert count_parameters(spec).total_parameters == sum(rows * columns for rows, columns in tensors(spec))
    assert flops_per_token(spec, 128, "full") > flops_per_token(spec, 128, "causal") > 0


def tensors(spec: ModelSpec) -> list[tuple[int, int]]:
    """Shapes of all weights of a Llama, Qwen or Mixtral model, as their Hugging Face files list them."""
    h, f, d = spec.hidden_size, spec.ffn_hidden_size, head_dim(spec)
    q, kv = spec.num_attention_heads * d, num_query_groups(spec) * d
    found = [(spec.vocab_size, h), (1, h)]
    if spec.untie_embeddings_and_output_weights:
        found.append((spec.vocab_size, h))
    for _ in range(spec.num_layers):
        found += [(1, h), (1, h), (q, h), (kv, h), (kv, h), (h, q)]
        found += [(1, q), (1, kv), (1, kv)] if spec.add_qkv_bias else []
        found += [(1, d), (1, d)] if spec.qk_layernorm else []
        found += [(spec.num_experts, h)] if spec.num_experts else []
        found += [(f, h), (f, h), (h, f)] * (spec.num_experts or 1)
    return found
