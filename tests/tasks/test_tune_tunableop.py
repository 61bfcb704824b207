"""`tune gemm --with tunableop` tunes each recorded product once on all GPUs, and later runs use what is faster.

The machine is a recorded one, PyTorch for ROCm a folder of stubs, and the engine is faster with tuned products.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from machines.tree import HERE
from primus.cli.main import main
from primus.runs.tuned_files import find_store
from primus.tuning.gemm.tunableop import parse_results

TORCH = """\
from types import SimpleNamespace

from torch import cuda

__version__ = "2.9.0"
version = SimpleNamespace(hip=None if "NO_ROCM" in __import__("os").environ else "7.1")
"""
TUNABLE = '''\
"""Answers as the functions of torch.cuda.tunable do: a solution for each line but m 13, and a crash for m 14."""

import os
import signal
import warnings

results = []


def enable(on):
    assert os.environ["PYTORCH_TUNABLEOP_ENABLED"] == os.environ["PYTORCH_TUNABLEOP_TUNING"] == "1"


def tuning_enable(on):
    pass


def set_numerical_check_tolerances(on, atol, rtol):
    assert on and atol > rtol > 0


def tune_gemm_in_file(path):
    for line in open(path):
        name, parameters = line.strip().split(",")
        m = parameters.split("_")[1]
        with open(os.environ["CALLS"], "a") as calls:
            calls.write(os.environ["HIP_VISIBLE_DEVICES"] + " " + line)
        if m == "14":
            os.kill(os.getpid(), signal.SIGSEGV)
        if m == "13":
            warnings.warn("Offline tuning is not supported for this GEMM.")
            continue
        results.append((name, parameters, "Gemm_Hipblaslt_4" + m, 0.0335))


def get_results():
    return tuple(results)


def get_validators():
    return (("PT_VERSION", "2.9.0"), ("HIPBLASLT_VERSION", os.environ["LIBRARY"]))
'''
ENGINE = '''\
"""Twice as fast with tuned products; records products as PyTorch does."""

import os
from pathlib import Path


def check(experiment):
    pass


def train(experiment, attempt):
    values = {name: value for name, value in os.environ.items() if name.startswith("PYTORCH_TUNABLEOP_")}
    if values.get("PYTORCH_TUNABLEOP_RECORD_UNTUNED") == "1":
        file = values["PYTORCH_TUNABLEOP_UNTUNED_FILENAME"].replace(".csv", "0.csv")
        Path(file).write_text("GemmTunableOp_BFloat16_TN,tn_96_32_16_ld_16_16_96\\n")
    used = values.get("PYTORCH_TUNABLEOP_FILENAME", "").replace(".csv", "7.csv")
    is_used = values.get("PYTORCH_TUNABLEOP_ENABLED") == "1" and Path(used).is_file()
    Path("seen.txt").write_text(Path(used).read_text() if is_used else "")
    attempt.event("run_started", step=0, attempt=attempt.number, world_size=1, device="stopwatch")
    for step in range(1, experiment.trainer.training.train_iters + 1):
        rate = (200.0 if is_used else 100.0) * (1 + 0.001 * (step % 3))
        attempt.event("step", step=step, loss=1.0, tokens_per_s=rate)
'''
EXPERIMENT = """\
exp_name: night
workspace: output
modules: {pre_trainer: {framework: stopwatch, model: tiny, overrides: {mock_data: true, seq_length: 8, train_iters: 6}}}
"""
LINE = "Gemm{kind}_BFloat16_TN,tn_{m}_512_1024_ld_1024_1024_{m}\n"
TUNE = "direct -- tune gemm --shapes untuned0.csv untuned1.csv --output tuned.csv --gpus 0 1 --json"
TRAIN = "direct --nproc 1 {}-- train pretrain --config night.yaml"


@pytest.fixture(autouse=True)
def prepare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = shutil.copytree(HERE / "mi300x-8", tmp_path / "machine", symlinks=True)
    for name, text in {
        "torch/__init__.py": TORCH,
        "torch/cuda/__init__.py": "def synchronize():\n    pass\n",
        "torch/cuda/tunable.py": TUNABLE,
        "plugins/frameworks/stopwatch.py": ENGINE,
        "night.yaml": EXPERIMENT,
        "untuned0.csv": "".join(LINE.format(kind="TunableOp", m=m) for m in (2048, 1024)),
        "untuned1.csv": LINE.format(kind="TunableOp", m=2048) + LINE.format(kind="AndBiasTunableOp", m=2048),
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "PRIMUS_MACHINE_ROOT": str(root),
        "PRIMUS_PLUGINS": str(tmp_path / "plugins"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "PYTHONPATH": str(tmp_path),
        "CALLS": str(tmp_path / "calls"),
        "LIBRARY": "100202",
    }.items():
        monkeypatch.setenv(name, value)


def call(words: str, capfd: pytest.CaptureFixture[str], code: int = 0) -> str:
    capfd.readouterr()
    assert main(shlex.split(words)) == code
    output = capfd.readouterr()
    return output.out if "--json" in words and not code else output.out + output.err


def read_calls() -> list[str]:
    file = Path("calls")
    calls = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return calls


def test_each_product_is_tuned_once_on_all_gpus_and_missing_ones_later(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result: dict[str, Any] = json.loads(call(TUNE, capfd))
    assert (result["library"], result["num_shapes"], result["num_tuned"]) == ("TunableOp", 3, 3)
    assert result["version"] == "HIPBLASLT_VERSION 100202, PT_VERSION 2.9.0"
    assert {each["us"] for each in result["shapes"]} == {"33.5"}
    calls = read_calls()
    assert len(calls) == 3 and {each[0] for each in calls} == {"0", "1"}
    copies = [Path(f"tuned{device}.csv").read_text() for device in ("", *range(8))]
    assert len(set(copies)) == 1 and len(parse_results(copies[0], "tuned.csv").solutions) == 3

    parts = sorted(Path("tuned.csv.parts").glob("*.txt"))
    parts[0].write_text(parts[0].read_text()[:50])
    assert json.loads(call(TUNE, capfd)) == result and len(read_calls()) == 1
    # Other validators: PyTorch would reject a file with solutions of both.
    monkeypatch.setenv("LIBRARY", "200000")
    parts[0].unlink()
    assert json.loads(call(TUNE, capfd))["version"].startswith("HIPBLASLT_VERSION 200000")
    assert len(read_calls()) == 3 and "100202" not in Path("tuned.csv").read_text()


def test_a_product_that_fails_or_crashes_is_named_and_the_others_are_tuned(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("untuned0.csv").write_text("".join(LINE.format(kind="TunableOp", m=m) for m in (13, 14, 64)))
    result = json.loads(call(TUNE, capfd))
    reasons = {shape.split(" x ")[0]: reason for shape, reason in result["failures"].items()}
    assert reasons.keys() == {"13", "14"}
    assert "not supported" in reasons["13"] and "exited with code -11" in reasons["14"]
    monkeypatch.setenv("NO_ROCM", "1")
    assert "PyTorch 2.9.0 is not built for ROCm" in call(TUNE, capfd, code=3)


def test_later_runs_use_recorded_products_that_are_faster(capfd: pytest.CaptureFixture[str]) -> None:
    text = call("direct --nproc 1 -- tune gemm --config night.yaml --record --steps 24", capfd)
    assert "hipblaslt-bench is not installed: TunableOp of PyTorch tunes instead" in text
    assert "kept: later runs use it" in text and len(read_calls()) == 1
    plan = json.loads(call("direct --nproc 1 --json --dry-run -- train pretrain --config night.yaml", capfd))
    used = {name: each["value"] for name, each in plan["env"].items() if name.startswith("PYTORCH_TUNABLEOP_")}
    local = used.pop("PYTORCH_TUNABLEOP_FILENAME")
    assert used == {f"PYTORCH_TUNABLEOP_{name}": on for name, on in (("ENABLED", "1"), ("TUNING", "0"))} | {
        "PYTORCH_TUNABLEOP_RECORD_UNTUNED": "0"
    }
    assert [name for name in plan["files"] if name.startswith(local[:-4])] == [
        local.replace(".csv", f"{device}.csv") for device in range(8)
    ]
    line = "tuned: TunableOp: 1 of 1 shapes have a tuned solution of HIPBLASLT_VERSION 100202, PT_VERSION 2.9.0 +100.0%"
    assert line in call(TRAIN.format(""), capfd)
    assert "Gemm_Hipblaslt_496" in Path("seen.txt").read_text()
    own = call(TRAIN.format("--env PYTORCH_TUNABLEOP_FILENAME=own.csv "), capfd)
    assert "tuned:" not in own and Path("seen.txt").read_text() == ""
    (file,) = find_store(os.environ).glob("tunableop-*.json")
    content = json.loads(file.read_text())
    content["valid_for"]["torch"] = "2.4.0"
    file.write_text(json.dumps(content))
    assert "tuned: TunableOp: not used: tuned for torch 2.4.0, this is" in call(TRAIN.format(""), capfd)
    assert Path("seen.txt").read_text() == ""
