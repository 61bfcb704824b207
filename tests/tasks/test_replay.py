"""A run is repeated as it was: its configuration, variables and data, on a machine that gives the same numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fakes import cli
from primus.redaction import fingerprint_key
from primus.runs import events, replay
from primus.runs.store import Run

EXPERIMENT = """\
env: {FROM_THE_FILE: '1'}
modules: {pre_trainer: {framework: abacus, model: tiny, overrides: {mock_data: true, seq_length: 8, train_iters: 3}}}
"""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workplace with one run of `night`."""
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "night.yaml").write_text(EXPERIMENT)
    words = ["direct", "--env", "TYPED=${x}", "--", "train", "pretrain", "--config", "night.yaml", "--seed", "7"]
    done = cli.run(*words, cwd=folder, OMP_NUM_THREADS="1", NCCL_ALGO="Ring", HARMLESS="yes", HF_TOKEN="secret")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def workplace(original: Path, tmp_path: Path) -> Path:
    """A copy of it, elsewhere."""
    shutil.copytree(original, tmp_path / "copy", symlinks=True)
    return tmp_path / "copy"


def the_run(workplace: Path) -> Path:
    return (workplace / "output/night/latest").resolve()


def replayed(workplace: Path, *words: str, **env: str | None) -> tuple[int, str, str]:
    env = {"OMP_NUM_THREADS": "1", "NCCL_ALGO": "Ring"} | env
    done = cli.run("direct", "--", "train", "pretrain", "--replay", *words, cwd=workplace, **env)
    return done.returncode, done.stdout, done.stderr


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_replay_gives_the_same_losses_and_says_what_it_repeats(workplace: Path) -> None:
    first = the_run(workplace)
    assert replayed(workplace, "output/night/latest")[0] == 0
    second = the_run(workplace)
    assert second != first
    losses = [[event["loss"] for event in events.read_steps(run / "events.jsonl")] for run in (first, second)]
    assert losses[0] == losses[1] == [7.0, 3.5, 7 / 3]
    told = json.loads((second / "metadata.json").read_text())
    assert (told["replay_of"], told["forced"]) == (str(first), [])
    assert (second / "config/primus_config.yaml").read_text() == (first / "config/primus_config.yaml").read_text()


def test_a_run_that_was_moved_is_replayed(workplace: Path) -> None:
    shutil.move(str(the_run(workplace)), workplace / "archive")
    assert replayed(workplace, "archive")[0] == 0


def test_variables_are_given_back_but_for_secrets(workplace: Path) -> None:
    code, _, errors = replayed(workplace, "output/night/latest", OMP_NUM_THREADS="2", NCCL_ALGO=None, TYPED="other")
    assert code == 0, errors
    dump = (the_run(workplace) / "env/primus_env_dump.txt").read_text().splitlines()
    origin = "  # replay of "
    restored = {line.partition("=")[0] for line in dump if origin in line}
    assert {"OMP_NUM_THREADS", "NCCL_ALGO", "TYPED"} <= restored
    assert not restored & {"HF_TOKEN", "HARMLESS", "PATH"}
    assert any(line.startswith("TYPED=${x}  #") for line in dump)
    assert any(line.startswith("FROM_THE_FILE=1  #") for line in dump)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"devices": ["AMD Instinct MI300X"]}, "devices: AMD Instinct MI300X then, "),
        ({"cpu_model": "Abacus 1"}, "processor: Abacus 1 then, "),
        ({"cpu_cores": 1000}, "cores: 1000 then, "),
    ],
)
def test_what_may_change_numbers_stops_a_replay(workplace: Path, values: dict[str, Any], said: str) -> None:
    change(the_run(workplace) / "env/system_info.json", **values)
    code, out, errors = replayed(workplace, "output/night/latest")
    assert code == 3
    assert said in out
    assert errors.startswith(f"primus-cli: 1 differences may change the losses: {said}")
    assert "--force" in errors
    assert len(list((workplace / "output/night").glob("2*"))) == 1, "nothing was started"


def test_a_forced_replay_records_what_it_went_over(workplace: Path) -> None:
    change(the_run(workplace) / "env/system_info.json", cpu_model="Abacus 1")
    code, _, errors = replayed(workplace, "output/night/latest", "--force")
    assert code == 0, errors
    (forced,) = json.loads((the_run(workplace) / "metadata.json").read_text())["forced"]
    assert forced.startswith("processor: Abacus 1 then, ")


def test_what_changes_no_numbers_is_only_said(workplace: Path) -> None:
    run = the_run(workplace)
    change(run / "env/system_info.json", host="elsewhere", kernel="1.0", python="3.0.1")
    packages = run / "env/packages.txt"
    packages.write_text(packages.read_text() + "zebra==1.0\n")
    code, out, errors = replayed(workplace, "output/night/latest")
    assert code == 0, errors
    for said in (
        "host: elsewhere then",
        "kernel: 1.0 then",
        "package zebra: 1.0 then, absent now (changes no numbers)",
    ):
        assert said in out


def test_another_version_of_torch_stops_a_replay(workplace: Path) -> None:
    packages = the_run(workplace) / "env/packages.txt"
    lines = [line for line in packages.read_text().splitlines() if not line.startswith("torch==")]
    packages.write_text("\n".join([*lines, "torch==1.0"]) + "\n")
    code, out, _ = replayed(workplace, "output/night/latest")
    assert code == 3
    assert "package torch: 1.0 then, " in out


def test_products_that_are_no_longer_tuned_stop_a_replay(workplace: Path) -> None:
    (the_run(workplace) / replay.TUNED_PRODUCTS).write_text("{}")
    code, out, _ = replayed(workplace, "output/night/latest")
    assert code == 3 and "matrix products: as in config/tuned_gemm.json then, PyTorch's own now" in out


def test_another_number_of_processes_stops_a_replay(workplace: Path) -> None:
    change(the_run(workplace) / "plan.json", layout={"nproc": 8, "nnodes": 1})
    code, _, errors = replayed(workplace, "output/night/latest")
    assert code == 3
    assert "the run had 8 processes, this replay has 1" in errors


@pytest.mark.parametrize("name", ["env/system_info.json", "env/packages.txt", "plan.json", "config/primus_config.yaml"])
@pytest.mark.parametrize("content", [None, "{ half"])
def test_a_run_folder_with_a_lost_or_damaged_file_is_one_message(
    workplace: Path, name: str, content: str | None
) -> None:
    path = the_run(workplace) / name
    path.unlink() if content is None else path.write_text(content)
    code, _, errors = replayed(workplace, "output/night/latest")
    if name != "env/packages.txt" or content is None:
        assert code in (1, 2)
        assert Path(name).name in errors
    assert "internal error" not in errors


def test_a_variable_of_several_lines_is_given_back_whole(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (tmp_path / "env").mkdir()
    (tmp_path / "env/primus_env_dump.txt").write_text(
        "A=1\nOMP_X=2  # shell\nNCCL_Y=3  # shell\nB=one\ntwo  # --env\nC=  # --env\nD=<secret>  # --env\n"
        "E=a  # b  # --env\n"
        "OMP_NUM_THREADS=4  # direct: 8 cores / 2\n"
    )
    (tmp_path / "plan.json").write_text(
        json.dumps(
            {
                "env": {
                    "B": {"value": "one\ntwo", "source": "--env"},
                    "C": {"value": "", "source": "--env"},
                    "D": {"value": "<secret>", "source": "--env"},
                    "E": {"value": "a  # b", "source": "--env"},
                    "OMP_NUM_THREADS": {"value": "4", "source": "direct: 8 cores / 2"},
                    "PRIMUS_PROGRESS": {"value": "/dev/pts/0", "source": "terminal"},
                }
            }
        )
    )
    wanted = replay.list_replay_variables(run, {"C": "x", "E": "a  # b"})
    assert wanted["B"] == "one\ntwo"
    assert wanted["C"] == ""
    assert (wanted["NCCL_Y"], wanted["OMP_NUM_THREADS"]) == ("3", "4")
    assert not wanted.keys() & {"D", "E", "PRIMUS_PROGRESS"}


def test_a_hidden_variable_with_another_value_stops_a_replay_and_is_not_given_back(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (tmp_path / "env").mkdir()
    (tmp_path / "env/primus_env_dump.txt").write_text("")
    then, elsewhere = fingerprint_key.compute("MODE", "fast"), "<hidden 0000-0123456789>"
    variables = {"MODE": then, "GONE": then, "OTHER_KEY": elsewhere, "SHOWN": "1"}
    planned = {name: {"value": value, "source": "--env"} for name, value in variables.items()}
    (tmp_path / "plan.json").write_text(json.dumps({"env": planned}))
    assert replay.list_replay_variables(run, {}) == {"SHOWN": "1"}
    found = replay.hidden_differences(run, {"MODE": "slow", "OTHER_KEY": "x"})
    assert {each.what: each.changes_numbers for each in found} == {
        "variable MODE": True,
        "variable GONE": True,
        "variable OTHER_KEY": False,
    }
    found = replay.hidden_differences(run, {"MODE": "fast", "GONE": "fast", "OTHER_KEY": "x"})
    assert [each.what for each in found] == ["variable GONE", "variable OTHER_KEY"]


# -- continuing --


def test_a_run_is_continued_only_as_it_is(workplace: Path) -> None:
    done = cli.run("direct", "--", "train", "pretrain", "--run", "output/night/latest", cwd=workplace)
    assert done.returncode == 0, done.stderr
    told = json.loads((the_run(workplace) / "metadata.json").read_text())
    assert told["attempts"] == 2
    assert len(list((workplace / "output/night").glob("2*"))) == 1
    refused = cli.run("direct", "--", "train", "pretrain", "--run", "output/night/latest", "--lr", "1", cwd=workplace)
    assert refused.returncode == 2
