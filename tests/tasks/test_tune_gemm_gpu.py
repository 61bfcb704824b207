"""`tune gemm --config` on a machine with AMD GPUs keeps what makes runs faster, and later runs copy and use it.

The machine is a recorded one, hipblaslt-bench a script, and the engine is faster with a tuning file.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from machines.tree import HERE, grow
from primus.cli.main import main
from primus.runs.tuned_files import find_store

ENGINE = '''\
"""Twice as fast with a tuning file of hipBLASLt, unless $NO_GAIN is set."""

import os
from pathlib import Path


def check(experiment):
    pass


def train(experiment, attempt):
    file = os.environ.get("HIPBLASLT_TUNING_OVERRIDE_FILE")
    Path("seen.txt").write_text(Path(file).read_text() if file else "")
    attempt.event("run_started", step=0, attempt=attempt.number, world_size=1, device="stopwatch")
    for step in range(1, experiment.trainer.training.train_iters + 1):
        rate = (200.0 if file and "NO_GAIN" not in os.environ else 100.0) * (1 + 0.001 * (step % 3))
        rate *= 3 if os.environ.get("NCCL_ALGO") == "Tree" and os.environ.get("NCCL_MIN_NCHANNELS") == "16" else 1
        attempt.event("step", step=step, loss=1.0, tokens_per_s=rate)
'''
BENCH = """\
#!/bin/sh
printf 'Git Version: fa9cdd18\\n    transA,m,us,solution_index,gcnArchName\\n    T,64,1.5,7,gfx942:sramecc+\\n' \
  > "$HIPBLASLT_TUNING_FILE"
"""
EXPERIMENT = """\
exp_name: night
workspace: output
modules: {pre_trainer: {framework: stopwatch, model: tiny, overrides: {mock_data: true, seq_length: 8, train_iters: 6}}}
"""
TUNE = "direct --nproc 1 -- tune gemm --config night.yaml --shapes log.txt --output tuned.txt --steps 24"
TRAIN = "direct --nproc 1 {}-- train pretrain --config night.yaml"


@pytest.fixture(autouse=True)
def prepare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = shutil.copytree(HERE / "mi300x-8", tmp_path / "machine", symlinks=True)
    engine = tmp_path / "plugins" / "frameworks" / "stopwatch.py"
    engine.parent.mkdir(parents=True)
    engine.write_text(ENGINE)
    (tmp_path / "night.yaml").write_text(EXPERIMENT)
    (tmp_path / "log.txt").write_text("hipblaslt-bench -m 64 -n 32 -k 16 --transA T --a_type bf16_r\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "hipblaslt-bench").write_text(BENCH)
    (tmp_path / "bin" / "hipblaslt-bench").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "PRIMUS_MACHINE_ROOT": str(root),
        "PRIMUS_PLUGINS": str(tmp_path / "plugins"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
    }.items():
        monkeypatch.setenv(name, value)


def call(words: str, capfd: pytest.CaptureFixture[str], code: int = 0) -> str:
    capfd.readouterr()
    assert main(shlex.split(words)) == code
    output = capfd.readouterr()
    return output.out + output.err


def change_entry(**fields: Any) -> None:
    (file,) = find_store(os.environ).glob("hipblaslt-*.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_later_runs_use_a_local_copy_of_what_is_faster(capfd: pytest.CaptureFixture[str]) -> None:
    assert "kept: later runs use it" in call(TUNE, capfd)
    plan = json.loads(call("--json --dry-run " + TRAIN.format(""), capfd))
    local = plan["env"]["HIPBLASLT_TUNING_OVERRIDE_FILE"]["value"]
    assert plan["files"][local] == Path("tuned.txt").read_text()
    line = "tuned: hipBLASLt: 1 of 1 shapes have a tuned solution of fa9cdd18 +100.0% tokens/s"
    assert line in call(TRAIN.format(""), capfd)
    assert Path("seen.txt").read_text() == Path("tuned.txt").read_text()
    assert "tuned:" not in call(TRAIN.format("--no-tuned "), capfd)
    assert Path("seen.txt").read_text() == ""
    change_entry(
        valid_for={**json.loads(next(find_store(os.environ).glob("hip*")).read_text())["valid_for"], "rocm": "1"}
    )
    assert "not used: tuned for rocm 1, this is" in call(TRAIN.format(""), capfd)
    change_entry(text=5)
    assert "is damaged; run tune gemm again" in call(TRAIN.format(""), capfd)
    assert Path("seen.txt").read_text() == ""


def test_hipblaslt_reads_what_was_tuned_as_its_cache_unless_it_has_another_one(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIPBLASLT_TUNING_MODE", "cache")
    assert "HIPBLASLT_TUNING_MODE=cache: hipBLASLt ignores" in call(TUNE, capfd, 2)
    monkeypatch.setenv("HIPBLASLT_TUNING_MODE", "off")
    call(TUNE, capfd)
    dry = "--json --dry-run " + TRAIN
    monkeypatch.delenv("HIPBLASLT_TUNING_MODE")
    plan = json.loads(call(dry.format("--env HIPBLASLT_TUNING_MODE=cache "), capfd))
    assert "HIPBLASLT_TUNING_OVERRIDE_FILE" not in plan["env"]
    assert plan["files"][plan["env"]["HIPBLASLT_TUNING_CACHE_PATH"]["value"]] == Path("tuned.txt").read_text()
    monkeypatch.setenv("HIPBLASLT_TUNING_CACHE_PATH", "/own.txt")
    for mode in ("cache", "tune"):
        monkeypatch.setenv("HIPBLASLT_TUNING_MODE", mode)
        plan = json.loads(call(dry.format(""), capfd))
        assert not plan["files"] and "HIPBLASLT_TUNING_OVERRIDE_FILE" not in plan["env"]
        assert any(f"not used: HIPBLASLT_TUNING_MODE={mode} reads" in note for note in plan["notes"])


def test_what_is_not_faster_is_not_kept(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_GAIN", "1")
    assert "not used by later runs: the interval contains no gain" in call(TUNE, capfd)
    assert not list(find_store(os.environ).glob("hipblaslt-*"))


def test_products_of_other_devices_have_no_tuner_and_a_dry_run_says_what_would_be_tuned(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "no tuner for the matrix products of CPUs" in call(f"{TUNE} device=cpu", capfd, 3)
    notes = call(f"--dry-run {TUNE}", capfd)
    assert "tunes the products of log.txt by hipBLASLt into tuned.txt" in notes
    assert f"later runs use {find_store(os.environ)}/hipblaslt-*.json if it is faster" in notes
    monkeypatch.setenv("PRIMUS_MACHINE_ROOT", str(grow("h100-8", tmp_path / "nvidia")))
    assert "no tuner supports the matrix products of NVIDIA GPUs" in call(TUNE, capfd, 3)
    assert not Path("output").exists()


def test_the_fastest_algorithm_and_channels_of_collectives_become_a_patch(capfd: pytest.CaptureFixture[str]) -> None:
    night = Path("night.yaml")
    night.write_text(night.read_text().replace("modules: {pre", "modules:\n  {pre"))
    words = "collectives --config night.yaml --algorithms Tree --protocols Simple --channels 16 --steps 6 --json"
    call(f"direct --nproc 2 -- tune {words}", capfd)
    (study,) = Path("output/tune").glob("night-*")
    (patch,) = study.glob("*.patch")
    added = {line[1:].strip() for line in patch.read_text().splitlines() if line.startswith("+ ")}
    assert {"NCCL_ALGO: Tree", "NCCL_PROTO: Simple", "NCCL_MIN_NCHANNELS: 16"} <= added
    single = call("direct --nproc 1 -- tune collectives --config night.yaml", capfd, 2)
    assert "one process has no collectives" in single
