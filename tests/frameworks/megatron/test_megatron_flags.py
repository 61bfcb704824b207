"""Arguments of Megatron-LM and its forks become settings; what an absent one means is what Megatron-LM does then."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from primus.config.imports.foreign_config import ForeignConfig
from primus.config.imports.launch_line import find_launches
from primus.config.imports.write_file import format_result
from primus.config.schema import GROUPS, OWNERS
from primus.errors import UsageError
from primus.frameworks.megatron import known_keys
from primus.frameworks.megatron.defaults import DEPENDENT, EQUIVALENT, LATER, NEEDED, list_defaults
from primus.frameworks.megatron.import_file import MegatronFlags, read_arguments

SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --micro-batch-size 1"
LLAMA = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --swiglu --norm-epsilon 1e-5 "
    "--untie-embeddings-and-output-weights --disable-bias-linear"
)

OF_FORKS = ("mscale_all_dim", "rotary_scaling_factor")
"""Keys whose default differs from ours in older releases or forks alone."""
ABSENT = {
    # _add_network_size_args, _add_initialization_args, _add_moe_args, TransformerConfig
    "untie_embeddings_and_output_weights": False,
    "add_bias_linear": True,
    "moe_router_pre_softmax": False,
    # TrainingConfig, OptimizerConfig, SchedulerConfig
    "bf16": False,
    "lr_decay_style": "linear",
    "weight_decay": 0.01,
    "adam_beta2": 0.999,
    "eval_interval": 1000,
    "eval_iters": 100,
    "log_interval": 100,
    # _add_data_args, validate_args
    "split": "969, 30, 1",
    "num_workers": 2,
    # DistributedDataParallelConfig, DistributedInitConfig, CheckpointConfig
    "use_distributed_optimizer": False,
    "distributed_timeout_minutes": 10,
    "async_save": False,
}
"""Read in megatron/training of Megatron-LM core_v0.16.1, by hand: every default that trains otherwise than ours."""

SAME = {
    "norm_epsilon": 1e-5,
    "init_method_std": 0.02,
    "rotary_base": 10000,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.0,
    "moe_router_score_function": "softmax",
    "seed": 1234,
    "min_lr": 0.0,
    "adam_beta1": 0.9,
    "adam_eps": 1e-8,
    "clip_grad": 1.0,
    "lr_warmup_iters": 0,
}
"""Read there, too: defaults that are ours as well. If one of ours changes, the import has to write it."""


def translate(line: str) -> ForeignConfig:
    target = ForeignConfig(origin="a script", name="script", framework="megatron")
    launch = find_launches([["pretrain_gpt.py", *line.split()]]).launches[0]
    MegatronFlags({name: list(values) for name, values in launch.arguments.items()}, target).translate()
    return target


def list_reasons(config: ForeignConfig) -> dict[str, str]:
    return {each.key: each.reason for each in config.warnings}


def get_default(key: str) -> Any:
    return next(field.default for field in structs.fields(GROUPS[OWNERS[key]]) if field.name == key)


def test_what_an_absent_argument_means_is_written_where_primus_does_otherwise() -> None:
    assert dict(list_defaults((), {})) == ABSENT
    config = translate(f"{SHAPE} --num-experts 4")
    assert {key: (config.model | config.settings)[key] for key in ABSENT} == ABSENT
    assert "moe_router_pre_softmax" not in translate(SHAPE).model


@pytest.mark.parametrize("key", SAME)
def test_defaults_that_are_not_written_are_those_of_primus(key: str) -> None:
    assert get_default(key) == SAME[key]


def test_every_default_of_the_parser_that_differs_is_accounted_for() -> None:
    arguments = known_keys.read_arguments().keys
    differing = {
        key
        for key in OWNERS
        if key in arguments and arguments[key].default is not None and arguments[key].default != get_default(key)
    }
    dependent = {key for keys in DEPENDENT.values() for key in keys if key not in OF_FORKS}
    assert differing == ({*ABSENT} - {*LATER}) | dependent | {*EQUIVALENT}


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        (
            "--multi-latent-attention",
            {"kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128},
        ),
        ("--fim-data", {"fim_rate": 0.5}),
        ("--experimental-attention-variant gated_delta_net", {"linear_num_key_heads": 16, "linear_key_head_dim": 128}),
    ],
)
def test_defaults_of_a_feature_hold_only_with_it(argument: str, values: dict[str, Any]) -> None:
    found = translate(f"{SHAPE} {argument}")
    assert (found.model | found.settings).items() >= values.items()
    plain = translate(SHAPE)
    assert not (plain.model | plain.settings).keys() & values.keys()


def test_only_a_negative_number_of_evaluations_is_a_warning() -> None:
    assert "--eval-iters" in list_reasons(translate(f"{SHAPE} --eval-iters -1"))
    assert "--eval-iters" not in list_reasons(translate(f"{SHAPE} --eval-iters 0"))


def test_a_rate_without_its_switch_has_no_effect() -> None:
    assert "fim_rate" not in translate(f"{SHAPE} --fim-rate 0.5").settings
    assert translate(f"{SHAPE} --fim-rate 0.25 --fim-data").settings["fim_rate"] == 0.25


@pytest.mark.parametrize("name", NEEDED)
def test_what_primus_always_does_is_a_warning_unless_the_script_says_it(name: str) -> None:
    said = f"{SHAPE} --swiglu --normalization RMSNorm --position-embedding-type rope --hidden-dropout 0 "
    said += "--attention-dropout 0.0"
    flag = f"--{name.replace('_', '-')}"
    assert not list_reasons(translate(said))
    words = said.split()
    at = words.index(flag)
    without = words[:at] + words[at + (1 if name == "swiglu" else 2) :]
    assert list(list_reasons(translate(" ".join(without)))) == [f"{flag} (absent)"]


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        ("--checkpoint-activations", "recompute_activations", True),  # whole layers, as Megatron-DeepSpeed did
        ("--recompute-activations", "recompute_granularity", "selective"),
        ("--zero-stage 1", "use_distributed_optimizer", True),
        ("--zero-stage 0", "use_distributed_optimizer", False),
        ("--add-qkv-bias-linear", "add_qkv_bias", True),
        ("--glu-activation geglu", "ffn_activation", "gelu"),
        ("--tokenizer-name-or-path org/name", "tokenizer_model", "org/name"),
        ("--num-experts 4 --moe-layer-freq -1 --first-k-dense-replace -1", "first_k_dense_replace", None),
        ("--num-experts 4 --moe-router-score-function sigmoid", "moe_router_norm_topk_prob", True),
        ("--window-size 4095,0", "window_size", 4096),
        ("--no-async-save", "async_save", False),
        ("--eval-iters -1", "eval_iters", 0),
        ("--eval-iters 0", "eval_iters", 0),
        ("--eval-iters 1", "eval_iters", 1),
        ("--swiglu --hidden-size 1024", "ffn_hidden_size", 2688),  # two thirds of 4 h, in multiples of 64
        ("--hidden-size 1024", "ffn_hidden_size", 4096),
        ("--tokenizer-type NullTokenizer --vocab-size 99 --make-vocab-size-divisible-by 1", "vocab_size", 100),
        ("--make-vocab-size-divisible-by 64", "make_vocab_size_divisible_by", 64),
        ("--make-vocab-size-divisible-by 128", "make_vocab_size_divisible_by", None),
    ],
)
def test_arguments_of_forks_and_of_other_ages_have_their_key(flags: str, key: str, value: Any) -> None:
    config = translate(f"{SHAPE} {flags}")
    assert (config.model | config.settings).get(key) == value
    names = {word for word in flags.split() if word.startswith("--")} - {"--eval-iters"}
    assert not names & list_reasons(config).keys()


@pytest.mark.parametrize(
    "flags",
    ["--glu-activation swiglu", "--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0"],
)
def test_a_gated_feed_forward_is_one_by_any_name(flags: str) -> None:
    assert "--swiglu (absent)" not in list_reasons(translate(f"{SHAPE} {flags}"))


@pytest.mark.parametrize("flags", ["--glu-activation liglu", "--quick-geglu", "--squared-relu"])
def test_another_gate_is_a_warning(flags: str) -> None:
    assert "--swiglu (absent)" in list_reasons(translate(f"{SHAPE} {flags}"))


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ("--train-samples 1000", {"train_iters": 100}),
        ("--train-samples 1000 --lr-wsd-decay-samples 55", {"train_iters": 100, "lr_wsd_decay_iters": 5}),
        ("--train-tokens 800 --train-samples 1000", {"train_iters": 10}),  # the tokens end it first
        ("--train-tokens 80000 --train-iters 7", {"train_iters": 7}),
        ("--lr-warmup-tokens 160 --lr-warmup-samples 10", {"lr_warmup_iters": 2}),
        ("--lr-decay-tokens 8000", {"lr_decay_iters": 100}),
    ],
)
def test_lengths_in_samples_and_tokens_are_steps(flags: str, steps: dict[str, int]) -> None:
    config = translate(f"{SHAPE} --global-batch-size 10 {flags}")
    lengths = {key: value for key, value in config.settings.items() if key.endswith("_iters") and key != "eval_iters"}
    assert lengths == steps


def test_lengths_without_the_size_of_a_step_are_warnings() -> None:
    reasons = list_reasons(translate(f"{SHAPE} --train-samples 1000 --lr-warmup-tokens 5"))
    assert reasons["--train-samples"] == "needs global_batch_size to be steps"
    assert reasons["--lr-warmup-tokens"] == "needs global_batch_size and seq_length to be steps"


def test_a_batch_that_grows_is_a_warning_and_not_a_setting_that_is_refused() -> None:
    config = translate(f"{SHAPE} --global-batch-size 64 --rampup-batch-size 16 16 1000")
    assert "begins" in list_reasons(config)["--rampup-batch-size"]
    assert "rampup_batch_size" not in config.settings


@pytest.mark.parametrize("flag", ["--perform-rl-step", "--lion-beta1 0.9"])
def test_another_task_or_optimizer_is_said(flag: str) -> None:
    config = translate(f"{SHAPE} {flag}")
    assert "another task or optimizer" in list_reasons(config)[flag.split()[0]]
    assert not [key for key in config.settings if key.startswith(("perform", "lion"))]


@pytest.mark.parametrize(
    ("flags", "kind", "model", "reason"),
    [
        ("PretrainedFromHF --tokenizer-name-or-path a/b", "HuggingFaceTokenizer", "a/b", ""),
        ("TokenizerFromFile --vocab-file t/tokenizer.json", "HuggingFaceTokenizer", "t/tokenizer.json", ""),
        ("Qwen2Tokenizer --tokenizer-model q", "HuggingFaceTokenizer", "q", "not a tokenizer of Megatron-LM, and read"),
        ("Qwen2Tokenizer", None, None, "set tokenizer_type and tokenizer_model"),
        ("Llama2Tokenizer --tokenizer-model x.model", "Llama2Tokenizer", "x.model", ""),
    ],
)
def test_tokenizers_of_forks_are_those_of_transformers(
    flags: str, kind: str | None, model: str | None, reason: str
) -> None:
    config = translate(f"{SHAPE} --tokenizer-type {flags}")
    assert (config.settings.get("tokenizer_type"), config.settings.get("tokenizer_model")) == (kind, model)
    found = list_reasons(config).get("--tokenizer-type", "")
    assert reason in found
    assert bool(reason) == bool(found)


@pytest.mark.parametrize(
    ("tokenizer", "size"),
    [("gpt2", 50257), ("openai-community/gpt2", 50257), ("Qwen/Qwen1.5-7B", 151936), ("bigscience/bloom", 250880)],
)
def test_the_vocabulary_of_a_published_tokenizer_is_known(tokenizer: str, size: int) -> None:
    flags = f"{LLAMA} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tokenizer}"
    assert f"vocab_size: {size}" in format_result(translate(flags))


@pytest.mark.parametrize("flags", ["--tokenizer-model /data/nordic.model", "--vocab-file /data/nordic/vocab.json"])
def test_a_named_tokenizer_is_asked_for_and_not_guessed_from_the_shape(flags: str) -> None:
    assert "vocab_size is that" not in str(list_reasons(translate(f"{LLAMA} {flags}")))
    with pytest.raises(UsageError) as caught:
        format_result(translate(f"{LLAMA} {flags}"))
    assert "is not on this machine" in str(caught.value)
    assert "the published model with this shape has 32000" in str(caught.value.hint)


def test_arguments_without_a_value_are_reported_and_become_no_value() -> None:
    config = translate(f"{SHAPE} --vocab-size 512 --data-path --tokenizer-type GPT2BPETokenizer --lr --bf16")
    assert "train_data_path" not in config.settings
    assert "lr" not in config.settings
    assert config.settings["bf16"] is True
    assert [each.key for each in config.warnings if each.reason == "has no value in the script"] == [
        "--data-path",
        "--lr",
    ]


@pytest.mark.parametrize(
    ("argument", "groups"),
    [("--num-key-value-heads 2", 2), ("--attention-head-type multiquery", 1), ("--attention-head-type multihead", 4)],
)
def test_grouped_attention_of_forks_needs_no_switch(argument: str, groups: int) -> None:
    config = translate(f"{SHAPE} {argument}")
    assert config.model["num_query_groups"] == groups
    assert groups == 4 or "--attention-head-type" not in list_reasons(config)


def test_groups_of_megatron_lm_need_their_switch() -> None:
    assert translate(f"{SHAPE} --num-query-groups 2").model["num_query_groups"] == 4


def test_names_in_small_letters_state_what_they_state_in_large_ones() -> None:
    assert "--normalization" not in [each.key for each in translate(f"{SHAPE} --normalization rmsnorm").warnings]
    assert "--normalization" in [each.key for each in translate(f"{SHAPE} --normalization layernorm").warnings]


@pytest.mark.parametrize("name", ["padded-vocab-size", "pad-vocab-size-to"])
def test_rows_of_the_embedding_are_the_vocabulary_if_nothing_else_states_it(name: str) -> None:
    assert translate(f"{SHAPE} --{name} 640").model["vocab_size"] == 640
    assert translate(f"{SHAPE} --{name} 640 --vocab-size 600").model["vocab_size"] == 600


def test_experts_of_megatron_deepspeed_are_chosen_one_at_a_time_and_their_layers_are_reported() -> None:
    config = translate(f"{SHAPE} --num-experts 8 --moe-loss-coeff 0.02 --deepspeed")
    assert (config.model["moe_router_topk"], config.model["moe_aux_loss_coeff"]) == (1, 0.02)
    assert any("set moe_layer_freq" in each.reason for each in config.warnings if each.key == "--expert-interval")
    assert translate(f"{SHAPE} --num-experts 8 --topk 2 --deepspeed").model["moe_router_topk"] == 2
    assert "moe_router_topk" not in translate(f"{SHAPE} --num-experts 8").model


@pytest.mark.parametrize(("kind", "is_warning"), [("none", False), ("sinkhorn", False), ("balance_of_a_fork", True)])
def test_a_coefficient_without_its_loss_is_said(kind: str, is_warning: bool) -> None:
    config = translate(f"{SHAPE} --num-experts 4 --moe-aux-loss-coeff 0.5 --moe-router-load-balancing-type {kind}")
    assert "moe_aux_loss_coeff" not in config.model
    assert [bool(each.reason) for each in config.others if each.key == "--moe-aux-loss-coeff"] == [is_warning]


def test_a_coefficient_with_its_loss_is_kept() -> None:
    config = translate(
        f"{SHAPE} --num-experts 4 --moe-aux-loss-coeff 0.5 --moe-router-load-balancing-type seq_aux_loss"
    )
    assert config.model["moe_aux_loss_coeff"] == 0.5


@pytest.mark.parametrize(("written", "layers"), [("", 1), (" --activations-checkpoint-num-layers 4", 4)])
def test_recomputation_of_2022_has_its_names_of_today(written: str, layers: int) -> None:
    """As examples/pretrain_gpt_distributed.sh of uw-mad-dash/MCBench."""
    settings = translate(f"{SHAPE} --activations-checkpoint-method uniform{written}").settings
    wanted = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": layers}
    assert {name: settings[name] for name in wanted} == wanted


def test_a_length_of_less_than_a_step_is_one_and_told() -> None:
    """As examples_deepspeed/ds_pretrain_gpt.sh of liukeTT/Megatron-DeepSpeed-TT: 100 sequences in batches of 512."""
    config = translate(f"{SHAPE} --global-batch-size 512 --lr-decay-samples 100")
    assert config.settings["lr_decay_iters"] == 1
    assert "less than a step" in list_reasons(config)["--lr-decay-samples"]
    assert translate(f"{SHAPE} --global-batch-size 512 --lr-warmup-samples 0").settings["lr_warmup_iters"] == 0


@pytest.mark.parametrize(
    ("program", "is_told"),
    [("pretrain_gpt.py", False), ("tools/pretrain_llama.py", False), ("train.py", False), ("x/pretrain_rwkv.py", True)],
)
def test_a_program_that_is_not_known_is_read_and_told(program: str, is_told: bool) -> None:
    target = ForeignConfig(origin="a script", name="script", framework="megatron")
    read_arguments(find_launches([["python", program, *SHAPE.split()]]).launches[0].arguments, target)
    assert target.model["num_layers"] == 2
    assert ("pretrain_rwkv.py" in list_reasons(target)) == is_told


def test_a_hybrid_is_told_and_not_left_to_the_engine() -> None:
    """As examples/qwen3_next/run_mcore_qwen3_lite.sh of alibaba/Pai-Megatron-Patch."""
    config = translate(f"{SHAPE} --is-hybrid-model --hybrid-override-pattern M-*- --hybrid-mlp-ratio 0.0")
    assert {"--is-hybrid-model", "--hybrid-override-pattern"} <= list_reasons(config).keys()
    assert not any("hybrid" in name for name in [*config.settings, *config.model] if name != "hybrid_mlp_ratio")


@pytest.mark.parametrize(("kind", "is_told"), [("MMAP", False), ("JSON-SFT", True)])
def test_the_kind_of_data_of_a_fork_is_no_data_set(kind: str, is_told: bool) -> None:
    config = translate(f"{SHAPE} --dataset {kind} --data-path a/b")
    assert "dataset" not in config.settings and config.settings["train_data_path"] == "a/b"
    assert ("--dataset" in list_reasons(config)) == is_told


def test_the_warm_up_of_2019_is_a_share_of_the_steps() -> None:
    """As scripts/pretrain_gpt2_model_parallel.sh of JF-D/Megatron-LM."""
    config = translate(f"{SHAPE} --warmup .01 --model-parallel-size 2 --batch-size 8")
    assert config.settings["lr_warmup_fraction"] == 0.01
    assert "warmup" not in config.settings
