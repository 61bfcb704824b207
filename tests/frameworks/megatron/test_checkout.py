"""A checkout of Megatron-LM builds the model and the optimizer from arguments that its own parser checks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine_python import engine_python, engine_variables
from frameworks.torchtitan.runs import draw_tokens, train_native, write_start

from .test_parity import FIRST_LOSS, GRADIENT_NORM, LOSS, build, run_code

pytestmark = [pytest.mark.engine("megatron"), pytest.mark.slow]

CHECKOUT_VARIABLE = "PRIMUS_TEST_MEGATRON_CHECKOUT"
CHECKOUT = os.environ.get(CHECKOUT_VARIABLE, "")
"""A checkout of Megatron-LM core_v0.16.1; its tests are skipped without one. conftest.py hides it from the tests."""
needs_checkout = pytest.mark.skipif(not CHECKOUT, reason=f"${CHECKOUT_VARIABLE} names no checkout of Megatron-LM")

CODE = """
import json, sys
from pathlib import Path
import msgspec, numpy, torch, torch.distributed as dist
from primus import registry
from primus.checkpoint.weights import TensorDict
from primus.config.schema import Experiment, Trainer
from primus.patch import PATCHES
torch.set_num_threads(1)
for patch in ("megatron-core-cpu", "megatron-core-torch-parts", "megatron-core-checkpoint-queue"):
    registry.load_plug_in(PATCHES, patch).apply()
request = json.loads(sys.argv[1])
trainer, cpu = msgspec.convert(request["trainer"], Trainer), torch.device("cpu")
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
from primus.frameworks.megatron.engine.batches import BatchOptions
from primus.frameworks.megatron.engine.checkout import build_checkout_parts
from primus.frameworks.megatron.engine.driver import MegatronEngine
experiment = Experiment(exp_name="test", trainer=trainer)
parts = build_checkout_parts(experiment, cpu, trainer.training.global_batch_size)
size = trainer.training.global_batch_size
engine = MegatronEngine(trainer, cpu, size, BatchOptions(None, False, None), parts)
engine.load_weights(TensorDict(torch.load(request["weights"], weights_only=True)))
found = []
for tokens, rate in zip(numpy.load(request["tokens"]), request["rates"]):
    values = engine.step(numpy.split(tokens, len(tokens) // trainer.training.micro_batch_size), rate)
    found.append([values.loss, values.grad_norm, values.learning_rate])
print("FOUND" + json.dumps(found))
"""


def run_checkout(trainer: Any, start: dict[str, Any], rates: list[float]) -> subprocess.CompletedProcess[str]:
    import msgspec

    request = json.dumps({"trainer": msgspec.to_builtins(trainer), "rates": rates, **start})
    variables = engine_variables("megatron")
    variables |= {"PYTHONPATH": os.pathsep.join([CHECKOUT, variables["PYTHONPATH"]])}
    command = [engine_python("megatron"), "-c", CODE, request]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240)


@needs_checkout
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_checkout_has_the_losses_of_native(tmp_path: Path, kind: str) -> None:
    from frameworks.torchtitan.runs import compute_rates

    trainer = build(kind)
    done = run_checkout(trainer, write_start(tmp_path, trainer), compute_rates(trainer))
    assert "FOUND" in done.stdout, done.stderr[-4000:]
    found = json.loads(done.stdout.rpartition("FOUND")[2])
    expected = train_native(trainer, draw_tokens(trainer))
    losses = [abs(mine[0] - native[0]) for mine, native in zip(found, expected, strict=True)]
    norms = [abs(mine[1] / native[1] - 1) for mine, native in zip(found, expected, strict=True)]
    assert losses[0] <= FIRST_LOSS and max(losses) <= LOSS and max(norms) <= GRADIENT_NORM


@needs_checkout
def test_its_own_scheduler_gives_the_learning_rates(tmp_path: Path) -> None:
    from frameworks.torchtitan.runs import compute_rates

    trainer = build("llama", optimizer={"schedule": "engine"})
    rates = compute_rates(trainer)
    done = run_checkout(trainer, write_start(tmp_path, trainer), rates)
    assert "FOUND" in done.stdout, done.stderr[-4000:]
    found = json.loads(done.stdout.rpartition("FOUND")[2])
    assert [rate for *_, rate in found] == pytest.approx([0.0, *rates[:-1]], rel=1e-9)


@needs_checkout
def test_a_setting_that_the_checkout_lacks_is_refused_by_name(tmp_path: Path) -> None:
    from msgspec.structs import replace

    trainer = replace(build("llama"), backend_args={"moe_z_los_coeff": 0.1})
    done = run_checkout(trainer, write_start(tmp_path, trainer), [])
    assert "backend_args: moe_z_los_coeff: this checkout of Megatron-LM has no such argument" in done.stderr


PARSER = """
import argparse
from primus.frameworks.megatron.engine.checkout import list_setting_words
parser = argparse.ArgumentParser(add_help=False)
parser.add_argument("--no-fused", action="store_false", dest="fused")
parser.add_argument("--plain", action="store_true")
parser.add_argument("--rate", type=float, default=0.1)
parser.add_argument("--sizes", type=int, nargs="*")
parser.add_argument("--unset", type=int)
parser.add_argument("--same", type=int, default=3)
settings = {"fused": False, "plain": True, "rate": 0.5, "sizes": [1, 2], "unset": None, "same": 3}
print(*list_setting_words(parser, settings))
try:
    list_setting_words(parser, {"plain": 7})
except Exception as error:
    print(type(error).__name__, error)
"""


def test_settings_become_words_by_the_actions_of_a_parser() -> None:
    words, refusal, *_ = run_code(PARSER).splitlines()
    assert words == "--no-fused --plain --rate 0.5 --sizes 1 2"
    assert refusal == "UsageError backend_args: plain: 7: Megatron-LM can only set it to true"


REFUSED = """
import sys
sys.path.insert(0, FOLDER)
from primus.frameworks.megatron.engine.checkout import _import_training
try:
    _import_training()
except Exception as error:
    print(type(error).__name__, error, error.hint)
"""


def test_a_module_that_a_checkout_misses_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    package = tmp_path / "megatron/training"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import no_such_package\n")
    printed = run_code(REFUSED.replace("FOLDER", repr(str(tmp_path))))
    assert "UnfitError" in printed and "No module named 'no_such_package'" in printed
    assert "-m pip install no_such_package" in printed
