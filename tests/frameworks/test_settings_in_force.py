"""An engine that drops a setting in silence ends its run with exit code 2; a run of the same settings ends well.

Each fault is planted in the code of the engine itself, where its configuration is read, not in what reads it back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest

from engine_python import engine_python, engine_variables
from fakes import cli
from fakes.training_runs import write_training_run
from primus.runs import events
from primus.runs.settings_in_force import SettingInForce, read_settings_in_force
from primus.runs.store import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SETTINGS: dict[str, Any] = {
    "mock_data": True,
    "seq_length": 32,
    "train_iters": 2,
    "micro_batch_size": 2,
    "global_batch_size": 2,
    "bf16": False,
    "device": "cpu",
    "clip_grad": 0.1,  # below the norm of the first gradient
    "disable_tensorboard": True,
    "disable_last_saving": True,
    "sample_tokens": 0,
}
PROCESSES = ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor")
IMPORTED_ONCE = {
    "native": PROCESSES,
    "torchtitan": PROCESSES,
    "megatron": PROCESSES,
    "huggingface": (*PROCESSES, "transformers"),
    "jax": ("jax", "optax"),
}
"""What an engine takes seconds to import, and no patch changes before it is imported."""
SERVER = """
import importlib, json, os, sys
from primus.interpreter import reduce_garbage_collection
reduce_garbage_collection()
for module in sys.argv[1:]:
    importlib.import_module(module)
from primus import worker
apply_patches = worker._apply_patches
for line in sys.stdin.readlines():
    folder, port, fault = json.loads(line)
    child = os.fork()
    if child == 0:
        os.dup2(2, 1)  # the exit codes go to the standard output
        os.environ["MASTER_PORT"] = port
        def apply_and_plant(*args):
            apply_patches(*args)
            exec(fault, {})
        worker._apply_patches = apply_and_plant
        code = worker.main([folder, "0"], os.environ)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""A worker for each line, forked from one that has imported what takes long.

The fault is planted after the patches, which must find the engine as it is installed.
"""
TIME_LIMIT_S = 500
"""For all runs of an engine."""


class Fault(NamedTuple):
    engine: str
    settings: dict[str, Any]
    code: str
    problem: str


DROPPED_DECAY = """
import torch
build = torch.optim.AdamW.__init__
def build_without_decay(self, *args, **options):
    build(self, *args, **options)
    for group in self.param_groups: group["weight_decay"] = 0.0
torch.optim.AdamW.__init__ = build_without_decay
"""
DROPPED_RECOMPUTATION = """
import torch.utils.checkpoint
torch.utils.checkpoint.checkpoint = lambda function, *args, use_reentrant=None, **options: function(*args, **options)
"""
FAULTS = {
    "native recomputes nothing": Fault(
        "native", {"recompute_activations": True}, DROPPED_RECOMPUTATION,
        "recompute_activations: asked true, in force false",
    ),
    "native decays nothing": Fault("native", {}, DROPPED_DECAY, "weight_decay: asked 0.1, in force 0.0"),
    "native clips nothing": Fault(
        "native", {}, "from primus.frameworks.native.engine import step\n"
        "step._compute_divisor = lambda norm, limit: norm.new_ones(()).float()", "clip_grad: asked 0.1, in force 0.0",
    ),
    "native computes in float32": Fault(
        "native", {"bf16": True}, "from msgspec.structs import replace\n"
        "from primus.frameworks.native.engine.model import Transformer\nplain = Transformer.configure\n"
        "Transformer.configure = lambda model, training, more: plain(model, replace(training, bf16=False), more)",
        "bf16: asked true, in force false",
    ),
    "torchtitan recomputes nothing": Fault(
        "torchtitan", {"backend_args": {"activation_checkpoint.mode": "full"}},
        "from torchtitan.distributed.activation_checkpoint import FullAC\nFullAC.apply = lambda self, model: None",
        "activation_checkpoint.mode: asked full, in force none",
    ),
    "torchtitan takes another loop": Fault(
        "torchtitan", {"backend_args": {"optimizer.implementation": "for-loop"}},
        "from torchtitan.components.optimizer import OptimizersContainer as C\n"
        "C._build_impl_kwargs = staticmethod(lambda config: {'fused': True, 'foreach': False})",
        "optimizer.implementation: asked for-loop, in force fused",
    ),
    "megatron recomputes nothing": Fault(
        "megatron", {"recompute_activations": True},
        "from megatron.core.transformer.transformer_config import TransformerConfig as C\ncheck = C.__post_init__\n"
        "def drop(self):\n    check(self)\n    self.recompute_granularity = None\nC.__post_init__ = drop",
        "recompute_activations: asked true, in force false",
    ),
    "megatron takes another dispatcher": Fault(
        "megatron", {"backend_args": {"moe_token_dispatcher_type": "alltoall"}},
        "from megatron.core.transformer.transformer_config import TransformerConfig as C\ncheck = C.__post_init__\n"
        "def drop(self):\n    check(self)\n    self.moe_token_dispatcher_type = 'allgather'\nC.__post_init__ = drop",
        "moe_token_dispatcher_type: asked alltoall, in force allgather",
    ),
    "megatron pads the vocabulary further": Fault(
        "megatron", {"backend_args": {"make_vocab_size_divisible_by": 96}},
        "from megatron.core.models.gpt import GPTModel as M\nbuild = M.__init__\n"
        "M.__init__ = lambda self, *args, **options: build(self, *args, **{**options, 'vocab_size': 1024})",
        "make_vocab_size_divisible_by: asked 96, in force 1024",
    ),
    "huggingface recomputes nothing": Fault(
        "huggingface", {"recompute_activations": True},
        "from transformers import PreTrainedModel\n"
        "PreTrainedModel.gradient_checkpointing_enable = lambda self, **options: None",
        "recompute_activations: asked true, in force false",
    ),
    "jax has another beta": Fault(
        "jax", {"adam_beta2": 0.95}, "import optax\nplain = optax.scale_by_adam\n"
        "optax.scale_by_adam = lambda b1, b2, eps: plain(b1, 0.999, eps)", "adam_beta2: asked 0.95, in force 0.99",
    ),
    "jax recomputes nothing": Fault(
        "jax", {"recompute_activations": True}, "import jax\njax.checkpoint = lambda function, **options: function",
        "recompute_activations: asked true, in force false",
    ),
}  # fmt: skip


IN_FORCE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "native": ({"recompute_activations": True, "bf16": True}, {"clip_grad": 0.1, "bf16": True}),
    "torchtitan": (
        {"backend_args": {"activation_checkpoint": {"mode": "selective"}, "optimizer.implementation": "foreach"}},
        {"recompute_activations": "selective", "optimizer.implementation": "foreach", "clip_grad": 0.1},
    ),
    "megatron": (
        {
            "backend_args": {
                "recompute_granularity": "selective",
                "apply_rope_fusion": True,
                "make_vocab_size_divisible_by": 96,
            }
        },
        {
            "recompute_activations": "selective",
            "apply_rope_fusion": False,
            "clip_grad": 0.1,
            "make_vocab_size_divisible_by": 96,
            "vocab_rows": 576,
        },
    ),
    "huggingface": ({"recompute_activations": True}, {"recompute_activations": True, "attention": "sdpa"}),
    "jax": ({"recompute_activations": True, "adam_eps": 1e-6}, {"adam_eps": 1e-6, "clip_grad": 0.1}),
}
"""Settings of an engine without a fault, and what it then has in force."""
TrainEngine = Callable[[str], dict[str, tuple[Run, int]]]


@pytest.fixture(scope="module")
def train_engine(tmp_path_factory: pytest.TempPathFactory) -> TrainEngine:
    """``train_engine(name)`` gives run and exit code by fault; the run without a fault has the name of the engine."""

    @cache
    def train(engine: str) -> dict[str, tuple[Run, int]]:
        cases = {name: (fault.settings, fault.code) for name, fault in FAULTS.items() if fault.engine == engine}
        cases[engine] = IN_FORCE[engine][0], ""
        folder = tmp_path_factory.mktemp(engine)
        runs = {
            name: write_training_run(folder, SETTINGS, name.replace(" ", "-"), framework=engine, **settings)
            for name, (settings, _) in cases.items()
        }
        lines = [
            json.dumps([str(runs[name].directory), str(cli.find_free_port()), fault])
            for name, (_, fault) in cases.items()
        ]
        is_native = engine == "native"
        python = sys.executable if is_native else engine_python(engine)
        env = dict(os.environ) if is_native else engine_variables(engine)
        env |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1"}
        done = subprocess.run(
            [python, "-c", SERVER, *IMPORTED_ONCE[engine]],
            input="\n".join(lines),
            env=env,
            stdout=subprocess.PIPE,
            text=True,
            timeout=TIME_LIMIT_S,
            check=True,
        )
        codes = map(int, done.stdout.split())
        return {name: (run, code) for (name, run), code in zip(runs.items(), codes, strict=True)}

    return train


def read_recorded(run: Run) -> dict[str, SettingInForce]:
    return {each.key: each for each in read_settings_in_force(events.read_events(run.events))}


def mark_engine(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.native if name == "native" else pytest.mark.engine(name)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=mark_engine(fault.engine)) for name, fault in FAULTS.items()]
)
def test_an_engine_that_drops_a_setting_ends_its_run_with_exit_code_2(name: str, train_engine: TrainEngine) -> None:
    fault = FAULTS[name]
    run, code = train_engine(fault.engine)[name]
    log = (run.attempt_folder(0) / "rank_0.log").read_text()
    assert code == 2, log[-3000:]
    assert fault.problem in log
    assert len(events.read_steps(run.events)) == 1
    error = json.loads((run.attempt_folder(0) / "rank_0.error.json").read_text())
    assert "not in force" in json.dumps(error)


@pytest.mark.parametrize("engine", [pytest.param(name, marks=mark_engine(name)) for name in IN_FORCE])
def test_an_engine_that_does_what_was_asked_trains_to_the_end(engine: str, train_engine: TrainEngine) -> None:
    run, code = train_engine(engine)[engine]
    assert code == 0, (run.attempt_folder(0) / "rank_0.log").read_text()[-3000:]
    recorded = read_recorded(run)
    in_force = IN_FORCE[engine][1]
    assert {key: recorded[key].in_force for key in in_force} == in_force
    assert {each.state for each in recorded.values()} <= {"as asked", "explained", "not asked"}
