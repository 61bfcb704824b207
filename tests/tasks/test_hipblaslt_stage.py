"""The stages of hipBLASLt's tuning log products, tune them without training, and train with the result."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest

from primus.cli.main import main
from primus.machine.facts import Device, MachineFacts
from primus.task import TaskContext
from primus.tasks.train import _hipblaslt_stage

ENGINE = '''\
"""Writes its variables, and logs one product as hipBLASLt does."""

import json
import os
from pathlib import Path


def check(experiment):
    pass


def train(experiment, attempt):
    Path("seen.json").write_text(json.dumps({name: os.environ.get(name) for name in os.environ if "HIPBLASLT" in name}))
    log = os.environ.get("HIPBLASLT_LOG_FILE")
    if log:
        line = "hipblaslt-bench --api_method c -m 64 -n 32 -k 16 --transA T --transB N --a_type bf16_r\\n"
        Path(log.replace("%i", str(os.getpid()))).write_text(line)
'''
BENCH = """\
#!/bin/sh
printf 'Git Version: fa9cdd18\\n    transA,m,us,solution_index,gcnArchName\\n    T,64,1.5,7,gfx942:sramecc+\\n' \
  > "$HIPBLASLT_TUNING_FILE"
"""
EXPERIMENT = """\
exp_name: night
workspace: output
modules: {pre_trainer: {framework: logging, model: tiny, overrides: {mock_data: true, seq_length: 8, train_iters: 1}}}
"""
FOLDER = Path("output/tune_hipblaslt/night")
TUNED = FOLDER / "gemm_tune" / "tune_hipblas_gemm_results.txt"


@pytest.fixture(autouse=True)
def prepare_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tmp_path / "plugins" / "frameworks" / "logging.py"
    engine.parent.mkdir(parents=True)
    engine.write_text(ENGINE)
    (tmp_path / "night.yaml").write_text(EXPERIMENT)
    (tmp_path / "bin").mkdir()
    bench = tmp_path / "bin" / "hipblaslt-bench"
    bench.write_text(BENCH)
    bench.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRIMUS_PLUGINS", str(tmp_path / "plugins"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")


def call_stage(stage: str, monkeypatch: pytest.MonkeyPatch, words: str = "direct --") -> int:
    monkeypatch.setenv("PRIMUS_HIPBLASLT_TUNING_STAGE", stage)
    return main([*shlex.split(words), "train", "pretrain", "--config", "night.yaml"])


def make_context(architecture: str) -> TaskContext:
    facts = MachineFacts(devices=(Device(index=0, vendor="amd", architecture=architecture),))
    return TaskContext(environ=dict(os.environ), facts=lambda: facts)


def read_variables() -> dict[str, str | None]:
    found: dict[str, str | None] = json.loads(Path("seen.json").read_text())
    return found


def test_products_are_logged_tuned_and_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call_stage("1", monkeypatch) == 0
    seen = read_variables()
    assert (seen["HIPBLASLT_LOG_MASK"], seen["HIPBLASLT_TUNING_OVERRIDE_FILE"]) == ("32", "")
    assert len(list((FOLDER / "gemm_shape").glob("dump_hipblaslt_gemm_shape_0_*.txt"))) == 1
    _hipblaslt_stage.tune_products("night", make_context("gfx942"))
    assert "1 of 1 shapes tuned" in capsys.readouterr().out
    Path("seen.json").unlink()
    assert call_stage("3", monkeypatch) == 0
    local = read_variables()["HIPBLASLT_TUNING_OVERRIDE_FILE"]
    assert local is not None and Path(local).read_text() == TUNED.read_text()
    assert "hipBLASLt: 1 tuned products of version fa9cdd18" in capsys.readouterr().out


def test_a_stage_applies_to_a_run_that_nodes_get_by_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRIMUS_HIPBLASLT_TUNING_STAGE", raising=False)
    assert main(["direct", "--", "train", "pretrain", "--config", "night.yaml"]) == 0
    assert "HIPBLASLT_LOG_MASK" not in read_variables()
    (run,) = (path.parent for path in Path("output").rglob("request.json"))
    monkeypatch.setenv("PRIMUS_HIPBLASLT_TUNING_STAGE", "1")
    assert main(["direct", "--", "train", "pretrain", "--run", str(run)]) == 0
    assert read_variables()["HIPBLASLT_LOG_MASK"] == "32"
    assert len(list((FOLDER / "gemm_shape").glob("dump_hipblaslt_gemm_shape_0_*.txt"))) == 1


def test_a_file_for_other_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (FOLDER / "gemm_shape").mkdir(parents=True)
    line = "hipblaslt-bench -m 64 -n 32 -k 16 --transA T\n"
    (FOLDER / "gemm_shape" / "dump_hipblaslt_gemm_shape_0_1.txt").write_text(line)
    _hipblaslt_stage.tune_products("night", make_context("gfx942"))
    with pytest.raises(Exception, match="tuned for gfx942, this machine has gfx950"):
        _hipblaslt_stage.prepare_files("night", _hipblaslt_stage.USE, make_context("gfx950"))


@pytest.mark.parametrize(
    ("stage", "code", "message"),
    [
        ("4", 2, "stages are 0, 1, 2 and 3"),
        ("2", 2, "has no logs of products"),
        ("3", 2, "tune_hipblas_gemm_results.txt does not exist"),
    ],
)
def test_a_stage_that_cannot_run_is_one_message(
    stage: str, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call_stage(stage, monkeypatch) == code
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not Path("seen.json").exists()


def test_stage_0_lets_transformer_engine_tune_and_a_dry_run_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert call_stage("1", monkeypatch, "--dry-run direct --") == 0
    assert not Path("output").exists()
    assert call_stage("0", monkeypatch) == 0
    assert read_variables()["TE_HIPBLASLT_TUNING_RUN_COUNT"] == "10"


def test_the_use_of_tuned_products_is_refused_where_hipblaslt_would_ignore_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HIPBLASLT_TUNING_MODE", "cache")
    assert call_stage("3", monkeypatch) == 2
    assert "HIPBLASLT_TUNING_MODE=cache: hipBLASLt ignores" in capsys.readouterr().err
    monkeypatch.setenv("HIPBLASLT_TUNING_MODE", "off")
    assert call_stage("3", monkeypatch) == 2
    assert "does not exist" in capsys.readouterr().err
