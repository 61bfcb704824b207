"""What besides settings makes a comparison unfair: variables, packages and machines, by one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs
from tests.comparison.fair_results import make_result

from primus.comparison.fairness.evidence import collect_evidence
from primus.comparison.fairness.verdict import PairVerdict, judge_pair
from primus.comparison.results.result import ComparisonResult, ResultDevice
from primus.machine import profile
from primus.machine.environment.precedence import DETERMINISTIC_SETTINGS
from primus.runs.speed_facts import find_speed_rule, read_speed_table

Change = Callable[[ComparisonResult], ComparisonResult]


def make_gpu_result(framework: str = "native", platform: Any = "nvd", **machine: Any) -> ComparisonResult:
    """A result of eight GPUs, whose machine `machine` changes."""
    result = make_result(framework)
    names = {"nvd": "NVIDIA H100 80GB HBM3", "amd": "AMD Instinct MI300X"}
    stack = {"nvd": ("cuda", "12.8"), "amd": ("rocm", "7.0.2")}[platform]
    return structs.replace(
        result,
        platform=platform,
        gpu_info=ResultDevice(
            device_count=8, device_name=names[platform], pytorch_version="2.8.0", software_stack=stack[0],
            software_version=stack[1],
        ),
        packages={"torch": "2.8.0", "triton": "3.4.0", "transformers": "4.57.0", "rich": "14.0"},
        machine=structs.replace(
            result.machine, driver="570.86", kernel="6.8", container="nvcr.io/nvidia/pytorch:25.08-py3",
            firmware={"firmware vbios": "96.00.A5"}, **machine,
        ),
    )  # fmt: skip


def set_variable(name: str, value: str, source: str = "--env") -> Change:
    def change(result: ComparisonResult) -> ComparisonResult:
        machine = structs.replace(result.machine, environment={name: value}, variable_sources={name: source})
        return structs.replace(result, machine=machine)

    return change


def change_machine(**fields: Any) -> Change:
    return lambda result: structs.replace(result, machine=structs.replace(result.machine, **fields))


def change_packages(**versions: str) -> Change:
    return lambda result: structs.replace(result, packages={**result.packages, **versions})


def judge(a: ComparisonResult, b: ComparisonResult, chosen: Any = "identical") -> PairVerdict:
    return judge_pair(collect_evidence(a, "a"), collect_evidence(b, "b"), chosen)


def list_unfair(verdict: PairVerdict) -> list[str]:
    return [check.rule for check in verdict.checks if check.judgement == "unfair"]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (set_variable("MALLOC_TRIM_THRESHOLD_", "0", "shell"), "variable MALLOC_TRIM_THRESHOLD_"),
        (set_variable("NVTE_FUSED_ATTN", "0"), "variable NVTE_FUSED_ATTN"),
        (set_variable("PYTORCH_TUNABLEOP_ENABLED", "1", "tuned: by tune gemm"), "variable PYTORCH_TUNABLEOP_ENABLED"),
        (set_variable("NCCL_PROTO", "LL", "shell"), "variable NCCL_PROTO"),
        (set_variable("PRIMUS_TUNED_GEMM", "products.json"), "variable PRIMUS_TUNED_GEMM"),
        (set_variable("XLA_FLAGS", "--xla_gpu_autotune_level=0", "shell"), "variable XLA_FLAGS"),
        (change_packages(torch="2.9.1"), "package torch"),
        (change_packages(**{"nvidia-cublas-cu12": "12.9"}), "package nvidia-cublas-cu12"),
        (change_machine(driver="580.65"), "machine driver"),
        (change_machine(container="nvcr.io/nvidia/pytorch:25.09-py3"), "machine container"),
        (change_machine(firmware={"firmware vbios": "96.00.B1"}), "machine firmware vbios"),
    ],
)
def test_what_changes_the_speed_on_one_side_only_is_unfair_by_its_name(change: Change, rule: str) -> None:
    base = make_gpu_result()
    with_cublas = change_packages(**{"nvidia-cublas-cu12": "12.8"})
    assert judge(with_cublas(base), with_cublas(make_gpu_result("torchtitan"))).status == "fair"
    verdict = judge(with_cublas(base), change(with_cublas(make_gpu_result("torchtitan"))))
    assert (verdict.status, list_unfair(verdict)) == ("unfair", [rule])
    tuned = judge(with_cublas(base), change(with_cublas(make_gpu_result("torchtitan"))), "tuned")
    assert tuned.status == ("unfair" if "driver" in rule or "firmware" in rule else "fair")


@pytest.mark.parametrize(
    "change",
    [
        set_variable("NCCL_DEBUG", "INFO"),
        set_variable("NCCL_IB_HCA", "=mlx5_0,mlx5_3"),
        set_variable("CUDA_VISIBLE_DEVICES", "4", "shell"),
        set_variable("PRIMUS_TUNED_GEMM", ""),
        set_variable("CUDA_DEVICE_MAX_CONNECTIONS", "1", "backend:megatron: overlap of tensor parallelism"),
        change_packages(rich="15.0"),
        change_packages(transformers="5.0.0"),
        change_machine(kernel="6.14", cpu_model="Another CPU"),
    ],
)
def test_what_belongs_to_a_launch_or_an_engine_or_changes_no_speed_is_not_unfair(change: Change) -> None:
    assert judge(make_gpu_result(), change(make_gpu_result("megatron"))).status == "fair"


def test_an_engine_of_another_version_is_not_the_same_engine() -> None:
    other = change_packages(transformers="5.0.0")(make_gpu_result("huggingface"))
    assert list_unfair(judge(make_gpu_result("huggingface"), other)) == ["package transformers"]


def test_a_setting_of_an_engine_that_a_user_has_overridden_is_unfair_also_between_engines() -> None:
    by_engine = set_variable("CUDA_DEVICE_MAX_CONNECTIONS", "1", "backend:megatron: overlap")(make_gpu_result())
    by_user = set_variable("CUDA_DEVICE_MAX_CONNECTIONS", "32", "shell")(make_gpu_result("megatron"))
    assert list_unfair(judge(by_engine, by_user)) == ["variable CUDA_DEVICE_MAX_CONNECTIONS"]


def test_each_platform_has_software_and_variables_of_its_own() -> None:
    amd = structs.replace(make_gpu_result(platform="amd"), versions={"torch": "2.9.0+rocm7"})
    amd = set_variable("HSA_NO_SCRATCH_RECLAIM", "1", "mi300x: no pauses")(change_machine(driver="6.14.5")(amd))
    assert judge(make_gpu_result(), amd).status == "fair"
    tuned = set_variable("HIPBLASLT_TUNING_OVERRIDE_FILE", "/tuned.txt", "shell")(amd)
    assert list_unfair(judge(make_gpu_result(), tuned)) == ["variable HIPBLASLT_TUNING_OVERRIDE_FILE"]


def test_a_variable_that_no_rule_knows_is_not_shown_to_be_fair() -> None:
    verdict = judge(make_gpu_result(), set_variable("FLUX_CAPACITOR", "1")(make_gpu_result("jax")))
    assert verdict.list_reasons() == ["variable FLUX_CAPACITOR: no rule says what this variable changes"]


def test_logs_that_state_no_variables_are_not_taken_for_runs_without_them() -> None:
    log = structs.replace(make_gpu_result("megatron"), source="log")
    checks = judge(set_variable("NCCL_ALGO", "Tree")(make_gpu_result()), log).checks
    assert [check.rule for check in checks if "NCCL" in check.rule] == []
    assert "environment" in [check.rule for check in checks if check.judgement == "not shown" and not check.is_required]


def test_every_variable_of_the_profiles_has_a_rule_and_no_name_is_doubled() -> None:
    layers = [layer for each in profile.load_all_profiles() for layer in profile.list_layers(each)]
    names = {name for _, settings in layers for name in settings}
    names |= {name for settings in DETERMINISTIC_SETTINGS.values() for name in settings}
    assert {name for name in names if find_speed_rule("variable", name) is None} == set()
    table = read_speed_table()
    for rules in (table.variables, table.packages, table.machine):
        listed = [name for rule in rules for name in rule.names]
        assert len(listed) == len(set(listed))
