"""What the tests of the huggingface engine run in its interpreter: `huggingface_steps.py NAME` prints JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import engine_steps
import torch

from primus.checkpoint.convert import compare_weights
from primus.checkpoint.formats.open import open_checkpoint
from primus.checkpoint.formats.optimizer_state import open_training_state
from primus.checkpoint.weights import TensorDict
from primus.config.schema import Trainer
from primus.frameworks.huggingface.engine.driver import TransformersEngine
from primus.patches import torch_cpu_log_softmax
from primus.session.ranks.torch_processes import TorchProcesses, join_processes

ALONE = TorchProcesses(0, 1, torch.device("cpu"), timedelta(minutes=1))


def build_engine(trainer: Trainer, eod_id: int | None = None) -> TransformersEngine:
    return TransformersEngine(trainer, ALONE, eod_id)


def compare_kinds() -> dict[str, dict[str, float]]:
    found = {
        kind: engine_steps.compare_with_native(build_engine, engine_steps.build_trainer(kind))
        for kind in engine_steps.KINDS
    }
    masked = engine_steps.build_trainer("llama", data={"eod_mask_loss": True})
    recomputed = engine_steps.build_trainer("llama", training={"recompute_activations": True})
    return found | {
        "trained": engine_steps.compare_trained_model(build_engine),
        "masked": engine_steps.compare_with_native(build_engine, masked, 7),
        "recomputed": engine_steps.compare_with_native(build_engine, recomputed),
    }


def resume() -> dict[str, object]:
    trainer = engine_steps.build_trainer("qwen2.5")
    whole = build_engine(trainer)
    whole.load_weights(engine_steps.draw_weights(trainer))
    engine_steps.train_engine(whole, trainer, 0, 3)
    with tempfile.TemporaryDirectory() as folder:
        whole.save(Path(folder))
        resumed = build_engine(trainer)
        resumed.load(Path(folder))
        opened = open_checkpoint(folder, trainer.model)
        own = {name: value.detach() for name, value in whole.model.named_parameters()}
        differences = [each.name for each in compare_weights(TensorDict(own), opened.weights)]
        training = open_training_state(opened)
        assert training is not None
        moments = {name: sorted(source.list_tensors()) == sorted(own) for name, source in training.moments.items()}
    expected = engine_steps.train_engine(whole, trainer, 3, 6)
    return {
        "expected": expected,
        "found": engine_steps.train_engine(resumed, trainer, 3, 6),
        "read": {"differences": differences, "updates": training.num_updates, "moments": moments},
    }


def compare_processes() -> dict[str, float]:
    """This process's part of two that shard a model; rank 0 prints."""
    trainer = engine_steps.build_trainer("llama")
    rank = int(os.environ["RANK"])
    with join_processes(rank, rank, 2, timedelta(minutes=4), os.environ, "cpu") as processes:
        engine = TransformersEngine(trainer, processes)
        engine.load_weights(engine_steps.draw_weights(trainer))
        batches, rates = engine_steps.draw_tokens(), engine_steps.compute_rates(trainer)
        values = [engine.step([batches[step][rank]], rates[step]) for step in range(engine_steps.STEPS)]
    steps = [[value.loss, value.grad_norm] for value in values]
    return engine_steps.measure_differences(engine_steps.train_native(trainer), steps)


if __name__ == "__main__":
    torch_cpu_log_softmax.apply()
    print(json.dumps(globals()[sys.argv[1]]()))
