"""Families of models: native's logits and gradients are those of transformers, and checkpoints go both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from checkpoint_models import LATENT, SPARSE, make_spec
from engine_python import run_engine
from primus.checkpoint.convert import TargetSettings, plan_conversion, write_conversion
from primus.checkpoint.family import list_hub_shapes, list_trained_shapes
from primus.checkpoint.formats.open import FoundCheckpoint, OpenedCheckpoint, open_checkpoint
from primus.checkpoint.renaming import HubNames
from primus.checkpoint.weights import TensorDict
from primus.frameworks.native.engine.generate import build_loaded_model

pytestmark = [pytest.mark.engine("huggingface"), pytest.mark.slow]

LARGEST = 1e-5
"""Difference of logits, and of gradients relative to the largest value of each: rounding of float32."""
YARN = {"rope_type": "yarn", "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 8}
# transformers' norms of latents have this epsilon, whatever config.json says.
DEEPSEEK = {**LATENT, "num_query_groups": None, "kv_channels": None, "num_experts": 8, "norm_epsilon": 1e-6}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"window_size": 5},
    "mixtral": {**SPARSE["mixtral"], "window_size": 5},
    "qwen3_moe": SPARSE["qwen3_moe"],
    "gpt_oss": {**SPARSE["gpt_oss"], **YARN, "yarn_correction_range_round_to_int": False, "activation_clamp": 7.0}
    | {"window_size": 5, "window_layer_period": 2},
    "deepseek_v2 lite": {**DEEPSEEK, **YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "deepseek_v2": {**DEEPSEEK, "q_lora_rank": 14, "moe_router_num_groups": 4}
    | {"moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 16.0},
    "deepseek_v3": {**DEEPSEEK, **YARN, "q_lora_rank": 14, "moe_router_enable_expert_bias": True}
    | {"moe_router_score_function": "sigmoid", "moe_router_norm_topk_prob": True, "moe_router_num_groups": 4}
    | {"moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 2.5, "mscale_all_dim": 1.0},
}
REFERENCE = """
import json, torch, transformers
for folder in json.load(open(FILE)):
    tokens = torch.load(folder + "/tokens.pt")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager").train()
    logits = model(tokens[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").backward()
    torch.save(logits.detach(), folder + "/logits.pt")
    model.save_pretrained(folder + "-again")
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.grad)
    model.save_pretrained(folder + "-gradients")
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each family, as transformers read it; it has written its own, and its gradients, next to it."""
    base = tmp_path_factory.mktemp("families")
    found = {}
    for name, extra in FAMILIES.items():
        spec = make_spec(**extra)
        generator = torch.Generator().manual_seed(7)
        hub = {
            hub_name: torch.randn(shape, generator=generator) * 0.3 + (1.0 if "norm" in hub_name else 0.0)
            for hub_name, shape in list_hub_shapes(spec).items()
        }
        opened = OpenedCheckpoint(TensorDict(hub), spec, None, FoundCheckpoint("native", base, None))
        found[name] = base / name.replace(" ", "_")
        write_conversion(plan_conversion(opened, TargetSettings("huggingface")), found[name], lambda _: None)
        tokens = torch.randint(0, spec.vocab_size, (2, 17), generator=generator)
        torch.save(tokens, found[name] / "tokens.pt")
    (base / "folders.json").write_text(json.dumps([str(folder) for folder in found.values()]))
    run_engine("huggingface", REFERENCE.replace("FILE", repr(str(base / "folders.json"))))
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(name: str, folders: dict[str, Path]) -> None:
    opened = open_checkpoint(str(folders[name]))
    spec, tokens = opened.spec, torch.load(folders[name] / "tokens.pt")
    model = build_loaded_model(spec, opened.weights)
    logits = model(tokens[:, :-1]) @ model.output_weight.T
    expected = torch.load(folders[name] / "logits.pt")
    assert (logits - expected).abs().max() <= LARGEST * expected.abs().max()
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").backward()
    gradients = {each: weight.grad for each, weight in model.named_parameters()}
    ours = HubNames(TensorDict(gradients), spec, "native", trained_only=True)
    theirs = open_checkpoint(f"{folders[name]}-gradients").weights
    for each in list_trained_shapes(spec):
        one, other = ours.read(each), theirs.read(each)
        assert (one - other).abs().max() <= LARGEST * max(other.abs().max(), 1.0), each


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_of_native_holds_what_transformers_wrote(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    theirs = open_checkpoint(f"{folders[name]}-again")
    for target, source in (("native", theirs), ("huggingface", None)):
        opened = source or open_checkpoint(str(tmp_path / "native"))
        write_conversion(plan_conversion(opened, TargetSettings(target)), tmp_path / target, lambda _: None)
    back = open_checkpoint(str(tmp_path / "huggingface"))
    assert back.spec == theirs.spec
    assert back.weights.list_tensors() == theirs.weights.list_tensors()
    for each in theirs.weights.list_tensors():
        assert torch.equal(back.weights.read(each), theirs.weights.read(each)), each
