"""What the tests of MaxText run in its interpreter: `maxtext_steps.py NAME ...` prints the results as JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ["DECOUPLE_GCLOUD"] = "TRUE"

import engine_steps
import jax
import msgspec
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from primus.checkpoint.initial_weights import InitialWeights
from primus.config.schema import Trainer
from primus.errors import UsageError
from primus.frameworks.maxtext.engine.driver import MaxTextEngine
from primus.frameworks.maxtext.engine.layout import build_config, plan_layout
from primus.frameworks.maxtext.patches import maxtext_tied_logits

jax.config.update("jax_platforms", "cpu")

FOLDER = Path(tempfile.gettempdir())
LLAMA = {"original_max_position_embeddings": 8192, "untie_embeddings_and_output_weights": False}
"""The rope of Llama 3.1, of which MaxText has no other length, and tied embeddings."""
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_router_norm_topk_prob": True, "moe_aux_loss_coeff": 0.0}
QWEN3_MOE = EXPERTS | {"moe_ffn_hidden_size": 96}
MIXTRAL = EXPERTS | {"qk_layernorm": False, "kv_channels": 16, "moe_ffn_hidden_size": 176}


def build_engine(trainer: Trainer, eod_id: int | None = None) -> MaxTextEngine:
    layout = plan_layout(trainer, FOLDER, on_cpu=True)
    size = trainer.training.global_batch_size or trainer.training.micro_batch_size
    return MaxTextEngine(trainer, build_config(trainer, FOLDER, True, layout, size), layout, eod_id)


def build_trainer(kind: str) -> Trainer:
    return engine_steps.build_trainer(kind, **({"model": LLAMA} if kind == "llama" else {}))


def compare_llama() -> dict[str, float]:
    maxtext_tied_logits.apply()
    return engine_steps.compare_with_native(build_engine, build_trainer("llama"))


def resume() -> dict[str, object]:
    """Steps of a run, and those of one that is saved in the middle and loaded by another engine."""
    trainer = build_trainer("qwen3")
    whole = build_engine(trainer)
    whole.load_weights(engine_steps.draw_weights(trainer))
    expected = engine_steps.train_engine(whole, trainer, 0, 3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole.save(folder)
        expected += engine_steps.train_engine(whole, trainer, 3, 6)
        resumed = build_engine(trainer)
        resumed.load(folder)
        found = engine_steps.train_engine(resumed, trainer, 3, 6)
        files = sorted(path.name for path in folder.iterdir())
    native = engine_steps.measure_differences(engine_steps.train_native(trainer)[:6], expected)
    return {"expected": expected[3:], "found": found, "files": files, "native": native}


def compare_experts() -> dict[str, dict[str, float]]:
    """Differences from transformers at the first step, which has the weights that MaxText's engine saved."""
    return {name: compare_with_transformers(model) for name, model in (("mixtral", MIXTRAL), ("qwen3-moe", QWEN3_MOE))}


def compare_with_transformers(model: dict[str, object]) -> dict[str, float]:
    trainer = engine_steps.build_trainer("qwen3", model=model)
    weights = InitialWeights(trainer.model, 1)
    engine = build_engine(trainer)
    engine.load_weights(weights)
    with tempfile.TemporaryDirectory() as name:
        engine.save(Path(name))
        saved = load_file(Path(name) / "model.safetensors")
        theirs = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, attn_implementation="eager")
    changed = [name for name in weights.list_tensors() if not torch.equal(saved[name], weights.read(name))]
    tokens = torch.from_numpy(engine_steps.draw_tokens(1)[0]).flatten(0, 1)
    logits = theirs(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    norm = torch.nn.utils.get_total_norm([each.grad for each in theirs.parameters() if each.grad is not None])
    found = engine_steps.train_engine(engine, trainer, 0, 1)
    return engine_steps.measure_differences([[loss.item(), norm.item()]], found) | {"changed": len(changed)}


def refuse_sizes() -> str:
    """The error of a mesh that has more devices than there are."""
    trainer = build_trainer("qwen3")
    try:
        plan_layout(msgspec.structs.replace(trainer, backend_args={"ici_fsdp_parallelism": 3}), FOLDER, on_cpu=True)
    except UsageError as error:
        return str(error)
    return "accepted"


if __name__ == "__main__":
    print(json.dumps({name: globals()[name]() for name in sys.argv[1:]}))
