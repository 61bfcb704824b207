"""Two runs compared: which difference can explain another speed, and which another loss."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("numpy")

import msgspec
from msgspec import structs

from primus.comparison.results.run_result import NO_SYSTEM
from primus.machine.facts import Device, MachineFacts, Software
from primus.run_report.comparison import compare_runs
from primus.runs.files import write_json, write_text
from primus.runs.store import Run

MakeRun = Callable[..., Run]
OTHER = "20231114_221320-0001"
NOISY = [(1.0 + 0.01 * (number % 5), 0.1) for number in range(40)]
FASTER = [(0.8 + 0.01 * (number % 7), 0.1) for number in range(40)]


def test_the_only_difference_that_can_change_the_speed_explains_it(make_run: MakeRun) -> None:
    a = make_run(NOISY, settings={"compile": False, "lr": 1e-3})
    b = make_run(FASTER, settings={"compile": True, "lr": 2e-3}, name=OTHER)
    found = compare_runs(a, b)
    assert found.speed is not None
    assert found.speed.is_real
    assert found.speed.ratio == pytest.approx(1.02 / 0.83, rel=0.02)
    assert "the only difference that can change the speed is compile (False -> True)" in found.speed_explanation
    assert "equal bit by bit" in found.loss_explanation
    assert {each.what: each.effects for each in found.candidates} == {"compile": ["speed"], "lr": ["loss"]}


def test_several_differences_are_candidates_and_noise_is_no_difference(make_run: MakeRun) -> None:
    a = make_run(NOISY, settings={"micro_batch_size": 1}, started={"world_size": 1})
    same = make_run(NOISY[1:] + NOISY[:1], settings={"micro_batch_size": 1}, started={"world_size": 1}, name=OTHER)
    assert "no difference beyond the noise of the steps" in compare_runs(a, same).speed_explanation
    both = make_run(
        FASTER, settings={"micro_batch_size": 2}, started={"world_size": 2}, name=OTHER[:-1] + "2", loss=1.0
    )
    found = compare_runs(a, both)
    assert (
        "2 differences can change the speed: micro_batch_size (1 -> 2), world_size (1 -> 2)" in found.speed_explanation
    )
    assert "the losses differ from step 1 on" in found.loss_explanation
    assert "the only difference that can change the loss is micro_batch_size" in found.loss_explanation


def test_the_device_that_trained_is_a_difference(make_run: MakeRun) -> None:
    a = make_run(NOISY, started={"device": "AMD Instinct MI300X"})
    b = make_run(FASTER, started={"device": "NVIDIA H100"}, name=OTHER)
    explanation = compare_runs(a, b).speed_explanation
    assert "the only difference that can change the speed is device (AMD Instinct MI300X -> NVIDIA H100)" in explanation


def write_variables(run: Run, *lines: str) -> Run:
    write_text(run.directory / "env" / "primus_env_dump.txt", "\n".join(lines) + "\n")
    return run


def test_variables_that_can_change_the_speed_count_wherever_they_were_set(make_run: MakeRun) -> None:
    a = write_variables(make_run(NOISY), "HOME=/root  # shell", "NCCL_DEBUG=WARN  # --env", "EDITOR=vi  # shell")
    b = make_run(FASTER, name=OTHER)
    write_variables(b, "HOME=/home/x  # shell", "EDITOR=vim  # shell", "MALLOC_CONF_=1  # shell")
    explanation = compare_runs(a, b).speed_explanation
    assert "the only difference that can change the speed is MALLOC_CONF_ (absent -> 1)" in explanation


def test_an_empty_variable_is_as_one_that_is_not_set(make_run: MakeRun) -> None:
    a = write_variables(make_run(NOISY), "HIPBLASLT_TUNING_OVERRIDE_FILE=  # --env", "OMP_PROC_BIND=  # shell")
    b = write_variables(make_run(FASTER, name=OTHER), "HOME=/root  # shell")
    found = compare_runs(a, b)
    assert found.candidates == []
    assert "no recorded difference can change the speed" in found.speed_explanation


def write_system(run: Run, driver: str, vbios: str, command: list[str]) -> Run:
    device = Device(index=0, vendor="nvidia", firmware={"vbios": vbios})
    facts = MachineFacts(devices=(device,), software=Software(nvidia_driver=driver))
    write_json(run.directory / "env" / "system_info.json", structs.replace(NO_SYSTEM, facts=facts, kernel="6.8"))
    run.update_metadata(command=command)
    return run


def test_driver_firmware_and_image_can_change_the_speed(make_run: MakeRun) -> None:
    a = write_system(make_run(NOISY), "570.86", "96.00", ["container", "--image", "torch:25.08", "--", "train"])
    b = write_system(make_run(FASTER, name=OTHER), "580.65", "96.01", ["container", "--image=torch:25.09"])
    assert {(each.what, each.a, each.b) for each in compare_runs(a, b).candidates} == {
        ("driver", "570.86", "580.65"),
        ("firmware vbios", "96.00", "96.01"),
        ("container", "torch:25.08", "torch:25.09"),
    }


def test_other_work_of_the_machine_explains_before_any_difference(make_run: MakeRun) -> None:
    def run(
        steps: list[tuple[float, float]], name: str, device: str, waited: float, others: float, **settings: int
    ) -> Run:
        ended = {"kind": "training_ended", "core_wait_share": waited}
        load = {"kind": "machine_load", "other_cpu_share": others}
        return make_run(steps, name=name, started={"device_type": device}, settings=settings, after=[ended, load])

    def explain(device: str, *loads: tuple[float, float]) -> str:
        a = run(NOISY, OTHER[:-1] + "3", device, *loads[0], num_workers=0)
        b = run(FASTER, OTHER[:-1] + "4", device, *loads[1], num_workers=2)
        return compare_runs(a, b).speed_explanation

    waiting = explain("cpu", (0.85, 0.0), (0.85, 0.0))
    assert "threads of A waited 85% of the time for a core; threads of B waited 85%" in waiting
    assert "which can explain it, and so can num_workers" in waiting and "the only difference" not in waiting
    assert "other processes used 40% of the CPUs during B" in explain("cuda", (0.0, 0.0), (0.0, 0.4))
    assert "the only difference that can change the speed is num_workers" in explain("cuda", (0.85, 0.0), (0.85, 0.05))


def test_runs_without_steps_are_compared_by_what_they_have(make_run: MakeRun) -> None:
    found = compare_runs(make_run([]), make_run(NOISY, name=OTHER))
    assert (found.speed, found.speed_explanation) == (None, "one of the runs has no steps")
    assert found.loss_explanation == "the runs have no steps in common"


def record_settings(run: Run, **in_force: object) -> Run:
    rows = [{"key": key, "in_force": value, "state": "not asked"} for key, value in in_force.items()]
    event = {"time": 1.0, "kind": "settings_in_force", "step": 1, "settings": rows}
    with run.events.open("ab") as file:
        file.write(msgspec.json.encode(event) + b"\n")
    return run


def test_what_the_engine_really_did_explains_though_both_were_asked_for_the_same(make_run: MakeRun) -> None:
    a = record_settings(make_run(NOISY), recompute_activations=False, applied_grad_norm=0.5)
    b = record_settings(make_run(FASTER, name=OTHER), recompute_activations=True, applied_grad_norm=0.7)
    found = compare_runs(a, b)
    assert (
        "only difference that can change the speed is recompute_activations (False -> True)" in found.speed_explanation
    )
    assert [(each.kind, each.what) for each in found.candidates] == [("in force", "recompute_activations")]


def test_what_both_engines_had_alike_explains_nothing_whatever_was_asked_for(make_run: MakeRun) -> None:
    a = record_settings(make_run(NOISY, settings={"compile": "auto"}), compile=False)
    b = record_settings(make_run(FASTER, settings={"compile": False}, name=OTHER), compile=False)
    assert compare_runs(a, b).candidates == []


def test_a_run_that_recorded_no_settings_in_force_is_compared_by_its_configuration(make_run: MakeRun) -> None:
    a, b = make_run(NOISY), record_settings(make_run(FASTER, name=OTHER), compile=True)
    assert compare_runs(a, b).candidates == []


def test_what_one_engine_states_as_off_and_the_other_does_not_state_is_no_difference(make_run: MakeRun) -> None:
    a = record_settings(make_run(NOISY), peft="none", fp8=None, sharding="fsdp", recompute="none")
    b = record_settings(
        make_run(NOISY, name=OTHER), tensor_model_parallel_size=1, pipeline_model_parallel_size=2, recompute="full"
    )
    found = {each.what: each.a for each in compare_runs(a, b).candidates if each.kind == "in force"}
    assert found.keys() == {"sharding", "pipeline_model_parallel_size", "recompute"}
    assert found["recompute"] == "none", "what both state is shown as stated"
