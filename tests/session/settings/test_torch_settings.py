"""Settings in force of modules and optimizers of PyTorch, as their first step shows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

pytestmark = pytest.mark.native
torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from torch import Tensor, nn
else:
    from torch import Tensor, nn

from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from primus.session.settings.torch_settings import (  # noqa: E402
    StepWatch,
    find_module_kind,
    is_model_compiled,
    measure_applied_norm,
    read_torch_settings,
)

WIDTH, VOCABULARY = 8, 16


class TinyAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.is_fused = True

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        if self.is_fused:
            return self.output(F.scaled_dot_product_attention(q, k, v).squeeze(1))
        return self.output((torch.softmax(q @ k.mT, -1) @ v).squeeze(1))


class TinyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm, self.mlp = TinyAttention(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.recomputes: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes == "mlp":
            return checkpoint(self.mlp, self.norm(self.attention(x)), use_reentrant=False)
        return self.mlp(self.norm(self.attention(x)))


class TinyModel(nn.Module):
    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(TinyLayer() for _ in range(num_layers))
        self.recomputed: tuple[int, ...] = ()
        self.reentrant = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if number in self.recomputed else layer(x)
        return x


def watch_step(model: nn.Module, **options: Any) -> StepWatch:
    watch = StepWatch(model, **options)
    with watch:
        model(torch.arange(12).reshape(3, 4)).square().sum().backward()
    return watch


def read(model: nn.Module, watch: StepWatch, *optimizers: Any) -> dict[str, Any]:
    return {each.key: each.value for each in read_torch_settings(model, optimizers, watch)}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("recomputed", "found"),
    [((), "none"), ((0, 1), "full"), ((1,), "full in 1 of 2 layers")],
)
def test_a_layer_that_runs_in_the_backward_pass_is_recomputed(
    recomputed: tuple[int, ...], found: str, reentrant: bool
) -> None:
    model = TinyModel()
    model.recomputed, model.reentrant = recomputed, reentrant
    assert watch_step(model).recomputation == found


def test_a_part_of_each_layer_that_runs_again_is_selective() -> None:
    model = TinyModel()
    for layer in model.layers:
        layer.recomputes = "mlp"
    watch = watch_step(model)
    assert watch.recomputation == "selective"
    assert read(model, watch)["recompute_activations"] == "selective"


def test_a_flag_that_nothing_reads_does_not_count() -> None:
    model = TinyModel()
    model.gradient_checkpointing = True  # type: ignore[assignment]
    assert read(model, watch_step(model))["recompute_activations"] is False


def test_the_hooks_of_the_watch_are_gone_after_the_step() -> None:
    model = TinyModel()
    watch_step(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_compiled_model_is_not_touched() -> None:
    model = TinyModel()
    watch = watch_step(model, is_compiled=True)
    assert watch.recomputation is None and watch.output_types == {}
    model.layers[0].compile(backend="eager")
    with StepWatch(model):
        assert not any(module._forward_pre_hooks for module in model.layers[0].modules())
        assert any(module._forward_pre_hooks for module in model.layers[1].modules())


def test_the_types_of_results_are_those_of_the_computation() -> None:
    model = TinyModel()
    plain = read(model, watch_step(model))
    assert plain["bf16"] is False
    assert plain["precision.attention"] == "weights float32, results float32"
    with torch.autocast("cpu", torch.bfloat16):
        cast = read(model, watch_step(model))
    assert cast["bf16"] is True
    assert cast["precision.feed_forward"] == "weights float32, results bfloat16"
    assert cast["precision.embedding"] == "weights float32, results float32"


def test_one_matrix_product_of_another_type_is_no_bf16() -> None:
    model = TinyModel()
    with torch.autocast("cpu", torch.bfloat16):
        model.layers[1].mlp.forward = torch.autocast("cpu", enabled=False)(  # type: ignore[method-assign]
            lambda x: F.linear(x.float(), model.layers[1].mlp.weight)
        )
        assert read(model, watch_step(model))["bf16"] == "bfloat16, float32"


def test_the_graph_names_the_kernel_of_attention() -> None:
    model = TinyModel()
    assert read(model, watch_step(model))["attention_kernel"].startswith("ScaledDotProduct")
    for layer in model.layers:
        layer.attention.is_fused = False
    assert read(model, watch_step(model))["attention_kernel"] == "Softmax"


def test_the_embedding_tells_the_micro_batch() -> None:
    model = TinyModel()
    found = read(model, watch_step(model))
    assert (found["micro_batch_size"], found["seq_length"]) == (3, 4)


def build_adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.8, 0.9), eps=1e-7, **options)


@pytest.mark.parametrize(
    ("options", "name"),
    [({"fused": True}, "fused"), ({"foreach": True}, "foreach"), ({"foreach": False}, "for-loop"), ({}, "for-loop")],
)
def test_the_loop_of_the_optimizer_is_the_one_that_its_step_takes(options: dict[str, Any], name: str) -> None:
    model = TinyModel()
    found = read(model, watch_step(model), build_adamw(model, **options))
    assert found["optimizer_implementation"] == name, "without flags torch takes foreach on GPUs only"
    numbers = ("adam_beta1", "adam_beta2", "adam_eps", "learning_rate")
    assert [found[key] for key in numbers] == [0.8, 0.9, 1e-7, 0.5]
    assert found["optimizer"] == "adamw"


def test_adam_with_coupled_weight_decay_is_not_adamw() -> None:
    model = TinyModel()
    assert read(model, watch_step(model), torch.optim.Adam(model.parameters()))["optimizer"] == "adam"


def test_several_values_of_groups_are_listed() -> None:
    model = TinyModel()
    groups = [{"params": [model.embedding.weight], "eps": 1e-3}, {"params": list(model.layers.parameters())}]
    found = read(model, watch_step(model), torch.optim.AdamW(groups, eps=1e-8))
    assert found["adam_eps"] == [1e-8, 1e-3]


def test_the_moments_of_the_only_step_tell_the_gradient_that_the_optimizer_got() -> None:
    model = TinyModel()
    optimizer = build_adamw(model)
    watch_step(model)
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    norm = float(nn.utils.get_total_norm(gradients))
    nn.utils.clip_grad_norm_(model.parameters(), norm / 4)
    optimizer.step()
    assert measure_applied_norm([optimizer]) == pytest.approx(norm / 4, rel=1e-4)
    optimizer.step()
    assert measure_applied_norm([optimizer]) is None, "moments of two steps"


@pytest.mark.parametrize("call", [lambda model: model.compile, lambda model: model.layers[0].compile])
def test_compilation_is_in_force_once_there_is_a_graph(call: Callable[[TinyModel], Any]) -> None:
    from torch._dynamo.utils import counters

    model = TinyModel()
    assert not is_model_compiled(model)
    call(model)(backend="eager")
    counters.clear()
    assert not is_model_compiled(model), "nothing was compiled yet"
    with torch.no_grad():
        model(torch.arange(4)[None])
    assert is_model_compiled(model)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("layers.0.attention.output", "attention"),
        ("output", "head"),
        ("lm_head", "head"),
        ("decoder.layers.3.self_attention.linear_qkv", "attention"),
        ("decoder.layers.3.mlp.linear_fc1", "feed_forward"),
        ("decoder.layers.3.mlp.router", "router"),
        ("model.layers.1.mlp.gate", "router"),
        ("model.layers.1.mlp.gate_proj", "feed_forward"),
        ("decoder.layers.3.mlp.experts.linear_fc1", "experts"),
        ("model.layers.1.post_attention_layernorm", "norm"),
        ("layers.0.attention.qkv.adapter", "adapter"),
        ("tok_embeddings", "embedding"),
        ("mixer", "other"),
    ],
)
def test_a_path_tells_the_kind_of_a_module(path: str, kind: str) -> None:
    assert find_module_kind(path) == kind
