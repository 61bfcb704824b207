"""A config.env of tprimat as a matrix."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus import registry
from primus.comparison.matrix.cells import list_cells
from primus.comparison.matrix.matrix import FOREIGN_FRAMEWORKS
from primus.comparison.matrix.matrix_file import load_matrix
from primus.errors import UsageError
from primus.machine.facts import MachineFacts

CONFIG = """\
# Benchmark configuration
DATA_DIR=/data/tprimat
OUTPUT_DIR=./output
HF_HOME=./cache
HF_DATASETS_CACHE=${HF_HOME}/datasets
DATASET=c4

MBS=2                    # Micro batch size per GPU
SEQ_LEN=1024             # Sequence length
LR=3.0e-4
export WARMUP_STEPS="10"
TRAIN_ITERS=50
PRECISION=bf16
FP8_HYBRID=true          # on NVIDIA
TP=2
DP=4
GA=8
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.env"
    path.write_text(CONFIG)
    return path


def test_its_values_become_settings_of_both_platforms(file: Path) -> None:
    loaded = load_matrix(file, {})
    matrix = loaded.matrix
    assert {name: platform.processes for name, platform in matrix.platforms.items()} == {"amd": 8, "nvidia": 8}
    assert matrix.settings["global_batch_size"] == 2 * 4 * 8
    assert (matrix.settings["seq_length"], matrix.settings["lr_warmup_iters"], matrix.settings["seed"]) == (
        1024,
        10,
        42,
    )
    assert matrix.frameworks == ["megatron", "native", "megatron-bridge"] and not loaded.refused
    assert any("nemo is megatron-bridge" in note for note in loaded.notes)
    assert loaded.draws_report, "as tprimat's run_train.sh"
    assert {name: model.settings["train_data_path"] for name, model in matrix.models.items()} == {
        "llama": "/data/tprimat/c4-train",
        "qwen": "/data/tprimat/c4-train-qwen",
    }, "Qwen has token ids of its own"
    assert any("FP8_HYBRID" in note and "NVIDIA alone" in note for note in loaded.notes)
    assert any("HF_DATASETS_CACHE has no effect here" in note for note in loaded.notes)


def test_a_variable_of_the_shell_chooses_the_framework(file: Path) -> None:
    loaded = load_matrix(file, {"FRAMEWORK": "mega"})
    cells = list_cells(loaded, {}, MachineFacts(), 1)
    assert {cell.place.framework for cell in cells} == {"megatron"}
    assert {(cell.place.platform, cell.status) for cell in cells} == {("amd", "elsewhere"), ("nvidia", "elsewhere")}
    assert all(
        "direct --nproc 8" in cell.shown_command and "--framework megatron" in cell.shown_command for cell in cells
    )


def test_variables_of_the_environment_are_substituted_and_a_mark_of_windows_is_no_text(file: Path) -> None:
    file.write_text(f"\ufeff{CONFIG}DATA_DIR=$HOME/data\n")
    loaded = load_matrix(file, {"HOME": "/home/me"})
    assert loaded.matrix.models["llama"].settings["train_data_path"] == "/home/me/data/c4-train"


def test_profiling_becomes_a_window_of_steps(file: Path) -> None:
    assert load_matrix(file, {"PROFILING": "true"}).matrix.settings["profile"] == "steps=1:5"
    assert "profile" not in load_matrix(file, {}).matrix.settings


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("MSB=2", "unknown key 'MSB'"),
        ("MBS=two", "MBS=two: not a whole number"),
        ("LR=fast", "LR=fast: not a number"),
        ("LR=nan", "LR=nan: not a number"),
        ("GBS=128", "GBS=128, and MBS * DP * GA = 64"),
        ("PROFILING=yes", "PROFILING=yes"),
        ("PRECISION=int8", "PRECISION=int8"),
        ("HF_TOKEN=hf_abc", "HF_TOKEN is a secret"),
        ("if [ 1 ]", "not an assignment"),
        ("DATA_DIR='/data", "no closing quotation"),
    ],
)
def test_a_wrong_line_is_named(file: Path, line: str, problem: str) -> None:
    file.write_text(f"{CONFIG}{line}\n")
    with pytest.raises(UsageError) as caught:
        load_matrix(file, {})
    assert problem in caught.value.problem
    assert "hf_abc" not in str(caught.value)


def test_no_framework_that_has_a_driver_is_refused_as_one_without() -> None:
    assert not FOREIGN_FRAMEWORKS.keys() & set(registry.list_plug_ins("frameworks"))


@pytest.mark.parametrize("name", ["rival-cpu", "rival-llama3.1-8b", "rival-qwen2.5-7b"])
def test_the_matrices_of_the_examples_are_valid(name: str) -> None:
    loaded = load_matrix(Path(__file__).parents[3] / "examples" / f"{name}.yaml", {})
    cells = list_cells(loaded, {}, MachineFacts(), 1)
    wrong = [cell.reason for cell in cells if cell.status == "refused" and "not installed" not in cell.reason]
    assert not wrong and len({cell.name for cell in cells}) == len(cells)
