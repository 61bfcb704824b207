"""Several processes over gloo: the losses of one, the same decisions in each, and clear words when they cannot meet."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.data.instruction.test_instruction_data import converse, write_rows, write_tokenizer

from primus.errors import PrimusError
from primus.runs import events
from primus.runs.store import Run
from primus.session.ranks import torch_processes as distributed
from primus.session.ranks.torch_processes import TorchProcesses, join_processes

MakeRun = Callable[..., Run]
Train = Callable[..., Any]
StartWorkers = Callable[..., Any]


def kinds(run: Run, kind: str) -> list[events.Event]:
    return [event for event in events.read_events(run.events) if event["kind"] == kind]


@pytest.mark.parametrize("is_sharded", [True, False])
def test_two_processes_train_as_one_does(
    make_run: MakeRun, train: Train, start_workers: StartWorkers, is_sharded: bool
) -> None:
    settings = {"global_batch_size": 8, "eval_interval": 4, "eval_iters": 2, "use_distributed_optimizer": is_sharded}
    two, one = make_run("two", **settings), make_run("one", **settings)
    start_workers(two, world=2).succeed()
    train(one)
    for kind in ("step", "eval"):
        found, expected = kinds(two, kind), kinds(one, kind)
        assert [event["step"] for event in found] == [event["step"] for event in expected]
        for event, other in zip(found, expected, strict=True):
            # float32 sums in another order, through eight steps
            assert event["loss"] == pytest.approx(other["loss"], rel=2e-5), kind
    assert kinds(two, "run_started")[0]["world_size"] == 2
    last = kinds(two, "step")[-1]
    assert last["tokens_per_s_per_device"] == pytest.approx(last["tokens_per_s"] / 2)


def test_a_signal_to_one_process_stops_both_at_the_same_step(make_run: MakeRun, start_workers: StartWorkers) -> None:
    run = make_run(train_iters=2000)
    workers = start_workers(run, world=2)
    workers.wait_for_step(3)
    workers.processes[1].send_signal(signal.SIGTERM)
    said = workers.succeed()
    (interrupted,) = kinds(run, "interrupted")
    assert interrupted["step"] < 2000
    assert kinds(run, "checkpoint_saved")[-1]["step"] == interrupted["step"]
    assert f"stopping after step {interrupted['step']}" in said


def test_only_the_first_process_speaks_and_records(make_run: MakeRun, start_workers: StartWorkers) -> None:
    run = make_run(train_iters=2)
    workers = start_workers(run, world=2)
    said = workers.succeed()
    assert said.count("iteration        1/       2") == 1
    assert [step["step"] for step in kinds(run, "step")] == [1, 2]
    assert "iteration        1/       2" in workers.log(1), "each has a log of its own"


def test_a_failed_rendezvous_names_the_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": "1"}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            with pytest.raises(PrimusError, match=f"did not find each other at 127.0.0.1:{port}") as error:
                _join(environ)
    assert "MASTER_ADDR" in error.value.hint


def test_one_process_agrees_with_itself() -> None:
    alone = TorchProcesses(0, 1, torch.device("cpu"), timedelta(minutes=1))
    assert [alone.all_reduce_max(value) for value in (0, 2)] == [0, 2]
    assert (
        alone.all_gather_values("x") == ["x"] and alone.broadcast_from_first("y") == "y" and alone.writer_group is None
    )


def test_random_states_continue_where_they_were() -> None:
    cpu = torch.device("cpu")
    distributed.seed_everything(1, deterministic=False)
    states = {name: state.clone() for name, state in distributed.random_state(3, cpu).items()}
    assert set(states) == {"random.3.cpu"}
    expected = torch.rand(5)
    distributed.set_random_state(states, 3, cpu)
    assert torch.equal(torch.rand(5), expected)


def _join(environ: dict[str, str]) -> None:
    with join_processes(rank=1, local_rank=1, world=2, timeout=timedelta(seconds=2), environ=environ):
        pass


def test_the_mean_over_all_answers_is_the_same_under_any_accumulation_and_number_of_processes(
    tmp_path: Path, make_run: MakeRun, train: Train, start_workers: StartWorkers
) -> None:
    """Answers of 1 to 50 tokens, so that a mean of means is another number."""
    settings = {
        "mock_data": False,
        "sft_data_path": write_rows(tmp_path / "rows.jsonl", [converse("q", "x" * (n % 8) ** 2) for n in range(24)]),
        "data_path": str(tmp_path / "data"),
        "tokenizer_model": write_tokenizer(tmp_path / "tok"),
        "split": "100,0,0",
        "seq_length": 96,
        "train_iters": 3,
        "sample_tokens": 0,
        "global_batch_size": 8,
        "vocab_size": 512,
    }
    whole, four, two = (
        make_run(name, **settings, micro_batch_size=size) for name, size in (("whole", 8), ("four", 2), ("two", 2))
    )
    train(whole)
    train(four)
    start_workers(two, world=2).succeed()
    expected = kinds(whole, "step")
    assert len(expected) == 3
    for run in (four, two):
        for event, other in zip(kinds(run, "step"), expected, strict=True):
            for key in ("loss", "grad_norm"):
                # float32 sums in another order
                assert event[key] == pytest.approx(other[key], rel=2e-5), (run.directory.name, key)
