"""What the ranks of a training exchange in a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus import experiment
from primus.config.schema import Trainer
from primus.machine.placement.rank_groups import RankGroups
from primus.models.communication import list_rank_groups
from primus.models.counts import count_parameters

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(tmp_path: Path, model: str, **overrides: object) -> Trainer:
    settings = "".join(f"      {key}: {value}\n" for key, value in overrides.items())
    file = tmp_path / "e.yaml"
    file.write_text(
        f"extends: {EXAMPLES}/llama3.1_8B-pretrain.yaml\nexp_name: x\nmodules:\n  pre_trainer:\n"
        f"    framework: megatron\n    model: {model}\n    overrides:\n{settings}"
    )
    return experiment.resolve_experiment(file, (), {}, is_elsewhere=True).experiment.trainer


def groups(trainer: Trainer, world_size: int) -> dict[str, RankGroups]:
    return {each.name: each for each in list_rank_groups(trainer, world_size)}


def test_a_replica_on_one_rank_exchanges_only_its_weights(tmp_path: Path) -> None:
    trainer = load(tmp_path, "llama3.1_8B.yaml", global_batch_size=16)
    found = groups(trainer, 16)
    assert list(found) == ["data-parallel group"]
    data = found["data-parallel group"]
    assert (data.size, data.stride, data.pattern) == (16, 1, "ring")
    # Two gathers and a scatter of weights in bf16, of which each link carries 15 of 16 parts.
    assert data.link_bytes == pytest.approx(3 * 15 / 16 * 2 * count_parameters(trainer.model).total_parameters)


def test_ranks_count_up_from_tensor_to_pipeline_parallel(tmp_path: Path) -> None:
    trainer = load(
        tmp_path,
        "mixtral_8x7B.yaml",
        tensor_model_parallel_size=2,
        context_parallel_size=2,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=4,
        global_batch_size=32,
    )
    found = groups(trainer, 32)  # data parallel: 4
    assert {name: (each.size, each.stride) for name, each in found.items()} == {
        "tensor-parallel group": (2, 1),
        "context-parallel group": (2, 2),
        "expert group": (4, 2),
        "data-parallel group": (8, 2),
        "expert data-parallel group": (2, 8),
        "pipeline": (2, 16),
    }


def test_each_token_travels_to_its_experts_and_back_in_both_passes(tmp_path: Path) -> None:
    trainer = load(tmp_path, "mixtral_8x7B.yaml", expert_model_parallel_size=8, global_batch_size=8, micro_batch_size=1)
    expert = groups(trainer, 8)["expert group"]
    spec, tokens = trainer.model, trainer.training.seq_length
    sent = tokens * spec.moe_router_topk * spec.hidden_size * 2  # by one rank, once through one layer, in bf16
    assert expert.link_bytes == pytest.approx(2 * 4 * spec.num_layers * sent / 8)


def test_a_longer_batch_takes_more_of_everything_but_weights(tmp_path: Path) -> None:
    small, large = (
        groups(load(tmp_path, "mixtral_8x7B.yaml", pipeline_model_parallel_size=2, expert_model_parallel_size=2,
                    global_batch_size=size, micro_batch_size=1), 8)
        for size in (4, 8)
    )  # fmt: skip
    assert large["pipeline"].link_bytes == pytest.approx(2 * small["pipeline"].link_bytes)
    assert large["expert group"].link_bytes == pytest.approx(2 * small["expert group"].link_bytes)
    assert large["data-parallel group"].link_bytes == small["data-parallel group"].link_bytes


def test_experts_that_do_not_divide_over_the_ranks_are_left_to_the_engine(tmp_path: Path) -> None:
    whole = load(tmp_path, "mixtral_8x7B.yaml", expert_model_parallel_size=8, global_batch_size=12, micro_batch_size=1)
    assert "expert group" not in groups(whole, 12)
    shared = load(tmp_path, "mixtral_8x7B.yaml", tensor_model_parallel_size=2, expert_model_parallel_size=8,
                  global_batch_size=8, micro_batch_size=1)  # fmt: skip
    found = groups(shared, 8)  # four data-parallel ranks are too few for eight experts
    assert (found["expert group"].size, found["expert group"].stride) == (8, 1)
    assert "expert data-parallel group" not in found
