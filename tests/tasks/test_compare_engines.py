"""`compare engines`: the same steps on several engines, and their differences."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from fakes import cli
from primus.report import page
from primus.tasks.compare import _parity, _picture
from primus.tasks.compare._parity import FLOAT32, EngineSteps, compare_steps

TESTS = Path(__file__).parents[1]
PLUG_IN = """
import sys
sys.path.insert(0, {tests!r})

def check(experiment):
    pass

def train(experiment, attempt):
    from fakes import bigram_engine
    class Changed(bigram_engine.BigramEngine):
        def step(self, batches, learning_rate):
            values = super().step(batches, learning_rate)
            return values._replace(loss=values.loss + {error} * self.steps)
    bigram_engine.BigramEngine = Changed
    bigram_engine.train_bigrams(experiment, attempt)
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
    folder = tmp_path / "plug-ins" / "backends"
    folder.mkdir(parents=True)
    for name, error in {"exact": 0.0, "near": 1e-7, "wrong": 1e-3}.items():
        (folder / f"{name}.py").write_text(PLUG_IN.format(tests=str(TESTS), error=error))
    (folder / "broken.py").write_text(FAILING)
    (folder / "missing.py").write_text(MISSING)
    module = {"framework": "native", "model": "tiny", "overrides": SETTINGS}
    path = tmp_path / "experiment.yaml"
    path.write_text(
        yaml.safe_dump({"exp_name": "test", "workspace": str(tmp_path), "modules": {"pre_trainer": module}})
    )
    return path


def compare(file: Path, engines: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["direct", "--", "compare", "engines", "--config", str(file), "--engines", engines, "--steps", "3"]
    return cli.run(*command, *words, cwd=file.parent, timeout_s=240, PRIMUS_PLUGINS=str(file.parent / "plug-ins"))


def test_engines_that_agree_give_exit_code_0_and_a_picture(file: Path) -> None:
    done = compare(file, "exact,near", "--output", str(file.parent / "out"), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    near = found["engines"][0]
    assert found["reference"] == "exact" and near["engine"] == "near" and near["steps"] == 3
    assert near["same_tokens"] is True and near["first_step_above"] is None
    assert near["max_loss_difference"] == pytest.approx(3e-7) and near["max_loss_step"] == 3
    picture = ElementTree.parse(file.parent / "out" / "comparison.svg").getroot()
    assert picture.tag.endswith("svg")
    assert sorted(path.name for path in (file.parent / "out").iterdir()) == [
        "comparison.html",
        "comparison.json",
        "comparison.svg",
    ]


def test_an_engine_that_fails_does_not_stop_the_others_and_names_its_cause(file: Path) -> None:
    done = compare(file, "exact,broken,wrong")
    assert done.returncode == 1
    assert "broken: the abacus is broken" in done.stdout and "buy another one" in done.stdout
    assert "from step 1" in next(line for line in done.stdout.splitlines() if line.startswith("wrong  "))


def test_a_model_that_native_does_not_support_is_compared_on_engines_that_do(file: Path) -> None:
    done = compare(file, "exact,near", "--num_experts", "4")
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_engine_that_is_not_installed_gives_exit_code_3_and_what_to_do(file: Path) -> None:
    done = compare(file, "exact,missing")
    assert done.returncode == 3
    assert "missing: MaxText is not installed" in done.stdout


def test_a_misspelt_engine_names_the_nearest(file: Path) -> None:
    done = compare(file, "exact,megatorn")
    assert done.returncode == 2 and "did you mean 'megatron'" in done.stderr


def make_steps(engine: str, *losses: float | None, **changes: object) -> EngineSteps:
    tokens = [{"0": 1, "1": step} for step in range(len(losses))]
    values = {"losses": list(losses), "grad_norms": [1.0] * len(losses), "tokens": tokens, **changes}
    return EngineSteps(engine=engine, **values)


def test_the_first_step_has_a_tighter_bound() -> None:
    reference = make_steps("a", 2.0, 2.0, 2.0)
    assert compare_steps(reference, make_steps("b", 2.00001, 2.0, 2.0), FLOAT32).first_step_above == 1
    assert compare_steps(reference, make_steps("b", 2.0, 2.00001, 2.0001), FLOAT32).first_step_above == 3


def test_two_units_in_the_last_place_of_a_large_loss_are_equal_at_step_1() -> None:
    assert compare_steps(make_steps("a", 9.0), make_steps("b", 9.0 + 2**-19), FLOAT32).agrees
    assert not compare_steps(make_steps("a", 9.0), make_steps("b", 9.0 + 2**-18), FLOAT32).agrees


def test_a_step_that_is_finite_on_one_engine_only_is_above_the_tolerance() -> None:
    found = compare_steps(make_steps("a", 2.0, 2.0), make_steps("b", 2.0, None), FLOAT32)
    assert found.first_step_above == 2 and found.max_loss_difference == math.inf
    assert compare_steps(make_steps("a", 2.0, None), make_steps("b", 2.0, None), FLOAT32).agrees


def test_other_tokens_are_found_and_tokens_of_an_own_loader_are_not_known() -> None:
    reference = make_steps("a", 2.0, 2.0)
    other = compare_steps(reference, make_steps("b", 2.0, 2.0, tokens=[{"0": 1, "1": 0}, {"0": 1, "1": 7}]), FLOAT32)
    assert other.same_tokens is False and other.first_step_of_other_tokens == 2 and not other.agrees
    assert compare_steps(reference, make_steps("b", 2.0, 2.0, tokens=None), FLOAT32).same_tokens is None


def test_a_gradient_norm_is_compared_relative_to_its_size() -> None:
    reference = make_steps("a", 2.0, grad_norms=[100.0])
    assert compare_steps(reference, make_steps("b", 2.0, grad_norms=[100.005]), FLOAT32).agrees
    assert compare_steps(reference, make_steps("b", 2.0, grad_norms=[100.05]), FLOAT32).first_step_above == 1


def test_the_picture_shows_every_engine_and_the_tolerance() -> None:
    steps = [make_steps(name, 2.0, 1.9, None, 1.8) for name in ("native", "jax", "<torch>")]
    picture = _picture.draw_parity_svg(steps[0], steps[1:], _parity.FLOAT32)
    assert isinstance(picture, page.Html)
    texts = [element.text for element in ElementTree.fromstring(picture).iter() if element.tag.endswith("text")]
    assert {"native", "jax", "<torch>", "tolerance 5e-05"} <= set(texts)
    assert "relative difference of the gradient norm" in picture and "tolerance 0.0001" in picture
