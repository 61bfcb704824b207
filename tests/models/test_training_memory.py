"""The least memory that training needs, against that of a machine."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from primus.config.extended_files import load_model
from primus.config.schema import ParallelConfig, Trainer, TrainingConfig
from primus.machine.assumed_machine import build_assumed_machine
from primus.machine.facts import Device, MachineFacts, Memory
from primus.models.counts import count_parameters
from primus.models.training_memory import GIB, compare_with_machine, estimate_need

MODEL = structs.replace(load_model("mixtral_8x7B_v0.1"), num_layers=2)
COUNT = count_parameters(MODEL)


def make_trainer(bf16: bool = True, backend_args: dict[str, Any] | None = None, **parallel: Any) -> Trainer:
    return Trainer(
        model=MODEL,
        training=TrainingConfig(bf16=bf16),
        parallel=ParallelConfig(**parallel),
        backend_args=backend_args or {},
    )


@pytest.mark.parametrize(
    ("trainer", "each"),
    [
        (make_trainer(bf16=False), 16),
        (make_trainer(), 14),
        (make_trainer(backend_args={"optimizer_cpu_offload": True}), 2),
        (make_trainer(backend_args={"optimizer_cpu_offload": False}), 14),
        (make_trainer(backend_args={"training": {"dtype": "bfloat16"}}), 2),
        (make_trainer(backend_args={"peft": "lora"}), 2),
        (make_trainer(backend_args={"peft": "none"}), 14),
    ],
)
def test_a_parameter_needs_its_weight_gradient_and_moments(trainer: Trainer, each: int) -> None:
    need = estimate_need(trainer)
    assert need.total_bytes == COUNT.total_parameters * each
    assert need.device_bytes is None


def test_a_device_holds_its_share_of_the_model_where_data_parallel_processes_shard_nothing() -> None:
    trainer = make_trainer(
        use_distributed_optimizer=False,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=4,
    )
    dense = COUNT.total_parameters - COUNT.experts
    assert estimate_need(trainer).device_bytes == int((dense / 4 + COUNT.experts / 16) * 14)


def test_what_all_devices_have_together_decides_for_a_sharded_model() -> None:
    need = structs.replace(estimate_need(make_trainer()), total_bytes=8 * 192 * GIB + 1)
    facts = build_assumed_machine("mi300x:8")
    short, enough = compare_with_machine(need, facts), compare_with_machine(need, facts, nodes=2)
    assert short is not None and enough is not None
    assert not short.fits and enough.fits
    assert short.format_remedy() == "use at least 9 such devices, or a smaller model"


def test_a_whole_copy_on_each_device_is_not_helped_by_more_of_them() -> None:
    need = structs.replace(estimate_need(make_trainer()), total_bytes=GIB, device_bytes=200 * GIB)
    found = compare_with_machine(need, build_assumed_machine("mi300x:8"), nodes=50)
    assert found is not None and not found.fits
    assert "each device needs 200.0 GiB" in found.format_problem()
    assert found.format_remedy().startswith("shard it")


def test_exactly_the_memory_of_the_machine_fits() -> None:
    facts = MachineFacts(memory=Memory(total_bytes=64 * GIB, limit_bytes=3 * GIB))
    need = structs.replace(estimate_need(make_trainer()), total_bytes=3 * GIB)
    found = compare_with_machine(need, facts)
    assert found is not None and found.fits
    assert found.device_memory_bytes == 3 * GIB


def test_a_machine_whose_memory_is_not_known_is_not_judged() -> None:
    need = estimate_need(make_trainer())
    assert compare_with_machine(need, MachineFacts()) is None
    unknown = Device(index=0, vendor="nvidia", model="H100", memory_bytes=None)
    assert compare_with_machine(need, MachineFacts(devices=(unknown,))) is None
