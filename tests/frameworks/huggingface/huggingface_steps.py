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
from primus.checkpoint.family import list_hub_shapes
from primus.checkpoint.formats.open import open_checkpoint
from primus.checkpoint.formats.optimizer_state import open_training_state
from primus.checkpoint.weights import TensorDict
from primus.config.schema import Trainer
from primus.frameworks.huggingface.engine.driver import TransformersEngine
from primus.frameworks.huggingface.packed_experts import UnpackedExperts
from primus.patches import torch_cpu_log_softmax
from primus.session.ranks.torch_processes import TorchProcesses, join_processes

EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.05}
MIXTRAL = EXPERTS | {"moe_router_pre_softmax": False}
QWEN = EXPERTS | {"qk_layernorm": True, "kv_channels": 32, "moe_ffn_hidden_size": 48, "first_k_dense_replace": 1}
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
    sparse = {
        "mixtral": engine_steps.build_trainer("llama", model=MIXTRAL, training={"recompute_activations": True}),
        "qwen3_moe": engine_steps.build_trainer("llama-tied", model=QWEN),
    }
    found |= {name: engine_steps.compare_with_native(build_engine, trainer) for name, trainer in sparse.items()}
    return found | {
        "trained": engine_steps.compare_trained_model(build_engine),
        "masked": engine_steps.compare_with_native(build_engine, masked, 7),
        "recomputed": engine_steps.compare_with_native(build_engine, recomputed),
    }


def resume() -> dict[str, object]:
    trainer = engine_steps.build_trainer("llama-tied", model=MIXTRAL)
    whole = build_engine(trainer)
    whole.load_weights(engine_steps.draw_weights(trainer))
    engine_steps.train_engine(whole, trainer, 0, 3)
    with tempfile.TemporaryDirectory() as folder:
        whole.save(Path(folder))
        resumed = build_engine(trainer)
        resumed.load(Path(folder))
        opened = open_checkpoint(folder, trainer.model)
        modules = TensorDict({name: value.detach() for name, value in whole.model.named_parameters()})
        own = UnpackedExperts(modules, list_hub_shapes(trainer.model))
        differences = [each.name for each in compare_weights(own, opened.weights)]
        training = open_training_state(opened)
        assert training is not None
        moments = {
            name: sorted(source.list_tensors()) == sorted(own.list_tensors())
            for name, source in training.moments.items()
        }
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
