"""Layouts with a planted fault are refused with the setting, or with the rank; healthy ones pass."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from primus import experiment
from primus.errors import PrimusError
from primus.machine.assumed_machine import build_assumed_machine
from primus.prediction.fake_ranks import check_world_size, choose_ranks
from primus.prediction.layout_machine import LayoutMachine
from primus.prediction.layout_run import check_lower_bound
from primus.prediction.layout_verdict import RESERVED_BYTES, judge_memory
from primus.prediction.rank_worker import RankJob, execute_rank

MODEL = (
    "--num_layers 4 --hidden_size 64 --ffn_hidden_size 128 --num_attention_heads 4 --num_query_groups 2"
    " --vocab_size 256 --max_position_embeddings 64 --seq_length 32 --mock_data true --device cpu --bf16 false"
)
EXPERTS = "--num_experts 8 --moe_router_topk 2 --moe_ffn_hidden_size 32"
TP, PP, CP, EP = (f"--{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context", "expert_model"))
SEVERAL = "--num_virtual_stages_per_pipeline_rank"
COPIES = "--num_distributed_optimizer_instances"
FAULTS = [
    # words, processes, what the message names
    (f"{TP} 3", 6, "tensor_model_parallel_size"),
    (f"{TP} 4", 4, "num_query_groups"),
    (f"{TP} 8", 8, "tensor_model_parallel_size"),
    (f"{PP} 3", 6, "pipeline_model_parallel_size"),
    (f"{PP} 8", 8, "pipeline_model_parallel_size"),
    (f"{TP} 2", 5, "5 processes cannot be laid out"),
    (f"{TP} 2 {PP} 4", 4, "4 processes cannot be laid out"),
    (f"{CP} 2 {PP} 2", 6, "6 processes cannot be laid out"),
    ("--global_batch_size 6", 4, "global_batch_size"),
    ("--global_batch_size 3 --micro_batch_size 2", 1, "global_batch_size"),
    (f"--global_batch_size 4 {TP} 2 --micro_batch_size 4", 4, "global_batch_size"),
    ("--seq_length 128", 1, "max_position_embeddings"),
    (f"{CP} 2 --seq_length 33", 2, "seq_length"),
    (f"{CP} 4 --seq_length 36", 4, "seq_length"),
    (f"{TP} 2 --sequence_parallel true --seq_length 33", 2, "seq_length"),
    (f"{EXPERTS} {EP} 3", 3, "expert_model_parallel_size"),
    (f"{EXPERTS} {EP} 16", 16, "expert_model_parallel_size"),
    (f"{EXPERTS} {EP} 8", 4, "expert_model_parallel_size"),
    (f"{EXPERTS} {EP} 4 {PP} 2", 6, "expert_model_parallel_size"),
    (f"{EP} 2", 2, "expert_model_parallel_size"),
    (f"{EXPERTS} --moe_router_topk 9", 1, "moe_router_topk"),
    (f"{EXPERTS} {TP} 2 --seq_length 33", 2, "seq_length"),
    ("--num_query_groups 3", 1, "num_query_groups"),
    ("--hidden_size 66", 1, "hidden_size"),
    ("--tensor_parallel_sise 2", 2, "tensor_parallel_sise"),
    ("--micro_batch_size 0", 1, "micro_batch_size"),
    ("--optimizer adamx", 1, "optimizer"),
    ("--recompute_modules [mlp]", 1, "recompute_modules"),
    ("--recompute_activations true --recompute_granularity selective", 1, "recompute_activations"),
    (f"--recompute_granularity selective {CP} 2", 2, "recompute_granularity"),
    ("--fp16 true --bf16 true", 1, "fp16"),
    ("--main_params_dtype bf16", 1, "main_params_dtype"),
    ("--main_params_dtype bf16 --bf16 true --optimizer muon", 1, "main_params_dtype"),
    ("--optimizer_cpu_offload true --optimizer muon", 1, "optimizer_cpu_offload"),
    (f"{SEVERAL} 2", 2, SEVERAL.strip("-")),
    (f"{SEVERAL} 3 {PP} 2", 2, SEVERAL.strip("-")),
    (f"{COPIES} 3", 4, f"rank 0: {COPIES.strip('-')}"),
    (f"{COPIES} 4 {TP} 2", 4, f"rank 0: {COPIES.strip('-')}"),
    ("--moe_expert_capacity_factor 1.0", 1, "moe_expert_capacity_factor"),
    (f"--peft lora {TP} 2", 2, "tensor_model_parallel_size"),
    ("--nonfinite_policy rewind", 1, "save_interval"),
    ("--num_layers 200 --hidden_size 8192 --ffn_hidden_size 28672", 8, "need at least"),
    ("--num_layers 60 --hidden_size 4096 --ffn_hidden_size 14336 --use_distributed_optimizer false", 64, "each device"),
    ("--micro_batch_size 16384 --num_layers 2 --device cuda", 1, "rank 0: does not fit"),
]
HEALTHY = [
    *(
        (words, 1)
        for words in ("", "--micro_batch_size 3", "--global_batch_size 5", "--optimizer muon", "--optimizer sgd")
    ),
    *(
        (words, 1)
        for words in ("--optimizer adamw_8bit", "--bf16 true", "--device cuda", "--recompute_activations true")
    ),
    *((words, 1) for words in ("--recompute_granularity selective", "--optimizer_cpu_offload true", EXPERTS)),
    *((words, 1) for words in ("--main_params_dtype bf16 --bf16 true", "--untie_embeddings_and_output_weights false")),
    *((words, 2) for words in ("", "--use_distributed_optimizer false", "--global_batch_size 6", "--device cuda")),
    *(
        (words, 2)
        for words in (f"{TP} 2", f"{TP} 2 --sequence_parallel true", f"{CP} 2", f"{PP} 2 --global_batch_size 2")
    ),
    *((words, 2) for words in (f"{PP} 2 {SEVERAL} 2 --global_batch_size 4", f"{PP} 2 --global_batch_size 1")),
    *((f"{EXPERTS} {words}", 2) for words in ("", f"{EP} 2", f"{EP} 2 --moe_expert_capacity_factor 1.5", f"{TP} 2")),
    *((f"{EXPERTS} {words}", 4) for words in (f"{EP} 4", f"{EP} 2 {TP} 2 --sequence_parallel true", f"{EP} 2 {PP} 2")),
    *((words, 4) for words in (f"{COPIES} 2", f"{TP} 2 {PP} 2 --global_batch_size 4", f"{TP} 2 {CP} 2", f"{CP} 4")),
    *(
        (words, 8)
        for words in (f"{TP} 2 {PP} 2 {CP} 2 --global_batch_size 2", f"{PP} 4 --global_batch_size 12", f"{PP} 4")
    ),
    (f"{TP} 2 {PP} 4 --sequence_parallel true --device cuda --global_batch_size 64", 64),
    (f"{EXPERTS} {EP} 8 {TP} 2 --device cuda", 512),
]


def find_fault(words: str, world_size: int, folder: Path) -> str:
    """What `analyze layout` would say of a layout on such a machine; empty if nothing is wrong."""
    file = folder / "layout.yaml"
    file.write_text("exp_name: x\nmodules: {pre_trainer: {framework: native, model: llama3.1_8B.yaml}}\n")
    facts = build_assumed_machine("mi300x:8")
    memory = RESERVED_BYTES + (1 << 30)
    machine = LayoutMachine(
        name="MI300X", nnodes=-(-world_size // 8), devices_per_node=8, device_bytes=memory, facts=facts
    )
    try:
        resolved = experiment.resolve_experiment(file, f"{MODEL} {words}".split(), {})
        check_world_size(resolved, world_size)
        check_lower_bound(resolved, machine)
    except PrimusError as error:
        return error.problem
    for rank in choose_ranks("all-kinds", resolved.experiment.trainer, world_size):
        answer = execute_rank(
            RankJob(experiment=resolved.experiment, rank=rank, world_size=world_size, devices_per_node=8)
        )
        if answer.record is None:
            return f"rank {rank}: {answer.problem}"
        if not judge_memory(answer.record, memory).fits:
            return f"rank {rank}: does not fit"
    return ""


@pytest.mark.parametrize(("words", "world_size", "named"), FAULTS, ids=[f"{each[0]}, {each[1]}" for each in FAULTS])
def test_a_planted_fault_is_found(words: str, world_size: int, named: str, tmp_path: Path) -> None:
    assert re.search(re.escape(named), find_fault(words, world_size, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("words", "world_size"), HEALTHY, ids=[f"{each[0]}, {each[1]}" for each in HEALTHY])
def test_a_healthy_layout_passes(words: str, world_size: int, tmp_path: Path) -> None:
    assert find_fault(words, world_size, tmp_path) == ""


def test_there_are_forty_of_each() -> None:
    assert len(FAULTS) >= 40 and len(HEALTHY) >= 40
