"""Scripts of Megatron-LM become experiments: what is static is read, what only a run can tell is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from primus.cli.main import main
from primus.config.exports.write_file import format_foreign_file
from primus.config.extended_files import load_model
from primus.config.imports.foreign_config import ForeignConfig, make_model
from primus.config.imports.read_file import read_foreign_file
from primus.config.imports.write_file import format_result
from primus.config.load import load_experiment
from primus.errors import UsageError
from primus.experiment import resolve_experiment
from primus.models.counts import count_parameters

SCRIPT = """\
#!/bin/bash
# Llama 3.1 8B
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=8
NODES=${NODES:-2}
TP=${TP:-2}   # tensor parallel
DATA=${1:-MOCK}
SAVE="$2"

DISTRIBUTED_ARGS=(--nproc_per_node $GPUS --nnodes $NODES)
MODEL_ARGS="
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --max-position-embeddings 131072 --normalization RMSNorm --swiglu
    --position-embedding-type rope --rotary-base 500000 --use-rope-scaling
    --untie-embeddings-and-output-weights --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0.0
"
TRAINING_ARGS=(
    --micro-batch-size 2
    --global-batch-size $(( GPUS * NODES * 4 ))
    --seq-length 8192 # tokens
    --train-iters 500 --lr 3e-4 --min-lr=3e-5
    "--lr-decay-style cosine"
    --bf16
)
if [ "$DATA" == "MOCK" ] || [[ -z "$DATA" ]]; then
    DATA_ARGS=(--mock-data --split '99,1,0' --vocab-size 128256)
else
    DATA_ARGS=(--data-path $DATA)
fi
if [[ $TP -gt 1 ]]; then
    TRAINING_ARGS+=(--sequence-parallel)
fi
if [ -f "$SAVE/latest" ]; then
    TRAINING_ARGS+=(--finetune)
fi
CMD="torchrun ${DISTRIBUTED_ARGS[@]} /opt/megatron/pretrain_gpt.py $MODEL_ARGS ${TRAINING_ARGS[@]} ${DATA_ARGS[@]} \\
    --tensor-model-parallel-size ${TP} --overlap-grad-reduce --save $SAVE --wandb-save-dir `pwd`/w --mystery-flag 7"
echo "$CMD"
eval $CMD 2>&1 | tee log.txt
"""


def read_script(folder: Path, text: str, **environ: str) -> ForeignConfig:
    file = folder / "pretrain.sh"
    file.write_text(text)
    return read_foreign_file(file, environ)


def list_reasons(config: ForeignConfig) -> dict[str, str]:
    return {each.key: each.reason for each in config.warnings}


def test_variables_arrays_branches_and_arithmetic_are_evaluated(tmp_path: Path) -> None:
    config = read_script(tmp_path, SCRIPT)
    assert count_parameters(make_model(config)) == count_parameters(load_model("llama3.1_8B"))
    for key, value in {
        "micro_batch_size": 2,
        "global_batch_size": 64,
        "seq_length": 8192,
        "lr": 3e-4,
        "min_lr": 3e-5,
        "lr_decay_style": "cosine",
        "mock_data": True,
        "split": "99,1,0",
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "adam_beta2": 0.999,  # Megatron-LM's default
        "weight_decay": 0.01,
    }.items():
        assert config.settings[key] == value, key
    assert config.model["rope_type"] == "llama3"


def test_variables_of_the_shell_count(tmp_path: Path) -> None:
    config = read_script(tmp_path, SCRIPT, TP="4", NODES="8")
    assert config.settings["tensor_model_parallel_size"] == 4
    assert config.settings["global_batch_size"] == 256


def test_what_only_a_run_can_tell_is_named(tmp_path: Path) -> None:
    reasons = list_reasons(read_script(tmp_path, SCRIPT.replace("`pwd`", "`date +%F`")))
    assert "--mock-data" in reasons["arguments of the script"]
    assert "$(date +%F)" in reasons["--wandb-save-dir"]
    assert "depends on whether /latest exists" in reasons["--finetune"]
    assert "not a known argument" in reasons["--mystery-flag"]


def test_nothing_of_a_script_is_executed(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    traps = f"X=$(touch {trap}); `touch {trap}`\ntouch {trap}\n"
    config = read_script(tmp_path, f"{traps}python pretrain_gpt.py --num-layers 2 --lr $X --hidden-size 8\n")
    assert not trap.exists()
    assert config.model["num_layers"] == 2
    assert "--lr" in list_reasons(config)


def test_a_secret_of_the_shell_stays_out(tmp_path: Path) -> None:
    text = "python pretrain_gpt.py --num-layers 2 --hidden-size 8 --wandb-exp-name $WANDB_API_KEY --lr 1\n"
    config = read_script(tmp_path, text, WANDB_API_KEY="canary")
    assert "canary" not in str(config)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ARGS=(\n --lr 1\n", "unexpected EOF while looking for matching `)'"),
        ("python pretrain_gpt.py --lr '1\n", "unexpected EOF while looking for matching `''"),
        ("rocminfo\nls -l\n", "its commands: rocminfo, ls"),
        ("source conf/llama.sh\npython $SCRIPT\n", "conf/llama.sh (line 1) is read by the script and is not here"),
        (
            "python pretrain_bert.py --num-layers 2 --hidden-size 8\n",
            "pretrain_bert.py pre-trains no decoder that primus has",
        ),
        (
            "python posttrain_gpt.py --stage dpo --num-layers 2 --hidden-size 8\n",
            "posttrain_gpt.py pre-trains no decoder",
        ),
        ("python pretrain_samba.py --num-layers 2 --hidden-size 8\n", "pretrain_samba.py pre-trains no decoder"),
        (
            "ray job submit -- python3 train.py --num-layers 2 --hidden-size 8 --num-rollout 9 --rm-type math --lr 1\n",
            "starts post-training of slime or a fork of it, by --num-rollout and --rm-type",
        ),
        (
            "mimo/train.py --num-layers 2 --hidden-size 8 --model-provider mock --dataset-provider x\n",
            "trains a model of images or sound, by --model-provider and --dataset-provider",
        ),
        (
            "torchrun train.py --num-layers 2 --hidden-size 8 --freeze-LM --img-h 336 --img-w 336\n",
            "trains a model of images or sound, by --freeze-LM and --img-h",
        ),
        (
            "torchrun pretrain_gpt.py --yaml-cfg conf/gpt.yaml --split 99,1,0\n",
            "has its settings in conf/gpt.yaml (--yaml-cfg), which is not read",
        ),
        (
            "torchrun pretrain_llama.py --num-tokens 4096 --num-layers 4 --tp-size 8\n",
            "the arguments of its program pretrain_llama.py are those of neither",
        ),
        (
            "python3 -m MaxText.sft_trainer MaxText/configs/sft.yml model_name=llama3.1-8b steps=5\n",
            "starts fine-tuning or distillation of MaxText (MaxText.sft_trainer)",
        ),
    ],
)
def test_a_script_that_cannot_be_read_says_why(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_script(tmp_path, text)
    assert told in str(caught.value)


def test_a_script_without_the_shape_names_the_variables_that_it_reads(tmp_path: Path) -> None:
    line = "pretrain_gpt.py --num-layers $DEPTH --hidden-size $WIDTH --seq-length 64 --lr 1 --micro-batch-size 1"
    with pytest.raises(UsageError, match="num_layers, hidden_size") as caught:
        format_result(read_script(tmp_path, f"set -u\n{line}\n"))
    assert "the script does not set $DEPTH, $WIDTH: config import 'DEPTH=VALUE ... bash FILE'" in str(caught.value.hint)


def test_an_argument_in_two_variables_is_counted_once(tmp_path: Path) -> None:
    text = "A=(--num-layers 2 --cp 4)\nB=\"--num-layers 2\"\nsrun bash -c 'x'\n"
    with pytest.raises(UsageError, match="no command with arguments of"):
        read_script(tmp_path, text)


def test_several_values_are_a_path_with_blanks_or_reported(tmp_path: Path) -> None:
    line = (
        "FOLDER='my runs'\npretrain_gpt.py --num-layers 2 --hidden-size 8 --lr 1 --global-batch-size 10 --train-iters 2"
    )
    config = read_script(
        tmp_path, f"{line} --pretrained-checkpoint $FOLDER/a --rampup-batch-size 1 2 3 --timing-log-level 1 2\n"
    )
    assert config.settings["pretrained_checkpoint"] == "my runs/a"
    assert list_reasons(config)["--timing-log-level"] == "takes one value, and has 2"


def test_a_path_with_braces_is_no_mapping(tmp_path: Path) -> None:
    line = "pretrain_gpt.py --num-layers 2 --hidden-size 8 --lr 1 --data-path {GPT_data_path}"
    assert read_script(tmp_path, f"{line}\n").settings["train_data_path"] == "{GPT_data_path}"


def test_an_argument_that_names_a_column_is_no_secret(tmp_path: Path) -> None:
    line = "pretrain_gpt.py --num-layers 2 --hidden-size 8 --lr 1 --label-key answer --hub-api-key hf_abcdefghijkl"
    reasons = list_reasons(read_script(tmp_path, f"{line}\n"))
    assert "secret" not in reasons["--label-key"]
    assert "secret" in reasons["--hub-api-key"]


def test_lengths_in_samples_become_steps(tmp_path: Path) -> None:
    line = "pretrain_gpt.py --num-layers 2 --hidden-size 8 --global-batch-size 10 --train-samples 1000"
    config = read_script(tmp_path, f"{line} --lr-warmup-samples 50 --lr-decay-samples 900 --lr 1\n")
    assert [config.settings[key] for key in ("train_iters", "lr_warmup_iters", "lr_decay_iters")] == [100, 5, 90]


def test_resuming_from_the_folder_of_checkpoints_is_auto_continue(tmp_path: Path) -> None:
    config = read_script(tmp_path, SCRIPT.replace("--save $SAVE", "--save ckpt --load ckpt"))
    text = format_result(config)
    assert "auto_continue_train: true" in text
    assert "load: ckpt" not in text


def test_the_result_is_a_valid_experiment_with_the_preset_of_its_shape(tmp_path: Path) -> None:
    result = tmp_path / "e.yaml"
    result.write_text(format_result(read_script(tmp_path, SCRIPT)))
    assert "model: llama3.1_8B.yaml" in result.read_text()
    assert "overlap_grad_reduce: true" in result.read_text()
    resolved = resolve_experiment(result, (), {})
    assert resolved.experiment.trainer.framework == "megatron"
    assert resolved.experiment.trainer.training.global_batch_size == 64


def test_the_vocabulary_is_that_of_the_tokenizer_or_of_the_model_with_the_shape(tmp_path: Path) -> None:
    shape = SCRIPT.replace("--vocab-size 128256", "")
    named = shape.replace("--bf16", "--bf16 --tokenizer-model unsloth/Meta-Llama-3.1-8B-Instruct")
    for text in (shape, named):
        result = tmp_path / "e.yaml"
        result.write_text(format_result(read_script(tmp_path, text)))
        assert load_experiment(result, environ={}).experiment.trainer.model.vocab_size == 128256
    other = shape.replace("--num-layers 32", "--num-layers 31")
    with pytest.raises(UsageError, match="vocab_size not found"):
        format_result(read_script(tmp_path, other))


SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --micro-batch-size 1"


@pytest.mark.parametrize(
    ("name", "tokens", "size"),
    [("vocab.json", {"a": 0, "b": 7}, 8), ("gpt2-vocab.json", None, 50257), ("v.json", None, None)],
)
def test_the_vocabulary_of_a_bpe_is_that_of_its_file_or_is_asked_for(
    name: str, tokens: dict[str, int] | None, size: int | None, tmp_path: Path
) -> None:
    file = tmp_path / name
    if tokens:
        file.write_text(json.dumps(tokens))
    config = read_script(tmp_path, f"torchrun pretrain_gpt.py {SHAPE} --vocab-file {file} --merge-file m.txt")
    assert config.model.get("vocab_size") == size
    assert ("--vocab-file" in list_reasons(config)) == (tokens is None)


@pytest.mark.parametrize(("flag", "has_bias"), [("", True), ("--disable-bias-linear", False)])
def test_linear_layers_have_a_bias_unless_the_script_disables_it(flag: str, has_bias: bool, tmp_path: Path) -> None:
    config = read_script(tmp_path, f"torchrun pretrain_gpt.py {SHAPE} --swiglu --normalization RMSNorm {flag}")
    assert config.model["add_bias_linear"] is has_bias


def test_a_value_of_the_command_line_completes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pretrain.sh"
    file.write_text(SCRIPT.replace("--vocab-size 128256", "").replace("--num-layers 32", "--num-layers 31"))
    output = tmp_path / "new.yaml"
    command = ["direct", "--", "config", "import", str(file), "--output", str(output)]
    assert main([*command, "--vocab_size", "1000"]) == 0
    assert load_experiment(output, environ={}).experiment.trainer.model.vocab_size == 1000
    assert main([*command, "--force", "--vocab_sze", "1000"]) == 2
    assert "did you mean 'vocab_size'?" in capsys.readouterr().err


@pytest.mark.parametrize("pattern", ["([0]*3+[1]*58)", "([0]*3+[1]*58)*1", "[0,0,0," + "1," * 57 + "1]"])
def test_a_pattern_of_layers_is_the_number_of_dense_ones(pattern: str, tmp_path: Path) -> None:
    text = f"pretrain_gpt.py --num-layers 61 --hidden-size 8 --num-experts 4 --moe-layer-freq '{pattern}' --lr 1\n"
    assert read_script(tmp_path, text).model["first_k_dense_replace"] == 3


def test_another_pattern_of_layers_is_a_warning(tmp_path: Path) -> None:
    for pattern in ("2", "([0,1]*30)", "__import__('os')"):
        text = f'pretrain_gpt.py --num-layers 60 --hidden-size 8 --num-experts 4 --moe-layer-freq "{pattern}" --lr 1\n'
        assert "--moe-layer-freq" in list_reasons(read_script(tmp_path, text))


def test_arguments_of_megatron_alone_keep_their_names_there_and_back(tmp_path: Path) -> None:
    flags = "--overlap-grad-reduce --no-bias-swiglu-fusion --attention-backend flash --recompute-modules core_attn mlp"
    result = tmp_path / "e.yaml"
    result.write_text(format_result(read_script(tmp_path, SCRIPT.replace("--mystery-flag 7", flags))))
    resolved = resolve_experiment(result, (), {})
    assert resolved.experiment.trainer.backend_args["bias_swiglu_fusion"] is False
    exported = format_foreign_file("megatron-lm", resolved, None)
    for flag in ("--overlap-grad-reduce", "--no-bias-swiglu-fusion", "--attention-backend flash"):
        assert f"    {flag}\n" in exported.text
    assert "    --recompute-modules core_attn mlp\n" in exported.text
    assert not [each for each in exported.lost if each.key.startswith("backend_args")]


def test_a_result_that_cannot_be_trained_is_written_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, output = tmp_path / "pretrain.sh", tmp_path / "new.yaml"
    file.write_text(SCRIPT.replace("--bf16", "--bf16 --lr-warmup-iters 900"))
    command = ["direct", "--", "config", "import", str(file), "--output", str(output)]
    assert main([*command]) == 0
    reason = f"`config check` refuses the result: {output}:"
    assert reason in capsys.readouterr().err
    file.write_text(SCRIPT)
    assert main([*command, "--force"]) == 0
    assert "refuses" not in capsys.readouterr().err
