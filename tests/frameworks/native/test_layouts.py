"""Every layout computes the losses and gradients of one process."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from msgspec import structs

from fakes.gloo import in_processes
from primus import experiment
from primus.config.schema import ModelSpec, OptimizerConfig, ParallelConfig
from primus.data.training.masks import DocumentHandling
from primus.errors import UsageError
from primus.frameworks import native
from primus.frameworks.native.engine.checkpoint import State, read_state, write_state
from primus.frameworks.native.engine.layout import ALONE, Layout, build_layout
from primus.frameworks.native.engine.model import Transformer, build_model, initialize_weights
from primus.frameworks.native.engine.moe import apply_router_settings, iterate_balance_biases
from primus.frameworks.native.engine.optimizer import build_optimizer
from primus.frameworks.native.engine.pipeline import Batch, choose_layers
from primus.frameworks.native.engine.post_training.generate import generate
from primus.frameworks.native.engine.recompute import ActivationMemory
from primus.frameworks.native.engine.state import collect_moments, collect_weights
from primus.frameworks.native.engine.step import Trainable, evaluate_batches, prepare_model, train_step
from primus.frameworks.native.layout_settings import LayoutSettings
from primus.frameworks.native.router_settings import RouterSettings
from primus.frameworks.native.training_settings import TrainingSettings
from primus.models.model_checks import check_parallel
from primus.runs.store import Run
from primus.session.ranks.torch_processes import TorchProcesses

SPEC = ModelSpec(
    num_layers=4,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=8,
    num_query_groups=4,
    vocab_size=67,  # no number of processes divides it
    max_position_embeddings=32,
    qk_layernorm=True,
    add_qkv_bias=True,
)
EXPERTS = structs.replace(
    SPEC,
    num_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=24,
    moe_shared_expert_intermediate_size=16,
    moe_aux_loss_coeff=0.1,
    moe_router_enable_expert_bias=True,
    first_k_dense_replace=1,
)
LATENT = structs.replace(
    EXPERTS,
    multi_latent_attention=True,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_head_dim=8,
    qk_pos_emb_head_dim=4,
    v_head_dim=8,
    qk_layernorm=False,
    add_qkv_bias=False,
    num_query_groups=None,
)
PREDICTING = structs.replace(LATENT, mtp_num_layers=2)
SINKS = structs.replace(
    SPEC,
    num_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=24,
    add_bias_linear=True,
    attention_sinks=True,
    window_size=7,
    window_layer_period=2,
    activation_clamp=7.0,
    qk_layernorm=False,
    add_qkv_bias=False,
)
GEMMA = structs.replace(
    SPEC,
    zero_centered_norms=True,
    post_layernorm=True,
    scale_embeddings=True,
    ffn_activation="gelu",
    query_pre_attn_scalar=3,
    attn_logit_softcapping=2.0,
    final_logit_softcapping=3.0,
    hybrid_layer_pattern="W*",
    window_size=7,
    window_rotary_base=100.0,
    add_qkv_bias=False,
    untie_embeddings_and_output_weights=False,
)
TIED = structs.replace(SPEC, untie_embeddings_and_output_weights=False)
LENGTH, NUM_MICRO_BATCHES = 32, 8
TENSOR, CONTEXT = "tensor_model_parallel_size", "context_parallel_size"
EXPERT, MOE = "expert_model_parallel_size", {"spec": EXPERTS}
PIPELINE, SHARDED, SEQUENCE = "pipeline_model_parallel_size", "use_distributed_optimizer", "sequence_parallel"
GROUPS, COPIES = "num_virtual_stages_per_pipeline_rank", "num_distributed_optimizer_instances"
TWO: list[dict[str, Any]] = [
    {},
    {SHARDED: False},
    {TENSOR: 2},
    {TENSOR: 2, SEQUENCE: True},
    {CONTEXT: 2},
    {CONTEXT: 2, SHARDED: False},
    {PIPELINE: 2},
    {PIPELINE: 2, GROUPS: 2},
]
FOUR: list[dict[str, Any]] = [
    {TENSOR: 4, SEQUENCE: True},
    {CONTEXT: 4},
    {PIPELINE: 4},
    {TENSOR: 2, SEQUENCE: True},
    {TENSOR: 2, SHARDED: False},
    {TENSOR: 2, CONTEXT: 2},
    {TENSOR: 2, CONTEXT: 2, SEQUENCE: True},
    {PIPELINE: 2},
    {PIPELINE: 2, SHARDED: False},
    {PIPELINE: 2, TENSOR: 2, SEQUENCE: True},
    {PIPELINE: 2, CONTEXT: 2},
    {CONTEXT: 2, SHARDED: False},
    {COPIES: 2},
    {PIPELINE: 2, GROUPS: 2},
    {PIPELINE: 2, GROUPS: 2, COPIES: 2},
    {PIPELINE: 2, GROUPS: 2, TENSOR: 2, SEQUENCE: True},
]
TIED_OF_FOUR: list[dict[str, Any]] = [
    {PIPELINE: 4},
    {PIPELINE: 2, TENSOR: 2},
    {PIPELINE: 2, GROUPS: 2},
    {TENSOR: 4, SEQUENCE: True},
]
EXPERTS_OF_FOUR: list[dict[str, Any]] = [
    {EXPERT: 2},
    {EXPERT: 4, SHARDED: False},
    {EXPERT: 4, TENSOR: 2, SEQUENCE: True},
    {EXPERT: 2, TENSOR: 2},
    {EXPERT: 4, CONTEXT: 2, TENSOR: 2, SEQUENCE: True},
    {TENSOR: 4, SEQUENCE: True},
    {PIPELINE: 2, EXPERT: 2},
    {PIPELINE: 2, EXPERT: 2, TENSOR: 2, SEQUENCE: True},
    {PIPELINE: 2, GROUPS: 2, EXPERT: 2},
    {EXPERT: 2, COPIES: 2},
]
LATENT_OF_FOUR: list[dict[str, Any]] = [
    {TENSOR: 2, CONTEXT: 2},
    {TENSOR: 4, EXPERT: 2, SEQUENCE: True},
    {PIPELINE: 2, CONTEXT: 2},
]
SINKS_OF_FOUR: list[dict[str, Any]] = [
    {TENSOR: 2, CONTEXT: 2},
    {TENSOR: 4, EXPERT: 2, SEQUENCE: True},
    {PIPELINE: 2, CONTEXT: 2, EXPERT: 2},
]


def build_sizes(sizes: dict[str, Any]) -> tuple[Layout, int]:
    """The layout of this process, and the groups of layers of a stage."""
    settings = LayoutSettings(**{key: value for key, value in sizes.items() if key in (GROUPS, COPIES)})
    parallel = ParallelConfig(**{key: value for key, value in sizes.items() if key not in (GROUPS, COPIES)})
    layout = build_layout(parallel, torch.device("cpu"), dist.get_world_size(), settings)
    return layout, settings.num_virtual_stages_per_pipeline_rank


class GradientRecorder:
    """In place of an optimizer: keeps the gradients that it is given."""

    def __init__(self, model: Transformer) -> None:
        self.param_groups: list[dict[str, Any]] = []
        self.model = model
        self.gradients: dict[str, list[tuple[tuple[int, ...], torch.Tensor]]] = {}

    def step(self) -> None:
        for name, weight in self.model.place_weights().items():
            assert weight.tensor.grad is not None, name
            pieces = weight.place(weight.tensor.grad).list_pieces()
            self.gradients[name] = [(piece.offsets, piece.local.clone()) for piece in pieces]

    def zero_grad(self, set_to_none: bool) -> None:
        self.model.zero_grad(set_to_none=set_to_none)


def batches(layout: Layout) -> list[Batch]:
    """The micro batches of this process; all data ranks together have those of one process."""
    tokens = torch.randint(67, (NUM_MICRO_BATCHES, 1, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    own = tokens[layout.data.rank :: layout.data.size]
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in own]


def build(
    layout: Layout,
    spec: ModelSpec = SPEC,
    dtype: torch.dtype = torch.float64,
    documents: bool = False,
    recompute: Literal["full", "selective"] | None = None,
    offload: bool = False,
    groups: int = 1,
    **options: Any,
) -> Trainable:
    model = build_model(spec, "meta", 1, dtype, layout, choose_layers(spec.num_layers, layout.pipeline, groups))
    model.activations = ActivationMemory(recompute, is_offloaded=offload)
    if documents:
        model.documents = DocumentHandling(5, True, True)
    trainable = prepare_model(model, device="cpu", **options)
    initialize_weights(model, 1)
    apply_router_settings(model, RouterSettings(moe_router_bias_update_rate=0.01))
    for name, weight in model.place_weights().items():
        if name.endswith(("bias", "sinks")):  # which begin alike, as a bias that is added twice would not show
            weight.fill(torch.linspace(-0.5, 0.5, weight.shape.numel(), dtype=dtype).view(weight.shape))
    return trainable


def compute(trainable: Trainable) -> dict[str, Any]:
    """Loss, norm and gradients of a step, the biases of routers after it, and the loss of an evaluation."""
    recorder = GradientRecorder(trainable.model)
    own = batches(trainable.model.layout)
    result = train_step(trainable, recorder, own, learning_rate=1.0, clip_grad=0.0)  # type: ignore[arg-type]
    evaluated = evaluate_batches(trainable, own)
    biases = {name: bias.clone() for name, bias in iterate_balance_biases(trainable.model)}
    return {"values": result.values, "evaluated": evaluated, "gradients": recorder.gradients, "biases": biases}


def _compute_layouts(rank: int, folder: Path, layouts: list[dict[str, Any]], options: dict[str, Any]) -> None:
    found = []
    for sizes in layouts:
        layout, groups = build_sizes(sizes)
        found.append(compute(build(layout, groups=groups, **options)))
    torch.save(found, folder / f"rank_{rank}")


@pytest.mark.parametrize(
    ("world", "layouts", "options"),
    [
        (2, TWO, {}),
        (4, FOUR, {}),
        (4, TIED_OF_FOUR, {"spec": TIED}),
        (2, [*TWO, {EXPERT: 2}, {EXPERT: 2, TENSOR: 2}, {EXPERT: 2, CONTEXT: 2}], MOE),
        (4, EXPERTS_OF_FOUR, MOE),
        (4, LATENT_OF_FOUR, {"spec": LATENT}),
        (2, [*TWO, {EXPERT: 2}], {"spec": PREDICTING}),
        (4, [{PIPELINE: 2, TENSOR: 2, SEQUENCE: True}, {PIPELINE: 2, EXPERT: 2}], {"spec": PREDICTING}),
        (2, [{CONTEXT: 2}, {PIPELINE: 2}], {"spec": PREDICTING, "documents": True, "recompute": "full"}),
        (2, [{TENSOR: 2}, {TENSOR: 2, SEQUENCE: True}, {CONTEXT: 2}, {PIPELINE: 2}], {"spec": GEMMA}),
        (4, SINKS_OF_FOUR, {"spec": SINKS}),
        (4, [{CONTEXT: 2, TENSOR: 2}], {"spec": SINKS, "documents": True}),
        (4, [{CONTEXT: 2, TENSOR: 2, SEQUENCE: True}, {CONTEXT: 2, PIPELINE: 2}], {"documents": True}),
    ],
    ids=[
        "two",
        "four",
        "tied embeddings",
        "experts of two",
        "experts of four",
        "latent attention",
        "further tokens of two",
        "further tokens of four",
        "further tokens of documents",
        "soft limits",
        "sinks",
        "documents and sinks",
        "documents",
    ],
)
def test_a_layout_has_the_loss_and_the_gradients_of_one_process(
    tmp_path: Path, world: int, layouts: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    in_processes(world, _compute_layouts, tmp_path, layouts, options)
    ranks = [torch.load(tmp_path / f"rank_{rank}") for rank in range(world)]
    one = compute(build(ALONE, **options))
    assert all(bias.any() for bias in one["biases"].values()), "they have changed"
    for index, sizes in enumerate(layouts):
        results = [found[index] for found in ranks]
        for each in results:
            torch.testing.assert_close(each["values"], one["values"], rtol=1e-12, atol=0, msg=f"{sizes}")
            assert all(torch.equal(bias, one["biases"][name]) for name, bias in each["biases"].items()), sizes
            assert each["evaluated"] == pytest.approx(one["evaluated"], rel=1e-12), sizes
        for name, [(_, expected)] in one["gradients"].items():
            whole = torch.full_like(expected, torch.nan)
            for each in results:
                for offsets, part in each["gradients"].get(name, ()):
                    whole[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))] = part
            torch.testing.assert_close(whole, expected, rtol=0, atol=1e-12, msg=f"{sizes} {name}")


SAVED = {PIPELINE: 2, TENSOR: 2, EXPERT: 2, SEQUENCE: True}
RELOADED: list[dict[str, Any]] = [{}, {TENSOR: 4}, {PIPELINE: 4}, {EXPERT: 4, TENSOR: 2}, {SHARDED: False}]


def collect_state(trainable: Trainable, optimizer: torch.optim.Optimizer) -> State:
    return {**collect_weights(trainable.model), **collect_moments(trainable.model, optimizer)}


def _save_and_reload(rank: int, folder: Path) -> None:
    """Saves the state after a step of one layout; the others load it, and save what they have then."""
    world = dist.get_world_size()
    processes = TorchProcesses(rank, world, torch.device("cpu"), timedelta(minutes=1))
    for number, sizes in enumerate([SAVED, *RELOADED]):
        layout = build_layout(ParallelConfig(**sizes), torch.device("cpu"), world)
        trainable = build(layout, EXPERTS)
        optimizer = build_optimizer(trainable.model, OptimizerConfig())
        if number == 0:
            train_step(trainable, optimizer, batches(layout), learning_rate=0.1, clip_grad=1.0)
        else:
            read_state(collect_state(trainable, optimizer), folder / "0", processes)
        write_state(collect_state(trainable, optimizer), folder / str(number), processes)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_checkpoint_of_one_layout_is_the_same_in_every_other(tmp_path: Path) -> None:
    in_processes(4, _save_and_reload, tmp_path)
    processes = TorchProcesses(0, 1, torch.device("cpu"), timedelta(minutes=1))
    found = []
    for number in range(1 + len(RELOADED)):
        trainable = build(ALONE, EXPERTS)
        state = collect_state(trainable, build_optimizer(trainable.model, OptimizerConfig()))
        read_state(state, tmp_path / str(number), processes)
        found.append(state)
    trainable = build(ALONE, EXPERTS)
    optimizer = build_optimizer(trainable.model, OptimizerConfig())
    train_step(trainable, optimizer, batches(ALONE), learning_rate=0.1, clip_grad=1.0)
    for name, expected in collect_state(trainable, optimizer).items():
        torch.testing.assert_close(found[0][name], expected, rtol=1e-9, atol=1e-12, check_dtype=False, msg=name)
        for other in found[1:]:
            assert torch.equal(found[0][name], other[name]), name


OPTIMIZERS = [
    (OptimizerConfig(optimizer="muon"), TrainingSettings(muon_use_nesterov=True, muon_extra_scale_factor=0.2)),
    (OptimizerConfig(optimizer="sgd"), TrainingSettings()),
    (OptimizerConfig(), TrainingSettings(optimizer_cpu_offload=True)),
]
UPDATED_BY_FOUR = [
    {},
    {EXPERT: 4, SHARDED: False},
    {CONTEXT: 2, TENSOR: 2, SEQUENCE: True},
    {PIPELINE: 2, TENSOR: 2, EXPERT: 2, SEQUENCE: True},
]


def train_two_steps(layout: Layout, number: int) -> State:
    """Weights and states after two steps of an optimizer."""
    trainable = build(layout, EXPERTS)
    optimizer = build_optimizer(trainable.model, *OPTIMIZERS[number])
    for rate in (0.1, 0.05):
        train_step(trainable, optimizer, batches(layout), learning_rate=rate, clip_grad=1.0)
    return collect_state(trainable, optimizer)


def _update(rank: int, folder: Path, layouts: list[dict[str, Any]]) -> None:
    """Saves the state of each layout and optimizer, and how many elements Muon has sent."""
    world, exchange, sent = dist.get_world_size(), dist.all_to_all_single, [0]
    processes = TorchProcesses(rank, world, torch.device("cpu"), timedelta(minutes=1))

    def count_elements(found: torch.Tensor, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent[0] += given.numel() * (kwargs["group"].size() == world)
        return exchange(found, given, *args, **kwargs)

    for place, sizes in enumerate(layouts):
        layout = build_layout(ParallelConfig(**sizes), torch.device("cpu"), world)
        for number in range(len(OPTIMIZERS)):
            if not sizes and number == 0:
                dist.all_to_all_single = count_elements
            write_state(train_two_steps(layout, number), folder / f"{place}.{number}", processes)
            dist.all_to_all_single = exchange
    torch.save(sent[0], folder / f"sent_{rank}")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_every_optimizer_updates_the_weights_of_each_layout_as_those_of_one_process(tmp_path: Path) -> None:
    """The checkpoints are read in one process, so that they are resharded as well."""
    in_processes(4, _update, tmp_path, UPDATED_BY_FOUR)
    processes = TorchProcesses(0, 1, torch.device("cpu"), timedelta(minutes=1))
    for number in range(len(OPTIMIZERS)):
        expected = train_two_steps(ALONE, number)
        for place, sizes in enumerate(UPDATED_BY_FOUR):
            found = {name: torch.full_like(tensor, -1) for name, tensor in expected.items()}
            read_state(found, tmp_path / f"{place}.{number}", processes)
            for name, tensor in expected.items():
                # AdamW divides gradients that are almost zero by their size.
                exact = number < 2 and f"optimizer.exp_avg.{name.removeprefix('model.')}" not in expected
                rtol, atol = (0, 1e-12) if exact else (1e-8, 1e-11)
                torch.testing.assert_close(found[name], tensor, rtol=rtol, atol=atol, msg=f"{number} {sizes} {name}")
    matrices = [name for name in train_two_steps(ALONE, 0) if name.startswith("optimizer.momentum_buffer")]
    elements = sum(expected_size(name) for name in matrices)
    # Two steps; each matrix goes to its owner once and back once, those that are there already included.
    assert sum(torch.load(tmp_path / f"sent_{rank}") for rank in range(4)) == 2 * 2 * elements


def expected_size(name: str) -> int:
    weights = build(ALONE, EXPERTS).model.place_weights()
    return weights[name.removeprefix("optimizer.momentum_buffer.")].shape.numel()


def _train_in_float32(rank: int, folder: Path, layouts: list[dict[str, Any]], options: dict[str, Any]) -> None:
    losses = []
    for sizes in layouts:
        layout = build_layout(ParallelConfig(**sizes), torch.device("cpu"), dist.get_world_size())
        losses.append(train_in_float32(layout, **options))
    torch.save(losses, folder / f"rank_{rank}")


def train_in_float32(layout: Layout, steps: int = 20, bf16: bool = False, **options: Any) -> list[float]:
    trainable = build(layout, dtype=torch.float32, **options)
    trainable.model.compute_dtype = torch.bfloat16 if bf16 else None
    optimizer = build_optimizer(trainable.model, OptimizerConfig())
    results = [
        train_step(trainable, optimizer, batches(layout), learning_rate=1e-3, clip_grad=1.0) for _ in range(steps)
    ]
    return [result.loss for result in results]


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, 5e-5),
        ({"bf16": True, "steps": 3}, 1e-2),
        ({"recompute": "full", "offload": True, "steps": 3}, 1e-6),
        ({"recompute": "selective", "steps": 3}, 1e-6),
    ],
    ids=["float32", "bf16", "recompute and offload", "recompute selectively"],
)
def test_the_losses_of_layouts_in_float32_are_those_of_one_process(
    tmp_path: Path, options: dict[str, Any], tolerance: float
) -> None:
    layouts: list[dict[str, Any]] = [{TENSOR: 2, SEQUENCE: True}, {CONTEXT: 2}, {PIPELINE: 2}, {}]
    if options.get("recompute") == "selective":
        layouts.remove({CONTEXT: 2})  # refused
    in_processes(2, _train_in_float32, tmp_path, layouts, options)
    expected = train_in_float32(ALONE, **options)
    assert expected[-1] < expected[0]
    for rank in range(2):
        for sizes, losses in zip(layouts, torch.load(tmp_path / f"rank_{rank}"), strict=True):
            assert losses == pytest.approx(expected, rel=tolerance), sizes
            assert losses[0] == pytest.approx(expected[0], rel=1e-2 if options.get("bf16") else 1e-6), sizes


PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9]]


def _generate(rank: int, folder: Path, layouts: list[dict[str, Any]]) -> None:
    found = []
    for sizes in layouts:
        model = build(build_layout(ParallelConfig(**sizes), torch.device("cpu"), dist.get_world_size())).model
        found.append(generate(model, PROMPTS, 8).completions)
    torch.save(found, folder / f"rank_{rank}")


def test_processes_that_share_a_model_generate_the_tokens_of_one(tmp_path: Path) -> None:
    layouts: list[dict[str, Any]] = [{TENSOR: 2}, {TENSOR: 2, SEQUENCE: True}, {CONTEXT: 2}]
    in_processes(2, _generate, tmp_path, layouts)
    expected = generate(build(ALONE).model, PROMPTS, 8).completions
    for rank in range(2):
        for found in torch.load(tmp_path / f"rank_{rank}", weights_only=False):
            assert [each.tokens for each in found] == [each.tokens for each in expected]


def check(run: Run) -> None:
    found = experiment.read_run_experiment(run)
    check_parallel(found.trainer.model, found.trainer.parallel, found.trainer.training.seq_length)
    native.check(found)


@pytest.mark.parametrize(
    ("changes", "problem", "hint"),
    [
        ({TENSOR: 4, "num_query_groups": 2}, "4 does not divide num_query_groups 2", "tensor_model_parallel_size: 2"),
        ({EXPERT: 3, "num_experts": 8}, "3 does not divide num_experts 8", "use one of 1, 2, 4, 8"),
        ({PIPELINE: 3}, "3 does not divide num_layers 2", "use one of 1, 2"),
        ({CONTEXT: 2, "seq_length": 34}, "34 does not divide into 4 equal parts", "use a multiple of 4"),
        ({PIPELINE: 2, "num_layers": 8, GROUPS: 3}, "3 does not divide the 4 layers of a stage", "use one of 1, 2, 4"),
        ({GROUPS: 2}, "2: there is one pipeline stage", "raise pipeline_model_parallel_size"),
        (
            {TENSOR: 2, "qk_layernorm": True, "qk_layernorm_across_heads": True},
            "2 divides heads that qk_layernorm_across_heads",
            "tensor_model_parallel_size: 1",
        ),
        ({TENSOR: 2, "num_experts": 8, "seq_length": 33}, "33 tokens of a process do not", "use a multiple of 2"),
    ],
)
def test_an_impossible_layout_is_refused_with_the_valid_choices(
    make_run: Callable[..., Run], changes: dict[str, Any], problem: str, hint: str
) -> None:
    with pytest.raises(UsageError, match=problem) as error:
        check(make_run(**changes))
    assert hint in error.value.hint


def _refuse_instances(rank: int, folder: Path) -> None:
    settings = LayoutSettings(num_distributed_optimizer_instances=3)
    with pytest.raises(UsageError, match="3 does not divide 2 processes with one weight") as error:
        build_layout(ParallelConfig(), torch.device("cpu"), dist.get_world_size(), settings)
    assert error.value.hint == "use a divisor of 2"


def test_copies_that_do_not_divide_the_processes_are_refused(tmp_path: Path) -> None:
    in_processes(2, _refuse_instances, tmp_path)
