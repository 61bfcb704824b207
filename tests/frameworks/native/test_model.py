"""The transformer: published sizes, the plain formula, weights that depend on the seed only, refusals."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from primus.config.schema import ModelSpec, TrainingConfig
from primus.errors import UsageError
from primus.frameworks.native.engine import rope
from primus.frameworks.native.engine.model import Transformer, build_model
from primus.frameworks.native.support import check_model


def small(**changes) -> ModelSpec:
    values = {
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "num_attention_heads": 4,
        "vocab_size": 160,
        "init_method_std": 0.2,
    }
    return ModelSpec(**(values | changes))


SHAPES = {
    "llama": small(),
    "grouped queries, llama3 rope": small(
        num_query_groups=2,
        rope_type="llama3",
        rotary_scaling_factor=8.0,
        original_max_position_embeddings=16,
        untie_embeddings_and_output_weights=False,
    ),
    "qwen2.5": small(num_query_groups=1, add_qkv_bias=True, norm_epsilon=1e-6),
    "qwen3": small(num_query_groups=2, kv_channels=24, qk_layernorm=True, rotary_base=1e6),
}

LLAMA3 = {"num_query_groups": 8, "rotary_base": 5e5, "rope_type": "llama3", "vocab_size": 128256}
PUBLISHED = {
    "llama2-7b": (ModelSpec(num_layers=32, hidden_size=4096, ffn_hidden_size=11008, num_attention_heads=32,
                            vocab_size=32000), 6_738_415_616),
    "llama3.1-8b": (ModelSpec(num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32,
                              rotary_scaling_factor=8.0, **LLAMA3), 8_030_261_248),
    "llama3.2-1b": (ModelSpec(num_layers=16, hidden_size=2048, ffn_hidden_size=8192, num_attention_heads=32,
                              rotary_scaling_factor=32.0, untie_embeddings_and_output_weights=False, **LLAMA3),
                    1_235_814_400),
    "qwen2.5-7b": (ModelSpec(num_layers=28, hidden_size=3584, ffn_hidden_size=18944, num_attention_heads=28,
                             num_query_groups=4, vocab_size=152064, add_qkv_bias=True), 7_615_616_512),
    "qwen3-0.6b": (ModelSpec(num_layers=28, hidden_size=1024, ffn_hidden_size=3072, num_attention_heads=16,
                             num_query_groups=8, kv_channels=128, vocab_size=151936, qk_layernorm=True,
                             untie_embeddings_and_output_weights=False), 596_049_920),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_as_many_parameters_as_published(name: str) -> None:
    spec, published = PUBLISHED[name]
    model = build_model(spec, "meta", seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == published


@pytest.mark.parametrize("name", SHAPES)
def test_hidden_states_equal_the_formula_written_plainly(name: str) -> None:
    """Tolerance: float32 rounding over two layers; the reference computes in float64."""
    spec = SHAPES[name]
    model = randomised(spec)
    tokens = torch.randint(0, spec.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(tokens).double(), plain_hidden(model, tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_equal_those_of_the_plain_formula(name: str) -> None:
    """Tolerance: float32 rounding of sums over 48 tokens, relative to each gradient's own size."""
    spec = SHAPES[name]
    model, reference = randomised(spec), randomised(spec)
    tokens = torch.randint(0, spec.vocab_size, (2, 25), generator=torch.Generator().manual_seed(2))
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    hidden = plain_hidden(reference, tokens[:, :-1])
    logits = hidden @ reference.output_weight.double().t()
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").backward()
    for (weight_name, weight), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        error = (weight.grad - expected.grad).norm() / expected.grad.norm()
        assert error < 1e-4, f"{weight_name}: relative error {error:.1e}"


def test_bf16_hidden_states_stay_near_those_in_fp32() -> None:
    """Tolerance: bfloat16 keeps 8 bits, so 2 layers of about 10 roundings stay within 2 percent of the norm."""
    spec = SHAPES["qwen3"]
    model = randomised(spec)
    tokens = torch.arange(24).unsqueeze(0)
    wide = model(tokens)
    model.compute_dtype = torch.bfloat16
    narrow = model(tokens)
    assert narrow.dtype == torch.bfloat16
    assert (narrow.float() - wide).norm() / wide.norm() < 0.02


class LogitsRecorder(TorchDispatchMode):
    """Keeps the largest number of rows of logits that a product gives."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.largest = vocabulary, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.mm.default and result.shape[1] == self.vocabulary:
            self.largest = max(self.largest, result.shape[0])
        return result


@pytest.mark.parametrize(("asked", "largest"), [(5, 5), (None, 48)])
def test_loss_chunk_size_limits_the_logits_in_memory(asked: int | None, largest: int) -> None:
    model = randomised(SHAPES["llama"])
    model.configure(TrainingConfig(loss_chunk_size=asked, bf16=False))
    tokens = torch.arange(50).reshape(2, 25)
    with LogitsRecorder(model.spec.vocab_size) as recorder:
        model(tokens[:, :-1], tokens[:, 1:])
    assert recorder.largest == largest


def test_weights_depend_on_the_seed_and_on_nothing_else() -> None:
    torch.manual_seed(7)
    first = build_model(small(), "cpu", seed=1).state_dict()
    torch.manual_seed(8)
    again = build_model(small(), "cpu", seed=1).state_dict()
    other = build_model(small(), "cpu", seed=2).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])


def test_initial_weights_have_the_asked_spread_and_output_projections_a_smaller_one() -> None:
    weights = build_model(small(num_layers=8, init_method_std=0.02), "cpu", seed=1).state_dict()
    assert weights["embedding.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert weights["layers.0.feed_forward.down.weight"].std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.05)


def test_building_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    build_model(small(), "cpu", seed=3)
    assert torch.equal(before, torch.get_rng_state())


def test_tied_models_share_one_matrix() -> None:
    model = build_model(small(untie_embeddings_and_output_weights=False), "cpu", seed=1)
    assert model.output_weight is model.embedding.weight


def test_the_future_does_not_change_the_past() -> None:
    model = randomised(SHAPES["llama"])
    tokens = torch.arange(20).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 12:] = 5
    assert torch.equal(model(tokens)[0, :12], model(changed)[0, :12])


def test_llama3_rope_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    spec = small(rope_type="llama3", rotary_base=5e5, rotary_scaling_factor=8.0)
    plain, scaled = rope.compute_frequencies(small(rotary_base=5e5), 128), rope.compute_frequencies(spec, 128)
    wavelengths = 2 * math.pi / plain
    assert torch.equal(scaled[wavelengths < 8192 / 4], plain[wavelengths < 8192 / 4])
    torch.testing.assert_close(scaled[wavelengths > 8192], plain[wavelengths > 8192] / 8)
    between = (wavelengths > 8192 / 4) & (wavelengths < 8192)
    assert ((scaled[between] < plain[between]) & (scaled[between] > plain[between] / 8)).all()


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("moe_shared_expert_gate", {"num_experts": 8, "moe_shared_expert_gate": True}),
        ("mtp_num_layers", {"mtp_num_layers": 1}),
        ("activation_clamp", {"activation_clamp": 7.0}),
        ("add_bias_linear", {"add_bias_linear": True}),
        ("num_query_groups", {"num_query_groups": 3}),
        ("hidden_size", {"hidden_size": 66}),
        ("kv_channels", {"kv_channels": 7}),
    ],
)
def test_what_native_does_not_build_is_refused_by_the_name_of_its_field(field: str, changes: dict) -> None:
    with pytest.raises(UsageError, match=field):
        check_model(small(**changes)) if field != "kv_channels" else Transformer(small(**changes))


@pytest.mark.parametrize("name", SHAPES)
def test_hidden_states_equal_those_of_hugging_face(name: str) -> None:
    """Tolerance: float32 rounding; runs where transformers is installed."""
    transformers = pytest.importorskip("transformers")
    spec = SHAPES[name]
    model = randomised(spec)
    theirs = hugging_face(transformers, model)
    tokens = torch.randint(0, spec.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).last_hidden_state, rtol=1e-4, atol=1e-4)


def randomised(spec: ModelSpec) -> Transformer:
    """A model whose norms and biases are not trivial either."""
    model = build_model(spec, "cpu", seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    return model


def plain_hidden(model: Transformer, tokens_BS: torch.Tensor) -> torch.Tensor:
    """The decoder written out in float64, head by head, with explicit masks and complex rotations."""
    spec, weights = model.spec, {name: weight.double() for name, weight in model.named_parameters()}
    head = spec.kv_channels or spec.hidden_size // spec.num_attention_heads
    groups = spec.num_query_groups or spec.num_attention_heads
    sequence = tokens_BS.shape[1]
    angle = torch.outer(torch.arange(sequence).double(), rope.compute_frequencies(spec, head).double())
    turn = torch.polar(torch.ones_like(angle), angle)

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + spec.norm_epsilon).sqrt() * weight

    def rotate(x):
        turned = torch.complex(x[..., : head // 2].contiguous(), x[..., head // 2 :].contiguous()) * turn
        return torch.cat((turned.real, turned.imag), -1)

    x = weights["embedding.weight"][tokens_BS]
    for index in range(spec.num_layers):
        layer = {name.removeprefix(f"layers.{index}."): w for name, w in weights.items() if f"layers.{index}." in name}
        qkv = norm(x, layer["attention_norm.weight"]) @ layer["attention.qkv.weight"].t()
        qkv = qkv + layer.get("attention.qkv.bias", 0.0)
        mixed = []
        for query in range(spec.num_attention_heads):
            group = query * groups // spec.num_attention_heads
            places = (query, spec.num_attention_heads + group, spec.num_attention_heads + groups + group)
            q, k, v = (qkv[..., place * head : (place + 1) * head] for place in places)
            if spec.qk_layernorm:
                q, k = norm(q, layer["attention.query_norm.weight"]), norm(k, layer["attention.key_norm.weight"])
            scores = rotate(q) @ rotate(k).transpose(1, 2) / math.sqrt(head)
            future = torch.ones(sequence, sequence, dtype=torch.bool).triu(1)
            mixed.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v)
        x = x + torch.cat(mixed, -1) @ layer["attention.output.weight"].t()
        gate, up = (
            norm(x, layer["feed_forward_norm.weight"]) @ layer["feed_forward.gate_up.weight"].t()
        ).chunk(2, -1)  # fmt: skip
        x = x + (gate / (1 + (-gate).exp()) * up) @ layer["feed_forward.down.weight"].t()
    return norm(x, weights["norm.weight"])


def hugging_face(transformers, model: Transformer):
    """The same weights in transformers' own model."""
    spec = model.spec
    family = "Qwen3" if spec.qk_layernorm else "Qwen2" if spec.add_qkv_bias else "Llama"
    head = spec.kv_channels or spec.hidden_size // spec.num_attention_heads
    groups = spec.num_query_groups or spec.num_attention_heads
    rotary = {"rope_theta": spec.rotary_base, "rope_type": spec.rope_type}
    if spec.rope_type == "llama3":
        rotary |= {
            "factor": spec.rotary_scaling_factor,
            "low_freq_factor": spec.rope_low_freq_factor,
            "high_freq_factor": spec.rope_high_freq_factor,
            "original_max_position_embeddings": spec.original_max_position_embeddings,
        }
    config = getattr(transformers, f"{family}Config")(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.ffn_hidden_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_attention_heads,
        num_key_value_heads=groups,
        head_dim=head,
        rms_norm_eps=spec.norm_epsilon,
        rope_parameters=rotary,
        max_position_embeddings=spec.max_position_embeddings,
    )
    theirs = getattr(transformers, f"{family}Model")(config).eval()
    state = {"embed_tokens.weight": model.embedding.weight, "norm.weight": model.norm.weight}
    for index, layer in enumerate(model.layers):
        prefix = f"layers.{index}."
        sizes = [spec.num_attention_heads * head, groups * head, groups * head]
        for kind in ("weight", "bias") if spec.add_qkv_bias else ("weight",):
            for name, part in zip("qkv", getattr(layer.attention.qkv, kind).split(sizes), strict=True):
                state[f"{prefix}self_attn.{name}_proj.{kind}"] = part
        state[f"{prefix}self_attn.o_proj.weight"] = layer.attention.output.weight
        if spec.qk_layernorm:
            state[f"{prefix}self_attn.q_norm.weight"] = layer.attention.query_norm.weight
            state[f"{prefix}self_attn.k_norm.weight"] = layer.attention.key_norm.weight
        gate, up = layer.feed_forward.gate_up.weight.chunk(2)
        state[f"{prefix}mlp.gate_proj.weight"], state[f"{prefix}mlp.up_proj.weight"] = gate, up
        state[f"{prefix}mlp.down_proj.weight"] = layer.feed_forward.down.weight
        state[f"{prefix}input_layernorm.weight"] = layer.attention_norm.weight
        state[f"{prefix}post_attention_layernorm.weight"] = layer.feed_forward_norm.weight
    theirs.load_state_dict({name: value.detach() for name, value in state.items()}, strict=True)
    return theirs
