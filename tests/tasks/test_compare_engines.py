"""`compare engines`: the same steps on several engines, and their differences."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest
import yaml

from comparison.engines.test_parity import make_steps
from fakes import cli
from primus.comparison.engines.parity import FLOAT32
from primus.config.schema import Stage
from primus.tasks.compare import engines

TESTS = Path(__file__).parents[1]
PLUG_IN = """
import sys
import time
sys.path.insert(0, {tests!r})
STAGES = ("pre_trainer", "post_trainer")

def check(experiment):
    pass

def train(experiment, attempt):
    from fakes import bigram_engine
    class Changed(bigram_engine.BigramEngine):
        def step(self, batches, learning_rate):
            time.sleep({pause})
            values = super().step([each[:, 0] if each.ndim == 3 else each for each in batches], learning_rate)
            return values._replace(loss=values.loss + {error} * self.steps)
    bigram_engine.BigramEngine = Changed
    bigram_engine.train_bigrams(experiment, attempt)
"""
SHIFTED = """
STAGES = ("pre_trainer", "post_trainer")

def check(experiment):
    pass

def train(experiment, attempt):
    from primus.frameworks import native
    from primus.frameworks.native.engine import driver as engine
    train_step = engine.train_step
    def train_step_with_error(*given, **options):
        result = train_step(*given, **options)
        result.values[0] += 2e-6
        return result
    engine.train_step = train_step_with_error
    native.train(experiment, attempt)
"""
FAILING = """
from primus.errors import FinalError

def check(experiment):
    pass

def train(experiment, attempt):
    raise FinalError("the abacus is broken", "buy another one")
"""
MISSING = """
ENGINES = ("maxtext",)

def check(experiment):
    pass

def train(experiment, attempt):
    pass
"""
SETTINGS = {
    "mock_data": True,
    "seq_length": 32,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "bf16": False,
    "disable_tensorboard": True,
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "plug-ins" / "frameworks"
    folder.mkdir(parents=True)
    for name, error in {"exact": 0.0, "near": 1e-7, "wrong": 1e-3, "slow": 0.0}.items():
        pause = 0.1 if name == "slow" else 0
        (folder / f"{name}.py").write_text(PLUG_IN.format(tests=str(TESTS), error=error, pause=pause))
    (folder / "shifted.py").write_text(SHIFTED)
    (folder / "broken.py").write_text(FAILING)
    (folder / "missing.py").write_text(MISSING)
    return write_experiment(tmp_path, "pre_trainer", SETTINGS)


def write_experiment(folder: Path, stage: Stage, settings: dict[str, object]) -> Path:
    module = {"framework": "native", "model": "tiny", "overrides": settings}
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump({"exp_name": "test", "workspace": str(folder), "modules": {stage: module}}))
    return path


def compare(file: Path, engines: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["direct", "--", "compare", "engines", "--config", str(file), "--engines", engines, "--steps", "3"]
    variables = {"PRIMUS_PLUGINS": str(file.parent / "plug-ins"), **env}
    return cli.run(*command, *words, cwd=file.parent, timeout_s=240, **variables)


def test_engines_that_agree_give_exit_code_0_and_a_picture(file: Path) -> None:
    done = compare(file, "exact,near", "--output", str(file.parent / "out"), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    near = found["engines"][0]
    assert found["reference"] == "exact" and near["engine"] == "near" and near["steps"] == 3
    assert near["same_tokens"] is True and near["first_step_above"] is None
    assert near["max_loss_difference"] == pytest.approx(3e-7) and near["max_loss_step"] == 3
    assert near["loss_differences"] == pytest.approx([1e-7, 2e-7, 3e-7]) and near["grad_norm_differences"] == [0, 0, 0]
    first = found["reference_steps"]
    assert all(len(each[name]) == 3 for each in (first, near) for name in ("losses", "grad_norms", "learning_rates"))
    assert near["losses"][2] - first["losses"][2] == pytest.approx(3e-7)
    assert near["learning_rates"] == first["learning_rates"] and near["first_step_of_other_learning_rate"] is None
    assert json.loads((file.parent / "out" / "comparison.json").read_text()) == found
    picture = ElementTree.parse(file.parent / "out" / "comparison.svg").getroot()
    assert picture.tag.endswith("svg")
    assert sorted(path.name for path in (file.parent / "out").iterdir()) == [
        "comparison.html",
        "comparison.json",
        "comparison.svg",
    ]


def test_where_engines_disagree_float64_tells_which_one_is_right(file: Path) -> None:
    done = compare(file, "shifted,native", "--json", "--global_batch_size", "null")
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(done.stdout)
    shifted, native = found["engines"]
    assert found["reference"] == "native in float64" and (shifted["engine"], native["engine"]) == ("shifted", "native")
    assert shifted["first_step_above"] == 1 and shifted["loss_differences"] == pytest.approx([2e-6] * 3, rel=0.1)
    assert native["first_step_above"] is None and 0 < native["max_loss_difference"] < 1e-7
    assert native["same_tokens"] is shifted["same_tokens"] is True


def test_weights_that_each_engine_draws_are_not_judged_by_others(file: Path) -> None:
    done = compare(file, "exact,wrong", "--init", "engine")
    assert done.returncode == 1
    assert "no reference in float64 tells which engine is right: init: engine: each engine draws" in done.stdout
    assert "training native in float64" not in done.stderr and not list(file.parent.rglob("*-float64"))


REFUSED = ("--num_experts", "4", "--moe_router_topk", "1", "--moe_apply_probs_on_input", "true")
"""A model that native does not train."""


def test_without_a_reference_in_float64_the_first_engine_stays_the_reference(file: Path) -> None:
    done = compare(file, "exact,wrong", *REFUSED)
    assert done.returncode == 1
    assert "no reference in float64 tells which engine is right: " in done.stdout
    assert any(line.split()[:3] == ["exact", "3", "reference"] for line in done.stdout.splitlines())


def test_an_engine_that_fails_does_not_stop_the_others_and_names_its_cause(file: Path) -> None:
    done = compare(file, "exact,broken,wrong")
    assert done.returncode == 1
    assert "broken: the abacus is broken" in done.stdout and "buy another one" in done.stdout
    assert "from step 1" in next(line for line in done.stdout.splitlines() if line.startswith("wrong  "))


def test_a_model_that_native_does_not_support_is_compared_on_engines_that_do(file: Path) -> None:
    done = compare(file, "exact,near", *REFUSED)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_engine_that_is_not_installed_gives_exit_code_3_and_what_to_do(file: Path) -> None:
    done = compare(file, "exact,missing", PRIMUS_INSTALL_ENGINES="never")
    assert done.returncode == 3
    assert "missing: MaxText is not installed" in done.stdout


def test_fine_tuning_is_compared_and_an_engine_that_only_pre_trains_is_named(file: Path) -> None:
    example = TESTS.parent / "examples" / "posttrain"
    data = {"sft_data_path": str(example / "conversations.jsonl"), "tokenizer_model": str(example / "tokenizer")}
    lengths = {**SETTINGS, "mock_data": False, "seq_length": 256}
    write_experiment(file.parent, "post_trainer", {**lengths, **data})
    done = compare(file, "exact,near,missing")
    near = next(line.split() for line in done.stdout.splitlines() if line.startswith("near  "))
    assert near[1:3] == ["3", "1.0e-07"], done.stdout + done.stderr
    assert "missing: module post_trainer: framework missing does not train it" in done.stdout


def test_sigterm_ends_the_run_and_keeps_what_was_measured(file: Path) -> None:
    words = ["compare", "engines", "--config", str(file), "--engines", "exact,slow,near", "--steps", "200"]
    plug_ins = str(file.parent / "plug-ins")
    command = ["direct", "--", *words, "--output", "out"]
    with cli.started(*command, cwd=file.parent, PRIMUS_PLUGINS=plug_ins) as process:
        slow = file.parent / "compare-test-slow" / "latest" / "events.jsonl"
        cli.wait_for(lambda: slow.exists() and '"step":3' in slow.read_text(), "three steps of slow")
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "slow: SIGTERM" in out and "near: training" not in out
    found = json.loads((file.parent / "out" / "comparison.json").read_text())
    assert found["reference"] == "exact" and 3 <= found["engines"][0]["steps"] < 200
    assert found["engines"][0]["interrupted_by"] == signal.SIGTERM
    assert not [each for each in psutil.process_iter(["cmdline"]) if str(file.parent) in str(each.info["cmdline"])]


def test_a_misspelt_engine_names_the_nearest(file: Path) -> None:
    done = compare(file, "exact,megatorn")
    assert done.returncode == 2 and "did you mean 'megatron'" in done.stderr


def test_the_text_names_steps_without_finite_numbers_and_notes_once_for_all_engines() -> None:
    taken = [make_steps(name, 2.0, None, notes=["not applied: dropout"]) for name in ("a", "b")]
    text = engines.format_comparison(engines.compare_engines(taken, FLOAT32, Path("out")))
    assert "a, b: not applied: dropout" in text and "a, b: loss or gradient norm is not finite at step 2" in text


def test_an_engine_that_took_some_steps_is_the_reference_if_no_other_took_all() -> None:
    taken = [make_steps("a", problem="not installed"), make_steps("b", 2.0, problem="killed")]
    comparison = engines.compare_engines(taken, FLOAT32, Path("out"))
    assert comparison.reference == "b" and "b: killed" in engines.format_comparison(comparison)
