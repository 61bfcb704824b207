"""Runs of the torchtitan backend by its workers: events, checkpoints, signals, resume and errors."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine_python import engine_python, engine_variables
from primus.interpreter import build_module_command
from primus.runs import events
from primus.runs.files import write_json, write_text
from primus.runs.store import Run
from primus.runtime import LaunchRequest

pytestmark = [pytest.mark.engine("torchtitan"), pytest.mark.slow]

DEADLINE_S = 200.0
SETTINGS: dict[str, Any] = {
    "mock_data": True,
    "seq_length": 32,
    "train_iters": 6,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "bf16": False,
    "lr": 1e-2,
    "disable_tensorboard": True,
    "save_interval": 2,
    "async_save": False,
}
StartWorkers = Callable[..., list[subprocess.Popen[str]]]
EVALUATED = {"eval_interval": 3, "eval_iters": 2}


def write_run(folder: Path, framework: str = "torchtitan", **settings: Any) -> Run:
    """A run folder of the model `tiny` as the launcher leaves it to workers."""
    run = Run(folder)
    module = {"framework": framework, "model": "tiny", "overrides": {**SETTINGS, **settings}}
    write_text(run.config, yaml.safe_dump({"exp_name": "test", "modules": {"pre_trainer": module}}))
    write_json(run.directory / "request.json", LaunchRequest(runtimes=(), task="train pretrain"))
    return run


@contextmanager
def open_workers() -> Iterator[StartWorkers]:
    """``start(run, world=2, number=1)`` starts the workers of an attempt; those left at the end are killed."""
    started: list[subprocess.Popen[str]] = []

    def start(run: Run, world: int = 1, number: int = 0) -> list[subprocess.Popen[str]]:
        with closing(socket.socket()) as server:
            server.bind(("127.0.0.1", 0))
            port = str(server.getsockname()[1])
        command = build_module_command(engine_python("torchtitan"), "primus.worker", str(run.directory), str(number))
        env = engine_variables("torchtitan") | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        env |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        for rank in range(world):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(
                subprocess.Popen(command, env=env | place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        return started[-world:]

    try:
        yield start
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.fixture
def start_workers() -> Iterator[StartWorkers]:
    with open_workers() as start:
        yield start


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, str]:
    """A run that was not stopped, and what it printed."""
    run = write_run(tmp_path_factory.mktemp("undisturbed") / "run", **EVALUATED)
    with open_workers() as start:
        return run, finish(run, start(run))


def finish(run: Run, processes: list[subprocess.Popen[str]], code: int = 0) -> str:
    """What the first process has printed, once all have ended with `code`."""
    printed = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    found = [process.returncode for process in processes]
    assert found == [code] * len(found), "\n".join(printed) + read_log(run)
    return printed[0]


def read_log(run: Run, number: int = 0) -> str:
    file = run.attempt_folder(number) / "rank_0.log"
    return file.read_text() if file.exists() else ""


def list_losses(run: Run) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step; a step that was taken again counts as the last time."""
    return {event["step"]: (event["loss"], event["grad_norm"]) for event in list_events(run, "step")}


def list_events(run: Run, kind: str) -> list[events.Event]:
    return [event for event in events.read_events(run.events) if event["kind"] == kind]


def wait_for_step(run: Run, step: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not run.events.exists() or not any(event["step"] >= step for event in list_events(run, "step")):
        assert time.monotonic() < deadline, read_log(run)
        time.sleep(0.05)


def test_a_run_has_the_events_of_native_and_its_losses(
    undisturbed: tuple[Run, str], tmp_path: Path, start_workers: StartWorkers
) -> None:
    run, printed = undisturbed
    assert "lm loss" in printed
    assert "iteration" in printed
    native = write_run(tmp_path / "native", framework="native", compile=False, **EVALUATED)
    finish(native, start_workers(native))
    mine, others = list_events(run, "step"), list_events(native, "step")
    assert [sorted(event) for event in mine] == [sorted(event) for event in others]
    for event, other in zip(mine, others, strict=True):
        assert event["loss"] == pytest.approx(other["loss"], abs=5e-5)
        assert event["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        same = ("step", "learning_rate", "tokens", "consumed_samples", "global_batch_size", "skipped")
        assert {key: event[key] for key in same} == {key: other[key] for key in same}
        assert event["compute_time_s"] > 0
    for event, other in zip(list_events(run, "eval"), list_events(native, "eval"), strict=True):
        assert (event["step"], event["tokens"]) == (other["step"], other["tokens"])
        assert event["loss"] == pytest.approx(other["loss"], abs=5e-5)
    (started,) = list_events(run, "run_started")
    assert started["backend"] == "torchtitan"
    assert started["flops_per_token"] == list_events(native, "run_started")[0]["flops_per_token"]
    assert not (run.directory / "torchtitan").exists(), "torchtitan has written nothing of its own"


def test_a_killed_run_resumes_with_the_losses_of_an_undisturbed_one(
    undisturbed: tuple[Run, str], tmp_path: Path, start_workers: StartWorkers
) -> None:
    killed = write_run(tmp_path / "killed", **EVALUATED)
    workers = start_workers(killed)
    wait_for_step(killed, 3)
    for process in workers:
        process.send_signal(signal.SIGKILL)
    for process in workers:
        process.communicate(timeout=DEADLINE_S)
    finish(killed, start_workers(killed, number=1))
    assert list_losses(killed) == list_losses(undisturbed[0])
    assert list_events(killed, "checkpoint_loaded")[0]["step"] >= 2


def test_a_signal_saves_a_checkpoint(tmp_path: Path, start_workers: StartWorkers) -> None:
    run = write_run(tmp_path / "run", train_iters=5000, save_interval=None)
    workers = start_workers(run, world=2)
    wait_for_step(run, 2)
    workers[1].send_signal(signal.SIGTERM)
    printed = finish(run, workers)
    (interrupted,) = list_events(run, "interrupted")
    assert f"stopping after step {interrupted['step']}" in printed
    assert list_events(run, "checkpoint_saved")[-1]["step"] == interrupted["step"]


def test_a_refusal_of_torchtitan_is_one_message(tmp_path: Path, start_workers: StartWorkers) -> None:
    run = write_run(tmp_path / "run", backend_args={"debug.batch_invariant": True})
    printed = finish(run, start_workers(run), code=2)
    assert "torchtitan refuses the configuration: Batch-invariant mode is not supported" in printed + read_log(run)


def test_more_processes_than_the_layout_are_refused(tmp_path: Path, start_workers: StartWorkers) -> None:
    run = write_run(tmp_path / "run", tensor_model_parallel_size=2)
    assert "1 processes cannot be laid out as tensor_model_parallel_size 2" in finish(
        run, start_workers(run), code=2
    ) + read_log(run)
