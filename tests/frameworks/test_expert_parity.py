"""Mixtures of experts, which native does not have: engines are judged by a model of transformers in float64."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine_python import run_engine
from frameworks.megatron import test_parity as megatron
from frameworks.torchtitan.runs import compute_rates, train_by_engine
from primus.config.schema import Trainer

pytestmark = [pytest.mark.engine("megatron", "torchtitan", "huggingface"), pytest.mark.slow]

STEPS = 8
LOSS, GRADIENT_NORM = 2e-6, 5e-6
"""Largest differences of float32 from float64, the second relative; a matrix of experts in bfloat16 gives 1e-3."""
TRAIN_REFERENCE = """
import json, numpy, torch, transformers
request = json.load(open(FILE))
config = transformers.Qwen3MoeConfig(**request["config"], attn_implementation="eager", experts_implementation="eager")
weights = torch.load(request["weights"], weights_only=True)
model = transformers.Qwen3MoeForCausalLM.from_pretrained(None, config=config, state_dict=weights).double().train()
parameters = list(model.parameters())
groups = [{"params": [each for each in parameters if each.ndim > 1]}]
groups += [{"params": [each for each in parameters if each.ndim == 1], "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
for batch, rate in zip(numpy.load(request["tokens"])[: request["steps"]], request["rates"]):
    tokens = torch.from_numpy(batch)
    logits = model(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    print("step", loss.item(), norm.item())
"""


def test_experts_of_each_engine_have_the_losses_and_gradients_of_float64(tmp_path: Path) -> None:
    trainer = megatron.build("qwen3-untied", model=megatron.EXPERTS)
    start = {**megatron.write_expert_start(tmp_path / "start", trainer), "last": STEPS}
    expected = train_reference(tmp_path, trainer, start)
    assert expected[0][0] - expected[-1][0] > 0.1  # it learns, so that an error would show
    (core,) = megatron.train_all(tmp_path / "megatron", [(trainer, start)])
    (titan,) = train_by_engine(tmp_path / "titan", [(replace(trainer, framework="torchtitan"), start)])
    for engine, found in (("megatron", core), ("torchtitan", titan)):
        steps = list(zip(found["steps"], expected, strict=True))
        losses = max(abs(mine[0] - loss) for mine, (loss, _) in steps)
        norms = max(abs(mine[1] / norm - 1) for mine, (_, norm) in steps)
        assert losses <= LOSS and norms <= GRADIENT_NORM, (engine, losses, norms)


def test_experts_of_torchtitan_train_alike_over_two_processes_with_their_settings_in_force(tmp_path: Path) -> None:
    trainer = replace(megatron.build("qwen3-untied", model=megatron.EXPERTS), framework="torchtitan")
    start = {**megatron.write_expert_start(tmp_path / "start", trainer), "last": 3}
    (one,) = train_by_engine(tmp_path / "one", [(trainer, start)])
    layouts = [{}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}]
    asked = [(replace(trainer, parallel=replace(trainer.parallel, **each)), start) for each in layouts]
    for layout, found in zip(layouts, train_by_engine(tmp_path / "two", asked, world=2), strict=True):
        losses = [abs(mine[0] - other[0]) for mine, other in zip(one["steps"], found["steps"], strict=True)]
        assert max(losses) <= LOSS, (layout, losses)
        live = found["settings"]  # of the groups and objects, after the first step
        assert live["tensor_model_parallel_size"] == layout.get("tensor_model_parallel_size", 1)
        assert live["expert_model_parallel_size"] == live["pipeline_model_parallel_size"] == 1
        assert live["precision.experts"] == "weights float32, results float32" and live["bf16"] is False


def train_reference(folder: Path, trainer: Trainer, start: dict[str, str]) -> list[tuple[float, float]]:
    """Losses and gradient norms of transformers."""
    model = trainer.model
    config = {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.norm_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
        "tie_word_embeddings": False,
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "moe_intermediate_size": model.moe_ffn_hidden_size,
        "norm_topk_prob": True,
        "output_router_logits": False,
    }
    file = folder / "request.json"
    file.write_text(json.dumps({"config": config, "steps": STEPS, "rates": compute_rates(trainer), **start}))
    printed = run_engine("huggingface", TRAIN_REFERENCE.replace("FILE", repr(str(file))))
    lines = [line.split() for line in printed.splitlines() if line.startswith("step ")]
    return [(float(loss), float(norm)) for _, loss, norm in lines]
