"""Families of models: native's logits and gradients are those of transformers, and checkpoints go both ways."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoint_models import DENSE, LATENT, SPARSE, make_spec
from engine_python import run_engine
from primus.checkpoint.convert import TargetSettings, plan_conversion, write_conversion
from primus.checkpoint.family import list_hub_shapes, list_trained_shapes
from primus.checkpoint.formats.open import FoundCheckpoint, OpenedCheckpoint, open_checkpoint
from primus.checkpoint.renaming import HubNames
from primus.checkpoint.weights import TensorDict
from primus.frameworks.native.engine.loaded_model import load_model
from primus.frameworks.native.engine.post_training.generate import generate

pytestmark = [pytest.mark.engine("huggingface"), pytest.mark.slow]

LARGEST = 1e-5
"""Difference of logits, and of gradients relative to the largest value of each: rounding of float32."""
YARN = {"rope_type": "yarn", "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 8}
# transformers' norms of latents have this epsilon, whatever config.json says.
DEEPSEEK = {**LATENT, "num_query_groups": None, "kv_channels": None, "num_experts": 8, "norm_epsilon": 1e-6}
FAMILIES: dict[str, dict[str, Any]] = {
    **{name.replace(".", ""): DENSE[name] for name in ("llama", "qwen2.5", "qwen3")},
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
PROMPT_LENGTHS, NEW_TOKENS = (4, 11), 12
GEMMA = {"zero_centered_norms": True, "scale_embeddings": True, "post_layernorm": True, "ffn_activation": "gelu"}
GEMMA |= {"untie_embeddings_and_output_weights": False, "query_pre_attn_scalar": 10, "window_size": 5}
FAMILIES |= {
    "gemma2": {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "hybrid_layer_pattern": "W*"},
    "gemma3_text": {**GEMMA, "qk_layernorm": True, "window_rotary_base": 100.0, "hybrid_layer_pattern": "W*"},
    # As the models above 1B: the layers without a window have scaled frequencies.
    "gemma3_text scaled": {**GEMMA, "qk_layernorm": True, "window_rotary_base": 100.0, "hybrid_layer_pattern": "W*"}
    | {"rope_type": "linear", "rotary_scaling_factor": 8.0},
    "phi3": {"packed_projections": True, "window_size": 5, "kv_channels": None},
    "olmo2": {"pre_layernorm": False, "post_layernorm": True, "qk_layernorm": True, "qk_layernorm_across_heads": True}
    | {"kv_channels": None},
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
    generated = [
        model.generate(tokens[row:row + 1, :length], max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
        for row, length in enumerate(PROMPT_LENGTHS)]
    torch.save([each[0, length:].tolist() for each, length in zip(generated, PROMPT_LENGTHS)], folder + "/generated.pt")
    model.save_pretrained(folder + "-again")
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.grad)
    model.save_pretrained(folder + "-gradients")
"""

PREDICTION_REFERENCE = """
import torch, transformers
from transformers.modeling_layers import MtpModel
tokens = torch.load(FOLDER + "/tokens.pt")
model = transformers.AutoModelForCausalLM.from_pretrained(
    FOLDER, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager")
model._keys_to_ignore_on_load_unexpected = ["model.layers.2.*", "model.layers.3.*"]  # of the class: layer 61
further = MtpModel.from_pretrained(model)
hidden = model.model(tokens[:, :-1]).last_hidden_state
loss = torch.nn.functional.cross_entropy(model.lm_head(hidden).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
count, total = len(further.layers), 0.0
for depth in range(1, count + 1):
    shifted = torch.nn.functional.pad(tokens[:, depth:], (0, depth - 1))
    hidden = further.forward_layer(depth - 1, hidden, torch.arange(hidden.shape[1])[None], None, input_ids=shifted)
    targets = torch.nn.functional.pad(tokens[:, 1 + depth:], (0, depth), value=-100)
    logits = model.lm_head(hidden).flatten(0, 1)
    part = torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum") / count
    loss, total = loss + FACTOR * part, total + part.detach()
loss.backward()
torch.save(total, FOLDER + "/further.pt")
torch.save({name: weight.grad for name, weight in [*model.named_parameters(), *further.named_parameters()]},
           FOLDER + "/gradients.pt")
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each family, as transformers read it; it has written its own, and its gradients, next to it."""
    base = tmp_path_factory.mktemp("families")
    found = {}
    for name, extra in FAMILIES.items():
        found[name] = base / name.replace(" ", "_")
        write_random_weights(extra, found[name])
    (base / "folders.json").write_text(json.dumps([str(folder) for folder in found.values()]))
    numbers = f"PROMPT_LENGTHS, NEW_TOKENS = {PROMPT_LENGTHS}, {NEW_TOKENS}"
    run_engine("huggingface", numbers + REFERENCE.replace("FILE", repr(str(base / "folders.json"))))
    return found


def write_random_weights(extra: dict[str, Any], folder: Path) -> None:
    """A model of Hugging Face, and tokens for it."""
    spec = make_spec(**extra)
    generator = torch.Generator().manual_seed(7)
    hub = {
        hub_name: torch.randn(shape, generator=generator) * 0.3 + ("norm" in hub_name and not spec.zero_centered_norms)
        for hub_name, shape in list_hub_shapes(spec).items()
    }
    opened = OpenedCheckpoint(TensorDict(hub), spec, None, FoundCheckpoint("native", folder, None))
    write_conversion(plan_conversion(opened, TargetSettings("huggingface")), folder, lambda _: None)
    # Tokens 0 and 1 pad in some classes, whose embedding then has no gradient.
    torch.save(torch.randint(2, spec.vocab_size, (2, 17), generator=generator), folder / "tokens.pt")


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(name: str, folders: dict[str, Path]) -> None:
    opened = open_checkpoint(str(folders[name]))
    spec, tokens = opened.spec, torch.load(folders[name] / "tokens.pt")
    model = load_model(spec, opened.weights, "cpu").model
    logits = model.compute_logits(model(tokens[:, :-1]))
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
def test_the_likeliest_tokens_of_a_batch_are_those_of_transformers(name: str, folders: dict[str, Path]) -> None:
    """transformers continues each prompt by itself; here they are a batch of unequal lengths."""
    opened = open_checkpoint(str(folders[name]))
    tokens = torch.load(folders[name] / "tokens.pt")
    prompts = [tokens[row, :length].tolist() for row, length in enumerate(PROMPT_LENGTHS)]
    found = generate(load_model(opened.spec, opened.weights, "cpu").model, prompts, NEW_TOKENS)
    assert [each.tokens for each in found.completions] == torch.load(folders[name] / "generated.pt")


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


def test_predictions_of_further_tokens_have_the_gradients_of_transformers(tmp_path: Path) -> None:
    write_random_weights({**FAMILIES["deepseek_v3"], "first_k_dense_replace": 0, "mtp_num_layers": 2}, tmp_path / "v3")
    names = [name for name in open_checkpoint(str(tmp_path / "v3")).weights.list_tensors() if "eh_proj" in name]
    assert names == ["model.layers.2.eh_proj.weight", "model.layers.3.eh_proj.weight"], "published names"
    code = PREDICTION_REFERENCE.replace("FOLDER", repr(str(tmp_path / "v3"))).replace("FACTOR", "0.3")
    run_engine("huggingface", code)
    opened = open_checkpoint(str(tmp_path / "v3"))
    tokens = torch.load(tmp_path / "v3/tokens.pt")
    model = load_model(opened.spec, opened.weights, "cpu").model.requires_grad_(True)
    model.prediction_loss_factor = 0.3
    model(tokens[:, :-1], tokens[:, 1:].contiguous()).backward()
    torch.testing.assert_close(model.take_prediction_loss(), torch.load(tmp_path / "v3/further.pt").float())
    theirs = torch.load(tmp_path / "v3/gradients.pt")
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    ours = HubNames(TensorDict(gradients), opened.spec, "native", trained_only=True)
    for name in list_trained_shapes(opened.spec):
        one, other = ours.read(name), find_gradient(theirs, name, opened.spec.num_layers)
        assert (one - other).abs().max() <= LARGEST * max(other.abs().max(), 1.0), name


def find_gradient(gradients: dict[str, Tensor], name: str, num_layers: int) -> Tensor:
    """That of a tensor of files among those of transformers' modules, which pack experts."""
    module = re.sub(r"experts\.\d+\.(gate|up)_proj\.weight", "experts.gate_up_proj", name)
    module = re.sub(r"experts\.\d+\.down_proj\.weight", "experts.down_proj", module)
    layer = re.match(r"model\.layers\.(\d+)\.(.*)", module)
    if layer and int(layer[1]) >= num_layers:
        rest = layer[2].replace("shared_head.norm", "post_norm")
        inner = "" if rest.startswith(("enorm", "hnorm", "eh_proj", "post_norm")) else "mtp_block."
        module = f"layers.{int(layer[1]) - num_layers}.{inner}{rest}"
    found, expert = gradients[module], re.search(r"experts\.(\d+)\.(\w+)_proj", name)
    if not expert:
        return found
    rows = found[int(expert[1])]
    return rows if expert[2] == "down" else rows.chunk(2)[expert[2] == "up"]
