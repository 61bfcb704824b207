"""A step of torchtitan's trainer on fake tensors, started as `analyze layout` does."""

from __future__ import annotations

import os

import pytest
from msgspec import structs
from tests.engine_python import SHARED
from tests.prediction.test_fake_ranks import build_experiment, count_exchanges

from primus.prediction.fake_ranks import run_ranks
from primus.prediction.rank_worker import RankAnswer

pytestmark = [pytest.mark.engine("torchtitan"), pytest.mark.slow]


def answer(parallel: dict[str, object], training: dict[str, object], rank: int) -> RankAnswer:
    asked = build_experiment(parallel, {"bf16": True, "device": "cuda"} | training)
    asked = structs.replace(asked, trainer=structs.replace(asked.trainer, framework="torchtitan"))
    return run_ranks(asked, (rank,), 16, 8, os.environ | SHARED)[0]


def test_a_rank_of_a_pipeline_has_the_memory_and_exchanges_of_its_stage() -> None:
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2}
    found = answer(parallel, {"global_batch_size": 32}, 8)
    record = found.record
    assert record is not None, found.trace or found.problem
    assert (record.stage, record.kind, record.layers) == (1, "last", (2, 3))
    assert (record.micro_batches, record.executed_micro_batches) == (8, 4)
    # Two layers, norm and head of this shape over 8 ranks in fp32, and twice as much for the moments.
    layer = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 128
    assert record.kept.weights == pytest.approx(4 * (2 * layer + 256 * 64) / 8, rel=0.02)
    assert record.kept.optimizer == pytest.approx(2 * record.kept.weights, rel=0.02)
    counts = count_exchanges(record)
    assert counts["send", "pipeline"] == 8
    assert counts["reduce_scatter", "shard"] > 0 and counts["reduce_scatter", "tensor"] > 0
    # Products of the forward pass and twice of them in the backward pass, of all micro batches.
    products = sum(work.flops for work in record.work if work.kind == "product")
    assert products == pytest.approx(3 * 2 * 32 * 8 * (2 * layer + 256 * 64) / 2, rel=0.02)


def test_what_exists_on_accelerators_only_is_not_judged() -> None:
    found = answer({"context_parallel_size": 2}, {}, 0)
    assert found.is_unknown and "context_parallel_size: torchtitan computes it by kernels" in found.problem


def test_a_refusal_of_torchtitan_is_that_of_a_run() -> None:
    found = answer({"tensor_model_parallel_size": 8, "sequence_parallel": True}, {}, 3)
    assert not found.is_unknown and "torchtitan refuses the configuration" in found.problem
