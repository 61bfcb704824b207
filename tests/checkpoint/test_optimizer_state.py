"""The state of AdamW moves between native, torchtitan and Megatron as the weights do, and training goes on from it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from checkpoint_models import DENSE, SPARSE, draw_hub_tensors, make_spec
from frameworks.torchtitan import runs
from primus import registry
from primus.checkpoint import folders, manifest
from primus.checkpoint.convert import TargetFormat, TargetSettings, compare_weights, plan_conversion, write_conversion
from primus.checkpoint.family import BUFFERS
from primus.checkpoint.formats.dcp import DcpFolder
from primus.checkpoint.formats.open import FoundCheckpoint, OpenedCheckpoint, open_checkpoint
from primus.checkpoint.formats.optimizer_state import open_training_state
from primus.checkpoint.training_state import MOMENTS, AdamSettings, SavedPosition, TrainingState
from primus.checkpoint.weights import TensorDict
from primus.cli.main import main
from primus.config.schema import ModelSpec, Trainer
from primus.errors import UsageError
from primus.framework import CHECKPOINTS
from primus.frameworks.native.engine import state
from primus.frameworks.native.engine.optimizer import build_optimizer
from primus.frameworks.native.engine.step import prepare_model, train_step

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

PARITY = 5e-5
"""Largest difference of losses between two engines in float32."""
POSITION = SavedPosition(7, 56, "run", "sha256:abc-2", (2.5,), {"name": {"seen": 1}})


def draw_training_state(spec: ModelSpec) -> TrainingState:
    generator = torch.Generator().manual_seed(3)
    moments = {
        moment: TensorDict(
            {
                name: torch.randn(tensor.shape, generator=generator)
                for name, tensor in draw_hub_tensors(spec).items()
                if not name.endswith(BUFFERS)
            }
        )
        for moment in MOMENTS
    }
    return TrainingState(moments, 6.0, POSITION, AdamSettings(1e-3, (0.8, 0.9), 1e-7, 0.2))


def write_first(spec: ModelSpec, training: TrainingState | None, target: Path, to: TargetFormat) -> None:
    """Write weights and state that no file has yet."""
    from primus.checkpoint.conversion import write_checkpoint

    weights = TensorDict(draw_hub_tensors(spec))
    source = OpenedCheckpoint(weights, spec, 7, FoundCheckpoint("native", target, 7))
    plan = registry.load_plug_in(CHECKPOINTS, to).plan_output(weights, source, TargetSettings(to), training)
    write_checkpoint(target, plan, "")


def convert(source: Path, target: Path, to: TargetFormat, spec: ModelSpec | None = None) -> Path:
    settings = TargetSettings(to, optimizer=True)
    write_conversion(plan_conversion(open_checkpoint(str(source), spec), settings), target, lambda _: None)
    return target


@pytest.mark.parametrize("name", [*DENSE, "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_moments_steps_and_position_come_back_through_every_engine(tmp_path: Path, name: str) -> None:
    spec = make_spec(**{**DENSE, **SPARSE}[name])
    drawn = draw_training_state(spec)
    engines: list[TargetFormat] = ["torchtitan", "megatron", "torchtitan"]
    if name in DENSE:
        engines += ["native", "megatron", "native"]
    write_first(spec, drawn, tmp_path / "0", "megatron")
    for number, to in enumerate(engines, 1):
        convert(tmp_path / str(number - 1), tmp_path / str(number), to, spec)
        found = open_training_state(open_checkpoint(str(tmp_path / str(number)), spec))
        assert found is not None and found.moments.keys() == set(MOMENTS)
        for moment, own in drawn.moments.items():
            assert compare_weights(own, found.moments[moment]) == [], (to, moment)
        assert (found.num_updates, found.position) == (6.0, POSITION), to
    # Native saves no settings; before it they are those of the source.
    titan = open_training_state(open_checkpoint(str(tmp_path / "3"), spec))
    assert titan is not None and titan.settings == drawn.settings


def test_a_checkpoint_of_transformers_moves_to_the_other_engines(tmp_path: Path) -> None:
    spec = make_spec(untie_embeddings_and_output_weights=False)
    hub, drawn = draw_hub_tensors(spec), draw_training_state(spec)
    moments = {
        f"optimizer.state.{name}.{moment}": source.read(name)
        for moment, source in drawn.moments.items()
        for name in source.list_tensors()
    }
    head = {"model.lm_head.weight": hub["model.embed_tokens.weight"]}
    steps = {f"optimizer.state.{name}.step": torch.tensor(6.0) for name in hub}
    # Norms do not decay; their group may be the first one or the last one.
    decays = {"0": 0.0, "1": 0.2, "2": 0.0}
    settings: dict[str, Any] = {f"optimizer.param_groups.{group}.betas": (0.8, 0.9) for group in decays}
    settings |= {f"optimizer.param_groups.{group}.weight_decay": decay for group, decay in decays.items()}
    tensors = {f"model.{name}": tensor for name, tensor in hub.items()}
    dcp.save({**tensors, **head, **moments, **steps, **settings}, checkpoint_id=tmp_path / "first", no_dist=True)
    found = open_training_state(open_checkpoint(str(tmp_path / "first"), spec))
    assert found is not None and (found.settings.weight_decay, found.settings.betas) == (0.2, (0.8, 0.9))
    opened = open_checkpoint(str(convert(tmp_path / "first", tmp_path / "native", "native", spec)), spec)
    training = open_training_state(opened)
    assert compare_weights(TensorDict(hub), opened.weights) == []
    assert training is not None and training.num_updates == 6.0
    for moment, own in drawn.moments.items():
        assert compare_weights(own, training.moments[moment]) == [], moment


def test_weights_in_bf16_continue_from_the_float32_weights_of_megatron(tmp_path: Path) -> None:
    spec = make_spec()
    hub = draw_hub_tensors(spec)
    rounded = TensorDict({name: tensor.bfloat16() for name, tensor in hub.items()})
    opened = OpenedCheckpoint(rounded, spec, 7, FoundCheckpoint("native", tmp_path, 7))
    training = draw_training_state(spec)._replace(masters=TensorDict(hub))
    from primus.checkpoint.conversion import write_checkpoint

    plan = registry.load_plug_in(CHECKPOINTS, "megatron").plan_output(
        rounded, opened, TargetSettings("megatron"), training
    )
    write_checkpoint(tmp_path / "core", plan, "")
    assert open_checkpoint(str(tmp_path / "core"), spec).weights.list_tensors()[next(iter(hub))].dtype == torch.bfloat16
    convert(tmp_path / "core", tmp_path / "titan", "torchtitan", spec)
    assert compare_weights(TensorDict(hub), open_checkpoint(str(tmp_path / "titan"), spec).weights) == []


def test_a_converted_state_is_a_checkpoint_that_load_continues_from(tmp_path: Path) -> None:
    spec = make_spec()
    write_first(spec, draw_training_state(spec), tmp_path / "core", "megatron")
    (iteration,) = (tmp_path / "core").glob("iter_*")
    assert not folders.is_foreign(str(tmp_path / "core"))
    assert folders.find_candidates(str(tmp_path / "core")) == [iteration]
    saved = manifest.read_manifest(iteration)
    assert saved is not None and manifest.find_damage(iteration, saved) == ""
    assert (saved.backend, saved.step, saved.consumed_samples) == ("megatron", 7, 56)
    # Weights alone have no manifest: training begins at step 0 with them.
    settings = TargetSettings("megatron")
    opened = open_checkpoint(str(tmp_path / "core"), spec)
    write_conversion(plan_conversion(opened, settings), tmp_path / "weights", lambda _: None)
    assert folders.is_foreign(str(tmp_path / "weights"))


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ("optimizer.max_exp_avg_sq.norm.weight", "its optimizer has max_exp_avg_sq, which AdamW does not have"),
        ("optimizer.momentum_buffer.norm.weight", "its optimizer has momentum_buffer, which AdamW does not have"),
    ],
)
def test_the_state_of_another_optimizer_is_refused_and_its_weights_are_not(
    tmp_path: Path, added: str, message: str
) -> None:
    spec = make_spec()
    native = save_native(tmp_path / "native", spec, {added: torch.zeros(24)})
    with pytest.raises(UsageError, match=message) as refused:
        convert(native, tmp_path / "out", "torchtitan", spec)
    assert "--no-optimizer" in refused.value.hint and not (tmp_path / "out").exists()
    plan_conversion(open_checkpoint(str(native), spec), TargetSettings("torchtitan"))


def test_buckets_of_megatrons_processes_are_refused(tmp_path: Path) -> None:
    spec = make_spec()
    write_first(spec, draw_training_state(spec), tmp_path / "core", "megatron")
    (folder,) = (tmp_path / "core").glob("iter_*")
    core = DcpFolder(folder)
    weights = {name: core.read(name) for name in core.list_tensors() if not name.startswith("optimizer.")}
    buckets = {"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_x.bucket_idx_0.exp_avg": torch.zeros(8)}
    dcp.save(weights | buckets, checkpoint_id=str(tmp_path / "buckets"), no_dist=True)
    with pytest.raises(UsageError, match=r"saved in buckets of its processes \(dp_reshardable\)"):
        open_training_state(open_checkpoint(str(tmp_path / "buckets"), spec))
    objects = {"optimizer.distributed.dp_group_idx_0.param_state/shard_0_1": {"exp_avg": 1}}
    dcp.save(weights | objects, checkpoint_id=str(tmp_path / "objects"), no_dist=True)
    with pytest.raises(UsageError, match=r"saved in buckets of its processes \(dp_zero_gather_scatter\)"):
        open_training_state(open_checkpoint(str(tmp_path / "objects"), spec))


def test_objects_in_megatrons_common_file_give_their_values_and_run_nothing(tmp_path: Path) -> None:
    import argparse

    from primus.checkpoint.formats.inert_pickle import load_inert_values

    class Attack:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    args = argparse.Namespace(consumed_train_samples=48, params_dtype=torch.bfloat16)
    torch.save({"args": args, "iteration": 3, "other": Attack()}, tmp_path / "common.pt")
    values = load_inert_values(tmp_path / "common.pt")
    assert (values["args"].consumed_train_samples, values["args"].params_dtype) == (48, torch.bfloat16)
    assert values["iteration"] == 3 and not (tmp_path / "ran").exists()


def test_loading_a_megatron_checkpoint_of_another_shape_names_every_key(tmp_path: Path) -> None:
    import argparse

    from primus.checkpoint.formats.open import find_checkpoint
    from primus.checkpoint.formats.saved_shape import check_saved_shape

    spec = make_spec()
    write_first(spec, draw_training_state(spec), tmp_path / "core", "megatron")
    (folder,) = (tmp_path / "core").glob("iter_*")
    common = torch.load(folder / "common.pt", weights_only=True)
    args = argparse.Namespace(num_layers=4, hidden_size=32, group_query_attention=False, num_attention_heads=6)
    args.num_query_groups, args.padded_vocab_size = 1, 64
    torch.save(common | {"args": args}, folder / "common.pt")
    with pytest.raises(UsageError) as refused:
        check_saved_shape(find_checkpoint(str(tmp_path / "core")), spec)
    assert refused.value.problem.endswith(
        "num_layers is 4 there and 2 here; hidden_size is 32 there and 24 here; num_query_groups is 6 there and 2 here"
    )
    # Without arguments, by the manifest.
    torch.save(common, folder / "common.pt")
    check_saved_shape(find_checkpoint(str(tmp_path / "core")), spec)
    with pytest.raises(UsageError, match="ffn_hidden_size is 40 there and 48 here"):
        check_saved_shape(find_checkpoint(str(tmp_path / "core")), make_spec(ffn_hidden_size=48))


def test_a_dry_run_prints_the_plan_and_touches_nothing(tmp_path: Path, capsys: Any) -> None:
    spec = make_spec()
    native = save_native(tmp_path / "native", spec)
    from primus.checkpoint.convert import write_model

    write_model(native, spec)
    before = sorted(path for path in tmp_path.rglob("*"))
    words = ["--dry-run", "direct", "--", "checkpoint", "convert", str(native), str(tmp_path / "out")]
    assert main([*words, "--to", "megatron"]) == 0
    printed = capsys.readouterr().out
    for line in (
        f"source: {native} (native), llama model",
        f"target: {tmp_path / 'out'} (megatron, torch_dist, which any layout loads)",
        "tensors: 21 weights",
        "optimizer: AdamW state of 0 updates, step 0, at the first sample",
        "release/__0_0.distcp: 0.00 GB",
    ):
        assert line in printed
    assert main([*words, "--to", "megatron", "--no-optimizer"]) == 0
    assert "optimizer: weights only: --no-optimizer" in capsys.readouterr().out
    assert sorted(path for path in tmp_path.rglob("*")) == before


# Training


def save_native(folder: Path, spec: ModelSpec, others: dict[str, torch.Tensor] | None = None) -> Path:
    from primus.frameworks.native.engine.model import build_model

    model = build_model(spec, "cpu", seed=1)
    optimizer = build_optimizer(model, Trainer(model=spec).optimizer)
    tensors = state.collect_weights(model) | state.collect_moments(model, optimizer) | (others or {})
    dcp.save(tensors, checkpoint_id=str(folder), no_dist=True)
    return folder


def train_native(
    trainer: Trainer, first: int, last: int, load: Path | None = None, save: Path | None = None
) -> list[float]:
    """Losses of native's steps from `first` to `last`, which count from 1."""
    model = runs.build_native_model(trainer)
    trainable = prepare_model(model, device="cpu")
    optimizer = build_optimizer(model, trainer.optimizer)
    if load is not None:
        tensors = state.collect_weights(model) | state.collect_moments(model, optimizer)
        dcp.load(tensors, checkpoint_id=str(load), no_dist=True)
        state.take_moments(model, optimizer, tensors)
    tokens, rates, losses = runs.draw_tokens(trainer), runs.compute_rates(trainer), []
    for step in range(first - 1, last):
        micro = torch.from_numpy(tokens[step]).split(runs.MICRO_BATCH)
        pairs = [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in micro]
        options = {"learning_rate": rates[step], "clip_grad": trainer.optimizer.clip_grad}
        losses.append(train_step(trainable, optimizer, pairs, **options).loss)
    if save is not None:
        tensors = state.collect_weights(model) | state.collect_moments(model, optimizer)
        dcp.save(tensors, checkpoint_id=str(save), no_dist=True)
    return losses


Trained = list[dict[str, Any]]


def check_both_ways(
    folder: Path, trainer: Trainer, engine: str, train: Callable[[list[tuple[Trainer, dict[str, Any]]]], Trained]
) -> None:
    """Native's losses stay the same where an engine takes steps 4 to 6 from its checkpoint, and native those after."""
    undisturbed = train_native(trainer, 1, 8)
    train_native(trainer, 1, 3, save=folder / "native")
    convert(folder / "native", folder / engine, engine, trainer.model)
    load = next((folder / engine).glob("[ir]*"), folder / engine)  # Megatron-LM's are below their iteration
    start = runs.write_start(folder / "start", trainer)
    request = {"tokens": start["tokens"], "load": str(load), "first": 4, "last": 6, "save": str(folder / "saved")}
    (resumed,) = train([(trainer, request)])
    assert [loss for loss, *_ in resumed["steps"]] == pytest.approx(undisturbed[3:6], abs=PARITY)
    convert(folder / "saved", folder / "back", "native", trainer.model)
    assert train_native(trainer, 7, 8, load=folder / "back") == pytest.approx(undisturbed[6:], abs=PARITY)


@pytest.mark.engine("torchtitan")
@pytest.mark.slow
def test_torchtitan_continues_from_native_and_native_from_torchtitan(tmp_path: Path) -> None:
    check_both_ways(
        tmp_path, runs.build_trainer("qwen3"), "torchtitan", partial(runs.train_by_engine, tmp_path / "run")
    )


@pytest.mark.engine("megatron")
@pytest.mark.slow
def test_megatron_continues_from_native_and_native_from_megatron(tmp_path: Path) -> None:
    from frameworks.megatron.test_parity import build, train_all

    check_both_ways(tmp_path, build("llama"), "megatron", partial(train_all, tmp_path))


@pytest.mark.parametrize("to", ["native", "torchtitan", "megatron"])
def test_a_checkpoint_of_weights_alone_has_no_training_state(to: TargetFormat, tmp_path: Path) -> None:
    spec = make_spec()
    write_first(spec, None, tmp_path / "weights", to)
    assert open_training_state(open_checkpoint(str(tmp_path / "weights"), spec)) is None
