"""`direct` turns the plan of one worker into that of all workers of this node, and touches nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from primus.errors import UsageError
from primus.interpreter import build_module_command
from primus.machine.assumed_machine import build_assumed_machine
from primus.machine.facts import Cpu, MachineFacts, Memory
from primus.plan import LaunchPlan, PlanContext, Variable
from primus.runtimes.direct import Options, wrap

WORKER = LaunchPlan(argv=("python", "-m", "primus.worker", "/run", "0"), env={"A": Variable("file", "e.yaml:1")})


def context(devices: int = 0, terminal: str | None = None, **environ: str) -> PlanContext:
    facts = build_assumed_machine(f"mi300x:{devices}") if devices else MachineFacts(cpu=Cpu(usable=16))
    return PlanContext(
        environ=environ, python="python", gpu_facts=lambda: facts, facts=lambda master: facts, terminal=terminal
    )


def planned(devices: int = 0, environ: dict[str, str] | None = None, **options: Any) -> LaunchPlan:
    return wrap(WORKER, Options(**options), context(devices, **(environ or {})))


def test_one_process_is_plain_python() -> None:
    assert planned().argv == WORKER.argv
    assert planned(devices=8, single=True).argv == WORKER.argv


@pytest.mark.parametrize(("nproc", "memory_gib", "fitting"), [(257, None, 256), (100, 16, 64)])
def test_more_processes_than_a_machine_can_be_meant_for_are_refused(
    nproc: int, memory_gib: int | None, fitting: int
) -> None:
    memory = Memory(total_bytes=memory_gib << 30 if memory_gib else None)
    facts = MachineFacts(cpu=Cpu(usable=16), memory=memory)
    place = structs.replace(context(), facts=lambda master: facts)
    with pytest.raises(UsageError, match=f"{nproc} processes do not fit") as caught:
        wrap(WORKER, Options(nproc=nproc), place)
    assert f"at most {fitting}" in caught.value.hint
    assert wrap(WORKER, Options(nproc=fitting), place).layout
    assert wrap(WORKER, Options(nproc=nproc, oversubscribe=True), place).layout


def test_a_step_of_slurm_with_several_launchers_on_a_node_is_refused() -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "2"}
    step |= {"SLURM_STEP_NODELIST": "n[1-2]"}
    with pytest.raises(UsageError, match="srun started 4 tasks on 2 nodes") as caught:
        planned(environ=step | {"SLURM_STEP_NUM_TASKS": "4"})
    assert "--ntasks-per-node=1" in caught.value.hint
    assert planned(environ=step | {"SLURM_STEP_NUM_TASKS": "2"}).layout
    task = structs.replace(context(**step, SLURM_STEP_NUM_TASKS="4"), starts_workers=False)
    assert wrap(WORKER, Options(), task).layout, "tasks without workers may share their work"


@pytest.mark.parametrize(
    ("environ", "options", "is_warned"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}, {}, True),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}, {}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}, {"nnodes": 1}, False),
        ({"SLURM_JOB_NUM_NODES": "2"}, {}, False),
        ({}, {}, False),
    ],
)
def test_a_job_of_slurm_of_which_direct_uses_one_node_is_told(
    environ: dict[str, str], options: dict[str, int], is_warned: bool
) -> None:
    notes = planned(environ=environ, **options).notes
    assert any("this job of Slurm has 2 nodes, and `direct` uses one" in note for note in notes) is is_warned


def test_every_device_gets_a_process_of_torchrun() -> None:
    plan = planned(devices=8)
    assert plan.layout
    assert plan.layout.nproc == 8
    assert plan.argv[:3] == build_module_command("python", "primus.elastic_agent")
    assert plan.argv[-4:] == ("-m", "primus.worker", "/run", "0")


def test_one_node_lets_torchrun_choose_a_port_unless_one_is_given() -> None:
    assert "--rdzv-endpoint=localhost:0" in planned(nproc=2).argv
    fixed = planned(nproc=2, master_port=29500).argv
    assert "--master-port=29500" in fixed
    assert not [word for word in fixed if word.startswith("--rdzv")]


def test_several_nodes_keep_their_ranks() -> None:
    argv = planned(nproc=4, nnodes=2, node_rank=1, master_addr="head").argv
    words = ("--nproc-per-node=4", "--nnodes=2", "--node-rank=1", "--master-addr=head", "--master-port=1234")
    assert argv[4:9] == words


def test_one_process_on_each_of_several_nodes_is_plain_python_that_knows_its_rank() -> None:
    plan = planned(nproc=1, nnodes=2, node_rank=1, master_addr="head", env=("RANK=7",))
    assert plan.argv == WORKER.argv
    ranks = {"RANK": "1", "LOCAL_RANK": "0", "GROUP_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    expected = {**ranks, "MASTER_ADDR": "head", "MASTER_PORT": "1234"}
    assert {name: plan.env[name].value for name in expected} == expected
    assert "RANK" not in planned(nproc=1, env=("RANK=7",)).env
    assert "primus.elastic_agent" in planned(nproc=1, nnodes=2, master_addr="head", rdzv_backend="c10d").argv


def test_cores_are_shared_among_the_processes_unless_the_user_says_how() -> None:
    assert "OMP_NUM_THREADS" not in planned().env
    assert planned(nproc=2).env["OMP_NUM_THREADS"].value == "8"
    assert planned(nproc=32).env["OMP_NUM_THREADS"].value == "1"
    assert "OMP_NUM_THREADS" not in planned(nproc=2, environ={"OMP_NUM_THREADS": "3"}).env
    assert planned(nproc=2, env=("OMP_NUM_THREADS=5",)).env["OMP_NUM_THREADS"] == Variable("5", "--env")


def test_typed_variables_win_over_the_experiments() -> None:
    assert planned().env["A"] == Variable("file", "e.yaml:1")
    assert planned(env=("A=typed",)).env["A"] == Variable("typed", "--env")


def test_the_machine_has_its_say_below_hooks_and_below_the_user() -> None:
    env = planned(devices=8).env
    assert env["HSA_NO_SCRATCH_RECLAIM"].value == "1"
    assert env["HSA_NO_SCRATCH_RECLAIM"].source.startswith("amd: ")
    assert "HSA_NO_SCRATCH_RECLAIM" not in planned(devices=8, environ={"HSA_NO_SCRATCH_RECLAIM": "0"}).env
    assert planned(devices=8, env=("HSA_NO_SCRATCH_RECLAIM=0",)).env["HSA_NO_SCRATCH_RECLAIM"].value == "0"
    said = {"HSA_NO_SCRATCH_RECLAIM": Variable("2", "hook:a.sh"), "GPU_MAX_HW_QUEUES": Variable("4", "patch:b.sh")}
    hooked = wrap(WORKER, Options(), structs.replace(context(8, GPU_MAX_HW_QUEUES="8"), settings=said)).env
    assert hooked["HSA_NO_SCRATCH_RECLAIM"] == said["HSA_NO_SCRATCH_RECLAIM"]
    assert "GPU_MAX_HW_QUEUES" not in hooked


def test_the_shell_wins_over_the_experiment_and_is_not_repeated() -> None:
    assert "A" not in planned(environ={"A": "shell"}).env
    assert planned(environ={"A": "shell"}, env=("A=typed",)).env["A"] == Variable("typed", "--env")


@pytest.mark.parametrize(
    ("text", "variables"),
    [
        ("A=1\n", {"A": "1"}),
        ("export A=1\n", {"A": "1"}),
        ("# comment\n\n  A = x \n".replace(" = ", "="), {"A": "x"}),
        ("A='x y'\nB=\"z\"\nC='\n", {"A": "x y", "B": "z", "C": "'"}),
        ("A=b=c\n", {"A": "b=c"}),
        ("A=\n", {"A": ""}),
        ("A=1\nA=2\n", {"A": "2"}),
        ("A=x # not a comment\n", {"A": "x # not a comment"}),
        ("\ufeffA=1\r\n", {"A": "1"}),
    ],
)
def test_a_file_of_variables_is_read(tmp_path: Path, text: str, variables: dict[str, str]) -> None:
    file = tmp_path / "vars"
    file.write_text(text, encoding="utf-8", newline="")
    env = planned(env=(str(file),)).env
    assert {name: env[name].value for name in variables} == variables
    assert all(env[name].source.startswith(f"--env {file}:") for name in variables)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"A=1\nB\n", ":2: expected NAME=VALUE"),
        (b"1A=1\n", ":1: '1A' is not a valid variable name"),
        (b"=1\n", ":1: '' is not a valid variable name"),
        (b"A=\xff\n", ": not UTF-8 text"),
    ],
)
def test_a_wrong_file_of_variables_is_named_with_its_line(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "vars"
    file.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        planned(env=(str(file),))
    assert caught.value.problem.endswith(f"{file}{problem}")


def test_only_the_first_node_draws_progress_on_the_terminal() -> None:
    nodes = {"nnodes": 2, "master_addr": "head", "nproc": 1}
    shown = [wrap(WORKER, Options(**nodes, node_rank=rank), context(terminal="/dev/pts/7")).env for rank in (0, 1)]
    assert ["PRIMUS_PROGRESS" in env for env in shown] == [True, False]


@pytest.mark.parametrize("nproc", [1, 8])
def test_workers_that_nsys_launches_have_an_agent_that_reports_how_they_ended(nproc: int) -> None:
    place = structs.replace(context(), directory="/output/night/20250101_000000-0001", attempt=2)
    plan = wrap(WORKER, Options(nproc=nproc, attachable="nsys"), place)
    session = "primus-20250101_000000-0001-2-0"
    assert plan.argv[:3] == ("nsys", "launch", f"--session-new={session}")
    agent = plan.argv.index("primus.elastic_agent")
    assert agent > 5 and f"--nproc-per-node={nproc}" in plan.argv
    assert plan.env["PRIMUS_NSYS_SESSION"].value == session
    again = wrap(WORKER, Options(nproc=nproc, attachable="nsys"), structs.replace(place, attempt=3))
    assert again.argv[2] != plan.argv[2], "nsys refuses a name that is in use"


def test_rocprofv3_attaches_to_workers_with_its_variable() -> None:
    plan = planned(attachable="rocprofv3")
    assert plan.argv == WORKER.argv and plan.env["ROCP_TOOL_ATTACH"].value == "1"
    assert not {"ROCP_TOOL_ATTACH", "PRIMUS_NSYS_SESSION"} & set(planned().env)
