"""A checkpoint of several processes, of which one is killed while it is written, is never continued from."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes import cli
from fakes.gloo import start_in_processes
from primus import experiment
from primus.errors import PrimusError
from primus.frameworks import native
from primus.runs import events
from primus.runs.attempt import Attempt, RankPlace
from primus.runs.store import Run
from primus.session.checkpoints import saver as checkpoint

KILLED_STEP = 8
DEADLINE_S = 90


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["_list_own_entries", "write"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_save_that_a_kill_of_one_process_has_interrupted_is_not_taken(
    make_run: Callable[..., Run], train: Callable[..., Any], victim: int, moment: str
) -> None:
    run = make_run(train_iters=12, save_interval=4, global_batch_size=4)
    context = start_in_processes(2, _train, str(run.directory), victim, moment, cli.find_free_port())
    for process in context.processes:
        process.join(DEADLINE_S)
    codes = [process.exitcode for process in context.processes]
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] == 7, "the other one fails of it"
    assert not (run.checkpoints / f"step_{KILLED_STEP:08d}" / "manifest.json").exists()

    train(run, number=1)

    (loaded,) = [event for event in events.read_events(run.events) if event["kind"] == "checkpoint_loaded"]
    assert loaded["step"] == 4
    assert [event["step"] for event in events.read_steps(run.events)] == list(range(1, 13))


def _train(rank: int, directory: str, victim: int, moment: str, port: int) -> None:
    """Train as one of two; the victim is killed when it saves `KILLED_STEP`, before its files or after them."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}
    if rank == victim:
        _arrange_kill(moment)
    run = Run(Path(directory))
    attempt = Attempt(run, 0, RankPlace(rank, rank, 2))
    try:
        native.train(experiment.read_run_experiment(run), attempt)
    except (PrimusError, RuntimeError):  # torch's words for a peer that has gone
        os._exit(7)


def _arrange_kill(moment: str) -> None:
    real = getattr(checkpoint._CheckpointWrite, moment)

    def killed(writing: Any, *args: Any) -> Any:
        if writing._position.step == KILLED_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(writing, *args)

    setattr(checkpoint._CheckpointWrite, moment, killed)
