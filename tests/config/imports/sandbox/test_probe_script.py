"""A script is read as bash runs it; what depends on its cluster, its arguments or this shell is seen and said."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from primus.config.imports.launch_line import find_launches
from primus.config.imports.read_file import read_foreign_file
from primus.config.imports.sandbox.probe_script import ScriptProbe, probe_script
from primus.config.imports.sandbox.run_script import RunRecord
from primus.config.imports.sandbox.script_notes import UNSET
from primus.config.imports.sandbox.script_runs import BUDGET_S, Arguments, RunState, ScriptRunner
from primus.errors import UsageError

NOBODY = 65534
COMMAND = "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 8"


def choose(records: list[RunRecord]) -> Arguments | None:
    launches = find_launches([record.words for record in records]).launches
    return launches[0].arguments if launches else None


def probe(folder: Path, text: str, *args: str, **environ: str) -> ScriptProbe:
    script = folder / "run.sh"
    script.write_text(text)
    found = probe_script(text, script, args, environ, choose)
    if found.unavailable:
        pytest.skip(f"no sandbox here: {found.unavailable}")
    return found


def get_arguments(found: ScriptProbe) -> dict[str, str]:
    assert found.arguments is not None, found
    return {name.removeprefix("--"): " ".join(values) for name, values in found.arguments.items()}


def list_facts(found: ScriptProbe) -> dict[str, str]:
    return {doubt.name.removeprefix("--"): " and ".join(doubt.facts) for doubt in found.doubts}


SIZES = f"""\
while [[ $# -gt 0 ]]; do
  case $1 in
    --size) SIZE=$2; shift 2 ;;
    *) STAGE=$1; shift ;;
  esac
done
if [ "$SIZE" = 9B ]; then SHAPE="--ffn-hidden-size 90"; elif [ "$SIZE" = 2B ]; then SHAPE="--ffn-hidden-size 20"; fi
{COMMAND} $SHAPE --split "$STAGE" $EXTRA
"""


def test_a_script_gets_its_arguments(tmp_path: Path) -> None:
    found = get_arguments(probe(tmp_path, SIZES, "warm", "--size", "2B"))
    assert found == {"num-layers": "2", "hidden-size": "8", "ffn-hidden-size": "20", "split": "warm"}


@pytest.mark.parametrize("condition", ['[ "$1" -ge 300 ]', "(( $1 > 299 ))", '[[ "$1" == 300 ]]'])
def test_what_depends_on_an_argument_that_is_not_given_is_said(tmp_path: Path, condition: str) -> None:
    text = f"if {condition}; then WIDTH=1; else WIDTH=2; fi\n{COMMAND} --ffn-hidden-size $WIDTH\n"
    found = probe(tmp_path, text)
    assert "300" in found.candidates["1"]
    assert "--ffn-hidden-size" in next(note.text for note in found.notes if "arguments" in note.subject)
    assert get_arguments(probe(tmp_path, text, "300"))["ffn-hidden-size"] == "1"


def test_calls_of_other_scripts_are_followed(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/common.conf").write_text('WIDTH=64\nlaunch() { torchrun pretrain_gpt.py "$@"; }\n')
    (tmp_path / "parts/train.sh").write_text(
        'cd "$(dirname "$0")"\nsource common.conf\nlaunch --num-layers "$1" --hidden-size $WIDTH --lr $RATE\n'
    )
    text = "export RATE=3\nsrun --nodes 2 bash -c 'parts/train.sh 7'\n"
    (tmp_path / "parts/train.sh").chmod(0o755)
    assert get_arguments(probe(tmp_path, text)) == {"num-layers": "7", "hidden-size": "64", "lr": "3"}
    assert get_arguments(probe(tmp_path, "RATE=4 sbatch parts/train.sh 9\n"))["lr"] == "4"


@pytest.mark.parametrize("name", ["pretrain_gpt.py", "$PWD/pretrain_gpt.py"])
def test_a_script_whose_program_is_in_its_checkout_is_started_there(name: str, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "jobs").mkdir()
    text = f"{COMMAND.replace('pretrain_gpt.py', name)} --data-cache-path $PWD/cache\n"
    assert get_arguments(probe(tmp_path / "jobs", text))["data-cache-path"] == f"{tmp_path}/jobs/cache"
    (tmp_path / "pretrain_gpt.py").write_text("large\n")
    assert get_arguments(probe(tmp_path / "jobs", text))["data-cache-path"] == f"{tmp_path}/cache"
    (tmp_path / "jobs/pretrain_gpt.py").write_text("small\n")
    assert get_arguments(probe(tmp_path / "jobs", text))["data-cache-path"] == f"{tmp_path}/jobs/cache"


@pytest.mark.parametrize(("args", "rate"), [((), "3"), (("--lr", "5"), "5"), (("-l", "7"), "7")])
def test_options_that_getopt_parses_are_read(args: tuple[str, ...], rate: str, tmp_path: Path) -> None:
    text = (
        'args=$(getopt -o l: --long lr: -- "$@")\nLR=3\neval set -- "$args"\n'
        'while [ : ]; do case "$1" in -l | --lr) LR=$2; shift 2 ;; --) shift; break ;; esac; done\n'
        f"{COMMAND} --lr $LR\n"
    )
    assert get_arguments(probe(tmp_path, text, *args))["lr"] == rate


def test_a_variable_with_an_assigned_default_is_set(tmp_path: Path) -> None:
    found = probe(tmp_path, f': "${{LAYERS:=4}}"\n{COMMAND} --ffn-hidden-size $LAYERS\n')
    assert get_arguments(found)["ffn-hidden-size"] == "4"
    assert not found.notes


def test_a_variable_that_is_not_set_and_takes_a_branch_is_told(tmp_path: Path) -> None:
    text = f"if [ $NODES -le 4 ]; then TP=2; else TP=8; fi\n[ $QUIET -eq 1 ] && echo\n{COMMAND} --lr $TP\n"
    found = probe(tmp_path, text)
    assert [note.subject for note in found.notes] == ["$NODES"]
    assert found.notes[0].text.startswith(UNSET) and found.notes[0].text.endswith(": --lr depend on it")


def test_the_limit_of_all_runs_is_processor_time(tmp_path: Path) -> None:
    probe(tmp_path, COMMAND)  # skips where there is no sandbox
    text = f"NODES=$(scontrol show)\n{COMMAND} --lr $NODES\n"
    script = tmp_path / "run.sh"
    runner = ScriptRunner(text, script, (), {}, choose)
    runner.begin_s -= BUDGET_S / 2
    assert runner.run(RunState()).arguments and not runner.is_cut
    runner.num_late = 3  # as if runs had only waited
    assert runner.run(RunState()).arguments is None and runner.is_cut


def test_a_script_that_trains_only_in_its_checkout_is_started_there(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "pretrain_gpt.py").write_text("large\n")
    (tmp_path / "jobs").mkdir()
    text = f"[ -f pretrain_gpt.py ] || exit 1\n{COMMAND} --data-cache-path $PWD/cache\n"
    found = probe(tmp_path / "jobs", text)
    assert get_arguments(found)["data-cache-path"] == f"{tmp_path}/cache"
    assert [note.text for note in found.notes] == [
        f"read as started in {tmp_path}: what it starts is not in its own folder"
    ]
    assert not found.doubts
    assert get_arguments(probe(tmp_path, text))["data-cache-path"] == f"{tmp_path}/cache"


@pytest.mark.parametrize(
    "text",
    [
        f"DATA=<path to data>/text\n{COMMAND} --data-path $DATA\n",
        f"{COMMAND} --data-path <path to data>/text\n",
        f'OPTIONS="--data-path <path to data>/text"\nsrun sh -c "{COMMAND} $OPTIONS"\n',
        f'DATA="<path to data>/text"\nCMD="{COMMAND} --data-path $DATA"\nsrun sh -c "$CMD"\n',
    ],
)
def test_a_placeholder_in_angle_brackets_is_a_value_and_said(tmp_path: Path, text: str) -> None:
    found = probe(tmp_path, text)
    assert get_arguments(found)["data-path"] == "PATH_TO_DATA/text"
    assert [note.subject for note in found.notes] == ["<path to data>"]


def test_a_hidden_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / ".keys.sh").write_text("RATE=5\n")
    assert get_arguments(probe(tmp_path, f"source .keys.sh\n{COMMAND} --lr $RATE\n"))["lr"] == ""


def test_a_file_outside_of_the_checkout_is_not_read(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "outside.sh").write_text("RATE=5\n")
    found = probe(inside, f"source ../outside.sh\n{COMMAND} --lr $RATE\n")
    assert "lr" not in get_arguments(found) or get_arguments(found)["lr"] == ""
    assert "../outside.sh" in found.notes[0].subject
    assert "is not here" in found.notes[0].text


@pytest.mark.parametrize(
    ("fact", "condition", "named"),
    [
        ("GPUS=$(rocm-smi --list | wc -l)", "(( GPUS > 100 ))", "wc -l"),
        ("GPUS=$(rocm-smi --list | wc -l)", "(( GPUS*2>=9 ))", "rocm-smi"),  # computed
        ("N=$SLURM_NNODES", "(( N>=700 ))", "SLURM_NNODES"),
        ("N=$SLURM_NNODES", "[ $N -lt 65 ]", "SLURM_NNODES"),
        ("", '[[ "$(hostname)" == login* ]]', "hostname"),
        ("", "[ -d /scratch/project ]", "/scratch/project exists"),
        ("case $HOSTNAME in frontier*) X=1 ;; esac", "[[ -n $X ]]", "HOSTNAME"),
        ("", "nvidia-smi", "nvidia-smi"),
    ],
)
def test_a_condition_on_a_fact_of_the_cluster_is_seen(tmp_path: Path, fact: str, condition: str, named: str) -> None:
    text = f"{fact}\nif {condition}; then LR=1; else LR=2; fi\n{COMMAND} --lr $LR\n"
    found = probe(tmp_path, text)
    assert list(list_facts(found)) == ["lr"]
    assert named in list_facts(found)["lr"]


def test_what_does_not_depend_on_the_cluster_is_certain(tmp_path: Path) -> None:
    text = (
        "N=${SLURM_NNODES:-1}\nVPP=2\nP='--lr 3'\nif (( VPP > 1 )); then P=\"$P --min-lr 1\"; fi\n"
        'for ((i = 0; i < 3; i++)); do P+=" --split $i"; done\n'
        f"torchrun --nnodes $N --master_addr $(hostname) {COMMAND.partition(' ')[2]} $P --bf16 $NOTHING\n"
    )
    found = probe(tmp_path, text)
    assert not found.doubts
    assert get_arguments(found)["min-lr"] == "1"
    assert get_arguments(found)["split"] == "2"
    assert get_arguments(found)["bf16"] == ""


def test_a_default_of_the_script_is_kept_and_the_variable_named(tmp_path: Path) -> None:
    found = probe(tmp_path, f"N=${{WORLD_SIZE:-8}}\n{COMMAND} --global-batch-size $((N * 4))\n")
    assert get_arguments(found)["global-batch-size"] == "32"
    assert [doubt.is_kept for doubt in found.doubts] == [True]


def test_a_variable_that_is_set_nowhere_is_empty_and_said(tmp_path: Path) -> None:
    found = probe(tmp_path, f"{COMMAND} --save /runs/$MY_NAME\n")
    assert get_arguments(found)["save"] == "/runs/"
    assert [note.subject for note in found.notes] == ["$MY_NAME"]
    found = probe(tmp_path, f"{COMMAND} --save /runs/$MY_NAME\n", MY_NAME="alpha")
    assert get_arguments(found)["save"] == "/runs/alpha"
    assert "alpha in this shell; it changes --save" in found.notes[0].text


def test_names_inside_of_a_command_of_a_variable_are_named(tmp_path: Path) -> None:
    text = f'CMD="{COMMAND} --save /x/\\$SLURM_JOB_ID"\nsrun bash -c "$CMD"\n'
    assert list_facts(probe(tmp_path, text)) == {"save": "$SLURM_JOB_ID"}


@pytest.mark.parametrize("strict", ["set -x -e", "set -euo pipefail", "set -o pipefail -o errexit", "set -ex"])
def test_a_script_that_ends_at_an_error_is_read_past_it(tmp_path: Path, strict: str) -> None:
    text = (
        f"{strict}\nsource /cluster/start-prod\nif (( SLURM_NNODES > 4 )); then L=1; else L=2; fi\n{COMMAND} --lr $L\n"
    )
    found = probe(tmp_path, text)
    assert get_arguments(found)["hidden-size"] == "8"
    assert any("ends at an error here" in note.text for note in found.notes)
    assert list_facts(found) == {"lr": "$SLURM_NNODES"}  # also in such a script


def test_a_launch_line_of_maxtext_in_a_script_is_read(tmp_path: Path) -> None:
    script = tmp_path / "7b.sh"
    script.write_text(
        "STEPS=${1:-15}\nexport RUN=llama\n"
        "python3 -m MaxText.train MaxText/configs/base.yml model_name=llama2-7b steps=$STEPS run_name=$RUN-1\n"
    )
    found = read_foreign_file(script, {}, args=("40",))
    assert found.framework == "maxtext"
    assert found.settings["train_iters"] == 40


def test_a_program_of_maxtext_that_decodes_or_converts_is_not_read(tmp_path: Path) -> None:
    script = tmp_path / "e2e.sh"
    others = "MaxText/decode.py", "-m MaxText.utils.ckpt_conversion.to_huggingface"
    base = "MaxText/configs/base.yml model_name=llama2-7b"
    lines = [f"python3 {each} {base} steps=3 max_target_length=4 run_name=a attention=b\n" for each in others]
    script.write_text("".join([*lines, f"python3 MaxText/train.py {base} steps=7\n"]))
    assert read_foreign_file(script, {}).settings["train_iters"] == 7


@pytest.mark.parametrize("argument", ["--job.config_file=$FILE", "--job.config_file $FILE", "--job.config-file $FILE"])
def test_a_script_of_torchtitan_names_the_file_to_import(argument: str, tmp_path: Path) -> None:
    script = tmp_path / "run_train.sh"
    line = f"torchrun -m torchtitan.train {argument} --training.steps 3"
    script.write_text(f"FILE=${{FILE:-./conf/small.toml}}\n{line}\n")
    with pytest.raises(UsageError, match=r"starts torchtitan with the settings of \./conf/small\.toml") as error:
        read_foreign_file(script, {})
    assert error.value.hint == "config import ./conf/small.toml"


def test_a_script_of_torchtitan_names_the_function_to_import(tmp_path: Path) -> None:
    script = tmp_path / "run_train.sh"
    script.write_text("MODULE=${MODULE:-qwen3}\ntorchrun -m torchtitan.train --module $MODULE --config qwen3_small\n")
    with pytest.raises(UsageError, match=r"the settings of torchtitan/models/qwen3/config_registry\.py") as error:
        read_foreign_file(script, {})
    assert error.value.hint == "config import torchtitan/models/qwen3/config_registry.py --function qwen3_small"


def test_a_number_is_no_secret_whatever_its_argument_is_called(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(f"torchrun pretrain_gpt.py --num-layers 2 --seq-length 8 --lr 1 {SECRETS}\n")
    values = {other.key: other.value for other in read_foreign_file(script, {}).others}
    assert (values["--private-key-heads"], values["--wandb-api-key"]) == (4, "<secret>")


SECRETS = "--private-key-heads 4 --wandb-api-key 0123456789abcdef0123456789abcdef01234567"


def test_an_ordinary_user_can_read_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("every other test of this file shows it")
    if not shutil.which("setpriv"):
        pytest.skip("needs setpriv")
    python = tmp_path / "python"
    drop = f"setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups"
    # The program may lie in a folder of root: it is opened before root is given up.
    python.write_text(f'#!/bin/bash\nexec {drop} {Path(sys.executable).resolve()} "$1" "$2" /dev/fd/3 3< "$3"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    found = probe(tmp_path, f"{COMMAND} --save $UID --load $(id -u)\n")
    assert get_arguments(found)["save"] == "1000"


def test_without_bash_the_static_part_is_read_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    script = tmp_path / "run.sh"
    script.write_text(f"LR=3\n{COMMAND} --lr $LR --save $(hostname)\n")
    found = read_foreign_file(script, {})
    reasons = {each.key: each.reason for each in found.warnings}
    assert "read without bash, because there is no sandbox (it needs bash on Linux)" in reasons["the script"]
    assert found.settings["lr"] == 3
    assert "$(hostname)" in reasons["--save"]


def test_without_namespaces_the_static_part_is_read_and_said(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"LR=3\n{COMMAND} --lr $LR --num-attention-heads 2 --vocab-size 9\n")
    command = [sys.executable, "-m", "primus", "direct", "--", "config", "import", str(tmp_path / "run.sh")]
    limit = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    shell = ["unshare", "--user", "--map-root-user", "bash", "-c", limit, "bash"]
    if subprocess.run([*shell, "true"], capture_output=True).returncode != 0:
        pytest.skip("no user namespace here whose limit can be set")
    done = subprocess.run([*shell, *command], capture_output=True, text=True)
    assert "read without bash, because there is no sandbox (" in done.stderr, done.stderr
    assert "lr: 3" in done.stdout


def test_an_argument_that_is_counted_with_is_named(tmp_path: Path) -> None:
    """As the base scripts in examples_deepspeed/data_efficiency of Megatron-DeepSpeed's forks."""
    found = probe(tmp_path, f"tokens=$(($2 * 1000))\n{COMMAND} --train-tokens $tokens\n")
    assert [note.text for note in found.notes if note.subject == "arguments of the script"] == [
        "none given; --train-tokens depend on them: config import FILE ARGUMENTS"
    ]
    assert not probe(tmp_path, f"N=$((1 + 1))\n{COMMAND} --lr $N $@\n").notes


@pytest.mark.parametrize(
    ("condition", "said"),
    [
        # scripts/1gpu_jax.sh of NVIDIA/maxtext-jaxpp, examples/gpt3/train2.sh of xxcclong/mTuner
        (
            '[[ -z ${NAME} ]]; then\n  echo "ERROR: --name=<NAME> has not been provided."',
            "ERROR: --name=<NAME> has not",
        ),
        ('[ "${SIZE}" != 7 ]; then\n  printf "no SIZE: %s" "${SIZE}" >&2', "no SIZE: %s"),
    ],
)
def test_a_script_that_ends_itself_is_quoted(condition: str, said: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"if {condition}\n  exit 1\nfi\n{COMMAND}\n")
    with pytest.raises(UsageError) as error:
        read_foreign_file(script, {})
    assert f"the script ends with: {said}" in error.value.hint


def test_the_command_of_a_workload_of_xpk_is_followed(tmp_path: Path) -> None:
    """As training/ironwood/*/xpk/run_recipe.sh of AI-Hypercomputer/tpu-recipes."""
    script = tmp_path / "run_recipe.sh"
    command = "set -e && export A='1' && python3 -m MaxText.train MaxText/configs/base.yml ${ARGS}"
    script.write_text(
        f'ARGS="model_name=llama2-7b steps=30"\nxpk workload create --priority=high --command="{command}"'
    )
    assert read_foreign_file(script, {}).settings["train_iters"] == 30


def test_the_command_of_a_runner_of_maxtext_is_read(tmp_path: Path) -> None:
    """As quickstart/vanilla_1b_llama.sh of ZLab-Princeton/llm-distillation-jax."""
    script = tmp_path / "run.sh"
    command = "\n  export A=1\n  python3 -u -m MaxText.train MaxText/configs/base.yml model_name=llama2-7b steps=$N\n"
    script.write_text(f'N=30\npython -u multihost_runner_orig.py --TPU_PREFIX=a --COMMAND="{command}"\n')
    assert read_foreign_file(script, {}).settings["train_iters"] == 30
