"""Observers follow a run; none of them can fail or hold it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fakes import cli
from primus.launch import run_observers

PLUG_IN = """\
from primus.errors import PrimusError, UsageError
from primus.observer import Observer
from msgspec import Struct

class Options(Struct, frozen=True):
    does: str = ""

class Own(Observer):
    def __init__(self, options, observed):
        self.options, self.observed = options, observed
    def observe(self, events, metrics):
        if self.options.does == "raises":
            raise KeyError("x")
        if self.options.does == "refuses":
            raise PrimusError("the server is away")
        kinds = " ".join(event["kind"] for event in events)
        with (self.observed.run.directory / "seen").open("a") as file:
            file.write(f"{kinds} {metrics.state}\\n")
    def close(self):
        self.observed.say("closed")

def open_observer(options, observed):
    if options.does == "stops":
        raise UsageError("the server is unknown")
    return Own(options, observed)
"""
EXPERIMENT = (
    "exp_name: night\nmodules: {pre_trainer: {framework: abacus, model: tiny.yaml, overrides: "
    "{mock_data: true, seq_length: 128, train_iters: 4, observers: [{own: {does: 'DOES'}}]}}}\n"
)


@pytest.mark.parametrize(
    ("does", "code", "said"),
    [
        ("", 0, "closed"),
        ("raises", 0, "own.py:13: KeyError: 'x'; it is left out from here on"),
        ("refuses", 0, "observer own: the server is away"),
        ("stops", 2, "primus-cli: the server is unknown"),
    ],
)
def test_an_observer_sees_all_events_and_no_failure_of_it_ends_the_run(
    does: str, code: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / "plug-ins/observers").mkdir(parents=True)
    (tmp_path / "plug-ins/observers/own.py").write_text(PLUG_IN)
    (tmp_path / "e.yaml").write_text(EXPERIMENT.replace("DOES", does))
    plug_ins = f"{cli.PLUGINS}:{tmp_path / 'plug-ins'}"
    words = ["direct", "--single", "--", "train", "pretrain", "--config", "e.yaml"]
    done = cli.run(*words, cwd=tmp_path, PRIMUS_PLUGINS=plug_ins)
    assert done.returncode == code, done.stderr
    shown = done.stdout + done.stderr
    assert shown.count(said) == 1
    run = tmp_path / "output/night/latest"
    if not does:
        seen = (run / "seen").read_text().split()
        assert [kind for kind in ("run_started", "step", "run_ended") if kind not in seen] == []
        assert seen[-1] == "done"
    if does == "stops":
        assert '"state": "failed"' in (run / "metadata.json").read_text()


def test_an_observer_that_does_not_return_does_not_hold_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_observers, "CLOSE_LIMIT_S", 0.2)
    from primus.observer import Observer
    from primus.runs.events import EventFollower

    class Slow(Observer):
        def close(self) -> None:
            time.sleep(5)

    said: list[str] = []
    thread = run_observers._ObserverThread("slow", Slow(), EventFollower(tmp_path / "events.jsonl"), said.append)
    began = time.monotonic()
    thread.stop()
    assert time.monotonic() - began < 3
    assert said == ["observer slow: not finished within 0 s; the run ends without it"]
