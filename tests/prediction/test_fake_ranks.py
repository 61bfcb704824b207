"""Ranks of trainings that do not happen."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest

from primus.config.schema import Experiment, ModelSpec, ParallelConfig, Trainer, TrainingConfig
from primus.errors import UsageError
from primus.prediction.fake_ranks import choose_ranks, run_ranks
from primus.prediction.layout_verdict import RESERVED_BYTES, judge_memory
from primus.prediction.rank_record import RankRecord
from primus.prediction.rank_worker import RankJob, execute_rank

TINY: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}


def build_experiment(
    parallel: dict[str, Any], training: dict[str, Any] | None = None, model: dict[str, Any] | None = None
) -> Experiment:
    trainer = Trainer(
        model=msgspec.convert(TINY | (model or {}), ModelSpec),
        parallel=ParallelConfig(**parallel),
        training=TrainingConfig(**{"seq_length": 32, "device": "cpu", "bf16": False} | (training or {})),
    )
    return Experiment(exp_name="layout", trainer=trainer)


def execute(experiment: Experiment, rank: int, world_size: int, devices_per_node: int = 8) -> RankRecord:
    answer = execute_rank(
        RankJob(experiment=experiment, rank=rank, world_size=world_size, devices_per_node=devices_per_node)
    )
    assert answer.record is not None, answer.trace or answer.problem
    return answer.record


def count_exchanges(record: RankRecord) -> dict[tuple[str, str], int]:
    counts: dict[tuple[str, str], int] = {}
    for each in record.exchanges:
        counts[each.operation, each.group] = counts.get((each.operation, each.group), 0) + each.count
    return counts


def test_all_kinds_are_the_first_ranks_of_the_stages_that_differ() -> None:
    trainer = build_experiment({"pipeline_model_parallel_size": 4}).trainer
    assert choose_ranks("all-kinds", trainer, 64) == (0, 16, 48)
    assert choose_ranks("37", trainer, 64) == (37,)
    assert choose_ranks("all-kinds", build_experiment({}).trainer, 64) == (0,)


def test_a_rank_that_the_run_lacks_is_refused() -> None:
    with pytest.raises(UsageError, match="the run has the ranks 0 to 63"):
        choose_ranks("64", build_experiment({}).trainer, 64)


def test_weights_gradients_and_states_of_a_sharded_rank_are_its_share() -> None:
    whole = execute(build_experiment({}), 0, 1)
    shared = execute(build_experiment({}), 0, 4)
    assert shared.kept.weights == pytest.approx(whole.kept.weights / 4, rel=0.01)
    assert shared.kept.optimizer == pytest.approx(whole.kept.optimizer / 4, rel=0.01)
    assert whole.kept.optimizer == pytest.approx(2 * whole.kept.weights, rel=0.01)
    assert shared.kept.gradients == 0 and shared.kept.activations < 1 << 16


def test_exchanges_name_their_group_and_whether_it_crosses_nodes() -> None:
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2}
    record = execute(build_experiment(parallel, {"global_batch_size": 4}), 5, 16, 4)
    groups = {each.group: each for each in record.exchanges}
    assert groups["tensor"].size == 2 and not groups["tensor"].crosses_nodes
    assert groups["shard"].size == 4 and groups["shard"].num_nodes == 2
    assert groups["pipeline"].size == 2 and groups["pipeline"].crosses_nodes


@pytest.mark.parametrize("micro_batches", [12])
def test_more_micro_batches_change_no_memory_and_add_what_the_last_one_does(micro_batches: int) -> None:
    parallel = {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2}
    few = execute(build_experiment(parallel, {"global_batch_size": 8}), 0, 8)
    many = execute(build_experiment(parallel, {"global_batch_size": 2 * micro_batches}), 0, 8)
    assert few.executed_micro_batches == 4 == few.micro_batches
    assert many.executed_micro_batches == 4
    # torch.distributed.pipelining receives each micro batch into a buffer of its own.
    received = next(each for each in few.exchanges if each.operation == "receive")
    buffers = (micro_batches - 4) * received.total_bytes // received.count
    assert many.peak.parts.communication == few.peak.parts.communication + buffers
    before, after = count_exchanges(few), count_exchanges(many)
    for key, number in before.items():
        # One more of each for each micro batch; what ends a step happens once.
        steady = (after[key] - number) / (micro_batches - 4)
        assert steady == int(steady) and after[key] >= number
    assert after["send", "pipeline"] == micro_batches == after["receive", "pipeline"]


def test_executing_all_micro_batches_gives_the_counts_that_were_extended(monkeypatch: pytest.MonkeyPatch) -> None:
    from primus.session.fake_run.fake_record import StepPlan

    parallel = {"pipeline_model_parallel_size": 2}
    asked = build_experiment(parallel, {"global_batch_size": 14})
    extended = execute(asked, 1, 4)
    monkeypatch.setattr(StepPlan, "_count_needed", lambda self: 1000)
    whole = execute(asked, 1, 4)
    assert extended.executed_micro_batches == 4 and whole.executed_micro_batches == 7
    assert extended.flops == whole.flops and extended.num_operators == whole.num_operators
    assert count_exchanges(extended) == count_exchanges(whole)
    assert extended.peak.parts == whole.peak.parts


def test_experts_are_exchanged_over_their_group_and_their_products_count() -> None:
    record = execute(build_experiment({"expert_model_parallel_size": 4}, model=EXPERTS), 3, 8, 4)
    assert count_exchanges(record)["all_to_all", "expert"] > 0
    grouped = sum(each.flops for each in record.work if each.kind == "grouped_product")
    # Rows of all tokens x the matrices of an expert x three passes; products of gate and up, and of down.
    assert grouped == 3 * 2 * (32 * 2) * (3 * 64 * 32) * 4


def test_an_accelerator_keeps_other_tensors_than_a_cpu() -> None:
    on_cpu = execute(build_experiment({}), 0, 2)
    eager = execute(build_experiment({}, {"device": "cuda", "compile": False}), 0, 2)
    compiled = execute(build_experiment({}, {"device": "cuda", "compile": True}), 0, 2)
    assert eager.peak.parts.activations > compiled.peak.parts.activations
    assert on_cpu.flops == eager.flops == compiled.flops


def test_the_error_of_a_rank_is_that_of_the_run() -> None:
    job = RankJob(
        experiment=build_experiment({"pipeline_model_parallel_size": 3}), rank=0, world_size=4, devices_per_node=8
    )
    assert "4 processes cannot be laid out" in execute_rank(job).problem


def test_ranks_run_in_processes_of_their_own() -> None:
    answers = run_ranks(build_experiment({}), (0, 3), 4, 2, os.environ)
    assert [each.rank for each in answers] == [0, 3]
    assert all(each.record is not None and each.record.process_bytes < 4 << 30 for each in answers)


def test_a_rank_needs_its_peak_and_the_allowances() -> None:
    record = execute(build_experiment({}), 0, 2)
    assert judge_memory(record, RESERVED_BYTES + (1 << 30)).fits
    assert not judge_memory(record, RESERVED_BYTES).fits


@pytest.mark.parametrize("model", [{}, EXPERTS])
@pytest.mark.parametrize("training", [{}, {"recompute_activations": True, "global_batch_size": 2}])
def test_a_fake_step_takes_the_memory_of_a_real_one(model: dict[str, Any], training: dict[str, Any]) -> None:
    from primus.frameworks.native.engine.fake_rank import execute_step
    from primus.frameworks.native.engine.layout import ALONE
    from primus.frameworks.native.engine.model import initialize_weights
    from primus.session.fake_run.observer import StepObserver

    asked = build_experiment({}, training, model)
    fake = execute(asked, 0, 1)
    observer = StepObserver({}, 1, is_fake=False)
    count = fake.micro_batches
    execute_step(asked.trainer, ALONE, 0, 1, count, observer, None, lambda each: initialize_weights(each, 1))
    peak, _, kept = observer.find_moments()
    # A few scalars of initial values may still be there.
    assert fake.peak.parts.total == pytest.approx(peak.parts.total, rel=1e-3)
    assert fake.kept.total == pytest.approx(kept.total, rel=1e-3)
    assert fake.flops == sum(each.flops for each in observer.list_work())
