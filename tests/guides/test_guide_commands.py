"""Commands of the published guides of Primus work as typed, or are refused with what to do instead."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCUMENTS: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "documents.yaml").read_text())
COMMANDS = [command for document in DOCUMENTS for command in document["commands"]]
NAMES = [name for document in DOCUMENTS for name in document.get("names", [])]
FINEWEB = Path(__file__).parent / "llama3.1_8B-fineweb-pretrain.yaml"
PLACEHOLDERS = {
    "deepseek_v2.yaml": "deepseek_v2",
    "config.yaml": "deepseek_v2_lite",
    "exp.yaml": "llama3.1_8B",
    "configs/deepseek_v2_debug.yaml": "deepseek_v2_lite",
    "configs/deepseek_v2_small.yaml": "deepseek_v2_lite",
    "configs/deepseek_v2_prod.yaml": "deepseek_v2",
}
"""Experiment files that the guides name without showing them, and the example that stands in."""
OWN = ("EXP", "BACKEND", "DOCKER_IMAGE", "NNODES", "NODE_RANK", "CONTAINER_NAME", "SLURM_JOB_ID", "HF_TOKEN")
"""Variables of this shell that the commands would read."""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with the files that the guides have their readers write."""
    folder = tmp_path_factory.mktemp("guides")
    shutil.copytree(ROOT / "examples", folder / "examples")
    shutil.copytree(ROOT / "tools", folder / "tools")
    (folder / "primus-cli").symlink_to(ROOT / "primus-cli")
    dry = folder / "bin/primus-cli"
    dry.parent.mkdir()
    dry.write_text(f'#!/bin/sh\nexec "{ROOT}/primus-cli" --dry-run "$@"\n')
    dry.chmod(0o755)
    for name in ("pyproject.toml", "requirements.txt", "README.md", "LICENSE", "src"):
        (folder / name).symlink_to(ROOT / name)
    for name, example in PLACEHOLDERS.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        shutil.copy(folder / f"examples/megatron/configs/MI300X/{example}-pretrain.yaml", file)
    (folder / "fixes").mkdir()
    (folder / "fixes/workaround_rccl.sh").write_text("export NCCL_PXN_DISABLE=1\n")
    fineweb = FINEWEB.read_text().replace("/data/primus_data", str(folder / "data"))
    (folder / "examples/megatron/configs/MI300X" / FINEWEB.name).write_text(fineweb)
    write_tokens(folder / "data/fineweb/llama3.1/fineweb_text_document")
    (folder / "data/fineweb/fineweb_megatron.json").write_text('{"text": "some words"}\n')
    (folder / "site").mkdir()
    (folder / "site/wandb.py").touch()
    (folder / "config.env").write_text("DATASET=bc\nFRAMEWORK=prim\nMBS=1\nDP=8\nGA=8\n")
    (folder / "data/tokenizers/llama3.1").mkdir(parents=True)
    (folder / "data/tokenizers/llama3.1/tokenizer.model").write_bytes(b"")
    return folder


def write_tokens(prefix: Path) -> None:
    """Token files of Megatron-LM with 100 documents of 200 tokens of 4 bytes."""
    prefix.parent.mkdir(parents=True)
    number, length = 100, 200
    prefix.with_name(f"{prefix.name}.bin").write_bytes(bytes(4 * number * length))
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, number, number + 1)
    index += struct.pack(f"<{number}i", *[length] * number)
    index += struct.pack(f"<{number}q", *range(0, 4 * number * length, 4 * length))
    prefix.with_name(f"{prefix.name}.idx").write_bytes(index + struct.pack(f"<{number + 1}q", *range(number + 1)))


def run_command(text: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name not in OWN}
    environ |= {
        "XDG_STATE_HOME": str(folder / "state"),
        "DATA_PATH": str(folder / "data"),
        "GPUS_PER_NODE": "8",  # the machine of the guides, whose image has the tracker of its experiment
        "PYTHONPATH": str(folder / "site"),
        "VIRTUAL_ENV": sys.prefix,
        "PATH": f"{folder}/bin{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    return subprocess.run(
        ["bash", "-c", text],
        cwd=folder,
        env=environ | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    "command", [each for each in COMMANDS if not each.get("foreign")], ids=lambda command: command["run"][:80]
)
def test_a_command_of_a_guide_works_or_is_refused_with_its_counterpart(
    command: dict[str, Any], workplace: Path
) -> None:
    done = run_command(command.get("instead", command["run"]), workplace, PRIMUS_DRY_RUN="1")
    told = done.stdout + done.stderr
    assert done.returncode == command.get("exit", 0), told
    assert command.get("says", "") in told
    assert "Traceback" not in told
    assert "myhf_token" not in told


def test_every_command_is_listed_once() -> None:
    commands = [command["run"] for command in COMMANDS]
    assert len(set(commands)) == len(commands) >= 60


def test_files_of_this_repository_and_variables_are_there() -> None:
    missing = [
        each["file"] for each in NAMES if each.get("kind") == "repository" and not (ROOT / each["file"]).exists()
    ]
    assert not missing
    places = [
        *(ROOT / "src/primus").rglob("*.py"),
        *(ROOT / "src/primus").rglob("*.yaml"),
        *(ROOT / "examples").glob("*.sh"),
    ]
    text = "\n".join(place.read_text(encoding="utf-8") for place in places)
    assert not [each["name"] for each in NAMES if each.get("kind") == "read" and each["name"] not in text]


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("script", ["run_pretrain.sh", "run_local_pretrain.sh"])
def test_a_script_trains_for_real(script: str, workplace: Path) -> None:
    words = "--train_iters 2 --eval_iters 1 --sample_tokens 0 --seq_length 16 --micro_batch_size 1 --num_layers 1"
    variables = {"EXP": "examples/quickstart.yaml", "BACKEND": "native", "GPUS_PER_NODE": "1"}
    done = run_command(f"bash examples/{script} {words}", workplace, **variables)
    assert done.returncode == 0, done.stderr
    experiment = workplace / "output/quickstart"
    files = [each["name"] for each in NAMES if each.get("kind") == "run"]
    assert len(files) > 8 and not [name for name in files if not (experiment / "latest" / name).exists()]
    assert "tokens/s" in (experiment / "logs/rank_0.log").read_text() and any((experiment / "tensorboard").iterdir())


def test_variables_become_options_and_others_are_one_line_each(workplace: Path) -> None:
    variables = {
        "EXP": "examples/quickstart.yaml",
        "GPUS_PER_NODE": "2",
        "NNODES": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "2345",
        "IP_INTERFACE": "eth7",
        "PRIMUS_DETERMINISTIC": "1",
        "REBUILD_BNXT": "1",
        "TRAIN_LOG": "train.log",
        "HF_TOKEN": "hf_canary",
        "PRIMUS_DRY_RUN": "1",
    }
    done = run_command("bash examples/run_pretrain.sh --lr 1e-3", workplace, **variables)
    assert done.returncode == 0, done.stderr
    started = next(line for line in done.stderr.splitlines() if line.startswith("+ "))
    for part in (
        "direct --nproc 2 --nnodes 2 --node-rank 1 --master-addr node0 --master-port 2345",
        "--env NCCL_SOCKET_IFNAME=eth7",
        "--deterministic true --lr 1e-3",
    ):
        assert part in started
    assert done.stderr.count("REBUILD_BNXT is ignored") == done.stderr.count("TRAIN_LOG is ignored") == 1
    assert "hf_canary" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, "EXP is not set"),
        ({"EXP": "nowhere.yaml"}, "EXP: no such file: nowhere.yaml"),
        ({"EXP": "examples/quickstrt.yaml"}, "qwen3_8B-pretrain.yaml"),
        ({"EXP": "examples/quickstart.yaml", "BACKEND": "megatrn"}, "did you mean 'megatron'?"),
        ({"EXP": "examples/quickstart.yaml", "PRIMUS_HIPBLASLT_TUNING_STAGE": "7"}, "stages are 0, 1, 2 and 3"),
    ],
)
def test_a_wrong_variable_is_refused(variables: dict[str, str], told: str, workplace: Path) -> None:
    done = run_command("bash examples/run_pretrain.sh", workplace, **variables, PRIMUS_DRY_RUN="1")
    assert done.returncode == 2
    assert told in done.stderr


@pytest.mark.parametrize("script", ["run_pretrain", "run_local_pretrain", "run_slurm_pretrain", "run_k8s_pretrain"])
def test_a_script_describes_itself(script: str, workplace: Path) -> None:
    done = run_command(f"bash examples/{script}.sh --help", workplace)
    assert done.returncode == 0
    assert f"examples/{script}.sh" in done.stdout
