"""`compare run` launches the cells of a matrix on engines that report planned steps, and keeps their results."""

from __future__ import annotations

import json
import os
import signal
import zipfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from fakes import cli
from primus.cli.main import main
from primus.comparison.folder.archive import load_results
from primus.comparison.results.result import load_result
from primus.errors import PrimusError
from primus.runs.store import list_runs

ENGINE = '''\
"""Reports planned steps, and fails where a file says so."""

import os
import time
from pathlib import Path

from primus.runs.step_turns import TurnWaiter


def check(experiment):
    pass


def train(experiment, attempt):
    settings, name = experiment.trainer.training, experiment.trainer.framework
    if Path(f"{name}.fails").exists():
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    attempt.event("run_started", step=0, attempt=attempt.number, world_size=1, device="stopwatch", device_type="cpu",
                  parameters=1000, flops_per_token=6000.0, flops_convention="causal", dtype="float32",
                  global_batch_size=4, seq_length=8, data_fingerprint="abc", versions={"stopwatch": "1"})
    folder = os.environ.get("PRIMUS_STEP_TURNS")
    turns = TurnWaiter(Path(folder), lambda: False) if folder else None
    for step in range(1, settings.train_iters + 1):
        turn = turns.wait() if turns else None
        if turn:
            attempt.event("turn", number=turn.number, first_step=step)
        if Path(f"{name}.dies").exists() and step == 3:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if Path(f"{name}.waits").exists():
            Path(f"{name}.new").write_text(str(os.getpid()))
            os.replace(f"{name}.new", f"{name}.pid")
        while Path(f"{name}.waits").exists():
            time.sleep(0.05)
        attempt.event("step", step=step, loss=8 / step, learning_rate=1e-3, tokens=32, step_time_s=0.5,
                      tokens_per_s=64.0, memory_gib=1.0, consumed_samples=4 * step)
'''
EXPERIMENT = """\
exp_name: base
workspace: output
modules:
  pre_trainer:
    framework: fast
    model: tiny
    overrides: {mock_data: true, seq_length: 8, micro_batch_size: 1, bf16: false}
"""
MATRIX = """\
name: night
experiment: base.yaml
platforms: {cpu: {processes: 1}, amd: {processes: 8}}
frameworks: [fast, other, deep]
models: {small: {preset: tiny}}
settings: {train_iters: 4}
repetitions: 1
"""


@pytest.fixture(autouse=True)
def prepare_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = tmp_path / "plugins" / "frameworks"
    engines.mkdir(parents=True)
    for name in ("fast", "other"):
        (engines / f"{name}.py").write_text(ENGINE)
    (tmp_path / "base.yaml").write_text(EXPERIMENT)
    (tmp_path / "night.yaml").write_text(MATRIX)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRIMUS_PLUGINS", str(tmp_path / "plugins"))


def call_compare(*words: str) -> int:
    return main(["direct", "--", "compare", *words])


def read_states(folder: Path) -> dict[str, str]:
    return {path.stem: load_result(path).state for path in sorted((folder / "results").glob("*.json"))}


def test_a_dry_run_prints_the_command_of_each_cell_and_touches_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert main(["--dry-run", "direct", "--", "compare", "run", "--matrix", "night.yaml"]) == 0
    out = capsys.readouterr().out
    assert "cpu_fast_small_identical_1: primus-cli direct --nproc 1 --env PRIMUS_RECORD_BATCHES=1 -- train" in out
    assert "device=cpu train_iters=4 --workspace output/night/runs" in out
    assert "amd_fast_small_identical_1: elsewhere: this machine is cpu, not amd" in out
    assert "cpu_deep_small_identical_1: refused: primus has no driver for DeepSpeed" in out
    assert sorted(path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts) == before


def test_a_cell_that_fails_does_not_stop_the_others_and_only_it_runs_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fast.fails").touch()
    assert call_compare("run", "--matrix", "night.yaml", "--json") == 1
    summary = json.loads(capsys.readouterr().out)
    states = {cell["cell"]: cell["state"] for cell in summary["cells"]}
    assert states["cpu_fast_small_identical_1"] == "failed" and states["cpu_other_small_identical_1"] == "done"
    assert states["cpu_deep_small_identical_1"] == "refused" and states["amd_other_small_identical_1"] == "elsewhere"
    failed = next(cell for cell in summary["cells"] if cell["state"] == "failed")
    assert "out of memory" in failed["reason"]
    result = load_result(tmp_path / "output/night/results/cpu_other_small_identical_1.json")
    assert result.steps.time_s == [0.5] * 4 and result.steps.loss == [8.0, 4.0, 8 / 3, 2.0]
    assert result.training_config.max_steps == 4 and result.settings["train_iters"] == 4
    assert result.performance_metrics.tokens_per_second == 64.0
    assert (result.cell.position, result.machine.processes, result.inputs.data) == (1, 1, "abc")

    (tmp_path / "fast.fails").unlink()
    assert call_compare("run", "--matrix", "night.yaml", "--frameworks", "fast,other") == 0
    assert set(read_states(tmp_path / "output/night").values()) == {"done", "refused"}
    runs = {name: len(list_runs(tmp_path / f"output/night/runs/cpu_{name}_small_identical_1")) for name in
            ("fast", "other")}  # fmt: skip
    assert runs == {"fast": 2, "other": 1}


def test_alternating_cells_take_turns_and_one_that_dies_leaves_the_others_theirs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "night.yaml").write_text(MATRIX + "order: alternating\n")
    (tmp_path / "other.dies").touch()
    words = ("run", "--matrix", "night.yaml", "--frameworks", "fast,other")
    assert call_compare(*words) == 1
    said = capsys.readouterr().out
    assert "cpu_fast_small_identical_1, cpu_other_small_identical_1 in turns" in said
    assert "amd: its cells run one after the other" in said
    folder = tmp_path / "output/night/results"
    fast, other = (load_result(folder / f"cpu_{name}_small_identical_1.json") for name in ("fast", "other"))
    assert (fast.state, fast.steps.turn) == ("done", [1, 1, 2, 2])
    assert (other.state, other.steps.turn) == ("failed", [1, 1])
    assert fast.cell.turn_group == other.cell.turn_group != ""

    (tmp_path / "other.dies").unlink()
    assert call_compare(*words) == 0, "only the cell that failed runs again, by itself"
    assert "in turns" not in capsys.readouterr().out
    other = load_result(folder / "cpu_other_small_identical_1.json")
    assert (other.state, other.steps.turn, other.cell.turn_group) == ("done", [], "")


def test_a_matrix_of_which_nothing_applies_here_is_not_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert call_compare("run", "--matrix", "night.yaml", "--platforms", "amd", "--frameworks", "fast,other") == 3
    out, error = capsys.readouterr()
    assert "2 elsewhere" in out and "compare report" not in out, "there is nothing to compare"
    assert "no cell of night.yaml runs here: this machine is cpu, not amd" in error and "runtime" in error


def test_another_version_of_the_matrix_is_refused_before_a_cell_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("run", "--matrix", "night.yaml", "--platforms", "cpu", "--frameworks", "fast")
    assert call_compare(*words) == 0
    assert call_compare(*words, "--repetitions", "2") == 0, "more repetitions keep the first"
    (tmp_path / "night.yaml").write_text(MATRIX.replace("train_iters: 4", "train_iters: 5"))
    assert call_compare(*words) == 2
    error = capsys.readouterr().err
    assert "output/night has a result of cpu_fast_small_identical_1 with other settings" in error
    assert len(list_runs(tmp_path / "output/night/runs/cpu_fast_small_identical_1")) == 1


def test_repetitions_train_with_the_seeds_of_the_matrix_in_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("run", "--matrix", "night.yaml", "--platforms", "cpu", "--frameworks", "fast", "--repetitions", "3")
    (tmp_path / "night.yaml").write_text(MATRIX + "seeds: [7, 8]\n")
    assert call_compare(*words) == 0
    results = [load_result(path) for path in sorted((tmp_path / "output/night/results").glob("*.json"))]
    assert [result.settings["seed"] for result in results] == [7, 8, 7]
    assert call_compare(*words) == 0, "nothing runs again"
    files = [tmp_path / f"output/night/results/cpu_fast_small_identical_{number}.json" for number in (1, 2, 3)]
    for file, share in zip(files, (0.05, 0.4, 0.0), strict=True):
        file.write_text(json.dumps(json.loads(file.read_bytes()) | {"load": {"other_cpu_share": share}}))
    assert call_compare(*words, "--repeat-disturbed") == 0
    runs = [list_runs(tmp_path / f"output/night/runs/cpu_fast_small_identical_{number}") for number in (1, 2, 3)]
    assert list(map(len, runs)) == [1, 2, 1] and load_result(files[1]).load.other_cpu_share != 0.4
    (tmp_path / "night.yaml").write_text(MATRIX + "seeds: [7, 9]\n")
    assert call_compare(*words) == 2
    assert "fast_small_identical_2 with other settings" in capsys.readouterr().err
    (tmp_path / "night.yaml").write_text(
        MATRIX.replace("{train_iters: 4}", "{train_iters: 4, seed: 1}") + "seeds: [7]\n"
    )
    assert call_compare(*words) == 2
    assert "both seeds: and settings: seed" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_harness_leaves_no_process_and_resumes_with_the_cell_that_was_running(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "other.waits").touch()
    words = ("direct", "--", "compare", "run", "--matrix", "night.yaml", "--platforms", "cpu", "--frameworks",
             "fast,other")  # fmt: skip
    plugins = str(tmp_path / "plugins")
    with cli.started(*words, cwd=tmp_path, PRIMUS_PLUGINS=plugins) as harness:
        pid_file = tmp_path / "other.pid"
        cli.wait_for(pid_file.exists, "the second cell runs", timeout_s=120)
        worker = psutil.Process(int(pid_file.read_text()))
        os.kill(harness.pid, number)
        cli.wait_for(lambda: not _is_alive(worker), "the worker has ended", timeout_s=120)
        assert harness.wait(60) == (-number if number == signal.SIGKILL else 128 + number)
    assert read_states(tmp_path / "output/night") == {"cpu_fast_small_identical_1": "done"}
    (tmp_path / "other.waits").unlink()
    assert main(list(words)) == 0
    assert set(read_states(tmp_path / "output/night").values()) == {"done"}
    assert len(list_runs(tmp_path / "output/night/runs/cpu_fast_small_identical_1")) == 1


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def rewrite_archive(source: Path, target: Path, problem: str) -> None:
    """An archive as somebody makes it who unpacks one, edits the results and packs them again."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            is_result = name.endswith("identical_1.json")
            if problem == "added" and is_result:
                new.writestr(name.replace("_1.json", "_2.json"), data)
            if problem == "removed" and is_result:
                continue
            new.writestr(name, data.replace(b"1", b"2") if problem == "changed" and is_result else data)


def test_an_archive_has_the_results_and_a_purge_removes_only_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call_compare("run", "--matrix", "night.yaml", "--platforms", "cpu", "--frameworks", "fast") == 0
    folder = tmp_path / "output/night"
    (folder / "results" / "notes.json").write_text('{"mine": true}')
    (folder / "report").mkdir()
    (folder / "report" / "report.html").write_text("a page")
    assert call_compare("wrap", "output", "--runs") == 0
    loaded = load_results([tmp_path / "night.zip"])
    assert [result.cell.name for result in loaded.results] == ["cpu_fast_small_identical_1"]
    assert [Path(skipped.file).name for skipped in loaded.skipped] == ["notes.json"]

    for problem in ("changed", "added", "removed"):
        rewrite_archive(tmp_path / "night.zip", tmp_path / "other.zip", problem)
        with pytest.raises(PrimusError, match=f"results/.*json was {problem} after compare wrap"):
            load_results([tmp_path / "other.zip"])
    (tmp_path / "other.zip").unlink()

    before = sorted(tmp_path.rglob("*"))
    assert call_compare("purge", "output") == 0
    assert sorted(tmp_path.rglob("*")) == before, "it only lists them"
    capsys.readouterr()
    assert call_compare("purge", "output", "--yes") == 0
    assert "kept, not made by primus: output/night/results/notes.json" in capsys.readouterr().out
    assert sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "output").rglob("*") if path.is_file()) == [
        "output/night/results/notes.json"
    ]
    assert (tmp_path / "night.zip").exists()
    assert call_compare("purge", "output") == 2


WRONG: dict[str, tuple[str, str, str]] = {
    "a framework": ("[fast, other, deep]", "[fats]", "did you mean 'fast'?"),
    "a framework twice": ("[fast, other, deep]", "[native, fast, prim]", "native is named twice"),
    "a platform twice": ("amd: {processes: 8}", "amd: {processes: 8}, rocm: {}", "'rocm' is another name of amd"),
    "a platform": ("cpu: {processes: 1}", "gpu: {}", "no platform 'gpu'"),
    "a key of a cell": ("train_iters: 4", "trian_iters: 4", "did you mean 'train_iters'?"),
    "a key of the file": ("repetitions: 1", "repetitoins: 1", "did you mean 'repetitions'?"),
    "a limit": ("repetitions: 1", "tuned: {may_change: [lr], choices: []}", "lr changes what is trained"),
    "a choice": (
        "repetitions: 1",
        "tuned: {may_change: [num_workers], choices: [{settings: {micro_batch_size: 2}}]}",
        "micro_batch_size is not one of the settings that may differ",
    ),
    "an experiment": ("experiment: base.yaml", "experiment: bass.yaml", "bass.yaml: no such file"),
    "the name of a model": ("models: {small:", "models: {../small:", "'../small' cannot be part of a file name"),
    "a secret": ("repetitions: 1", "env: {HF_TOKEN: hf_abcdefghijklmnopqrstuvwxyz012345}", "env: HF_TOKEN is a secret"),
    "a missing key": ("frameworks: [fast, other, deep]", "", "'frameworks' is missing"),
    "a runtime": ("cpu: {processes: 1}", "cpu: {runtime: slrm sbatch}", "slrm"),
    "an experiment file": (MATRIX, EXPERIMENT, "this is an experiment, not a matrix"),
    "nothing": ("models: {small: {preset: tiny}}", "models: {}", "models: empty"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_matrix_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    old, new, message = WRONG[what]
    assert old in MATRIX
    (tmp_path / "night.yaml").write_text(MATRIX.replace(old, new))
    assert call_compare("run", "--matrix", "night.yaml") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "output").exists()


def test_a_model_that_does_not_exist_refuses_its_cells_and_the_others_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = "models: {small: {preset: tiny}, large: {preset: tinny}}"
    (tmp_path / "night.yaml").write_text(MATRIX.replace("models: {small: {preset: tiny}}", models))
    assert call_compare("run", "--matrix", "night.yaml", "--platforms", "cpu", "--frameworks", "fast", "--json") == 1
    cells: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["cells"]
    assert [(cell["state"], cell["hint"]) for cell in cells] == [("done", ""), ("refused", "did you mean 'tiny'?")]
