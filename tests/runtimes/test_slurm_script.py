"""The batch script, run for real by bash with programs that stand for Slurm's."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes.cli import wait_for
from primus.runtimes.slurm.options import parse
from primus.runtimes.slurm.script import BatchScript, format_batch_script

LIMIT_S = 20


class Scene:
    """A folder with a job's script, and programs that note how they are called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run 'of' $(touch evil)"
        (self.run / "logs").mkdir(parents=True)
        self.program("srun", 'printf "%s\\0" "$@" >>"$DUMP"; exit "${CODE-0}"')
        self.program("scontrol", 'echo "scontrol $*" >>"$CALLS"; exit "${REFUSED-0}"')
        self.program("primus-cli", 'echo "next ${*:7}" >>"$CALLS"; sed 1q "$ANSWERS"; sed -i 1d "$ANSWERS"')

    def program(self, name: str, body: str) -> None:
        file = self.folder / name
        file.write_text(f"#!/bin/bash\n{body}\n")
        file.chmod(0o755)

    def start(self, command: tuple[str, ...], words: str, answers: str, **environ: str) -> subprocess.Popen[bytes]:
        batch = BatchScript(
            options=parse(["sbatch", *words.split()]),
            run=str(self.run),
            name="n",
            command=command,
            primus=str(self.folder / "primus-cli"),
        )
        (self.folder / "job.sh").write_text(format_batch_script(batch), encoding="utf-8")
        (self.folder / "answers").write_text(answers)
        env = {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "DUMP": str(self.folder / "dump"),
            "CALLS": str(self.folder / "calls"),
            "ANSWERS": str(self.folder / "answers"),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "2",
        }
        with (self.folder / "out").open("wb") as out:
            return subprocess.Popen(
                ["bash", str(self.folder / "job.sh")],
                env=env | environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                cwd=self.folder,
            )

    def done(self, command: tuple[str, ...], words: str, answers: str, **environ: str) -> int:
        process = self.start(command, words, answers, **environ)
        try:
            return process.wait(LIMIT_S)
        finally:
            end_all(process)

    @property
    def steps(self) -> list[str]:
        return (self.folder / "dump").read_bytes().decode().split("\0")[:-1]

    @property
    def calls(self) -> list[str]:
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []


def end_all(process: subprocess.Popen[bytes]) -> None:
    """End the script's session, its watchers too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_job_that_is_done_ends_with_0(scene: Scene) -> None:
    assert scene.done(("launcher", "go"), "-N 2", "finish\n") == 0
    head = ["--nodes=2", "--ntasks=2", "--overlap", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--wait=60"]
    assert scene.steps[:6] == head
    assert scene.steps[-2:] == ["launcher", "go"]
    assert scene.calls == [f"next {scene.run} --max-restarts=0 --restart-delay=30 --exit-code=0 --num-nodes=2"]


def test_a_job_ends_with_the_code_that_is_decided(scene: Scene) -> None:
    assert scene.done(("launcher",), "-N 2", "stop 7\n", CODE="9") == 7
    assert "--exit-code=9" in scene.calls[0]


def test_a_restart_leaves_nodes_out(scene: Scene) -> None:
    assert scene.done(("launcher",), "-N 2 --spare-nodes 1", "restart 0 n2,n5\nfinish\n", CODE="1") == 0
    assert "--exclude=n2,n5" in scene.steps
    assert scene.calls[1].endswith("--exit-code=1 --num-nodes=2 --excluded=n2,n5")
    assert scene.steps.count("launcher") == 2


def test_a_job_that_may_is_queued_again(scene: Scene) -> None:
    process = scene.start(("launcher",), "-N 2 --requeue", "requeue\n", CODE="1")
    try:
        wait_for(lambda: "scontrol requeue 7" in scene.calls, "the requeue")
        assert process.poll() is None, "Slurm ends it"
    finally:
        end_all(process)


def test_a_job_of_an_array_ends_with_the_code_of_its_step(scene: Scene) -> None:
    assert scene.done(("launcher", "go"), "-a 0-3", "") == 0
    assert scene.steps[:2] == ["--nodes=2", "--ntasks=2"]
    assert scene.steps[-2:] == ["launcher", "go"]
    assert scene.done(("launcher",), "-a 0-3 --requeue", "", CODE="5") == 5
    assert scene.calls == []


def test_a_job_of_an_array_that_may_is_queued_again_when_its_end_is_announced(scene: Scene) -> None:
    scene.program("srun", 'trap "exit 143" TERM; touch "$DUMP"; for i in {1..200}; do sleep 0.1; done')
    process = scene.start(("launcher",), "-a 0-3 --requeue", "")
    try:
        wait_for((scene.folder / "dump").exists, "the step")
        process.send_signal(signal.SIGUSR1)
        wait_for(lambda: "scontrol requeue 7" in scene.calls, "the requeue")
    finally:
        end_all(process)


def test_a_refused_requeue_ends_the_job(scene: Scene) -> None:
    assert scene.done(("launcher",), "-N 2 --requeue", "requeue\n", CODE="3", REFUSED="1") == 3


def test_without_an_answer_the_step_decides(scene: Scene) -> None:
    scene.program("primus-cli", "exit 2")
    assert scene.done(("launcher",), "-N 2", "", CODE="5") == 5
    assert scene.done(("launcher",), "-N 2", "", CODE="0") == 1


def test_the_announced_end_reaches_the_step_and_the_question(scene: Scene) -> None:
    scene.program(
        "srun", 'trap "echo told >>$CALLS; exit 0" USR1; touch "$DUMP"; for i in {1..200}; do sleep 0.1; done'
    )
    process = scene.start(("launcher",), "-N 2", "stop 4\n")
    try:
        wait_for((scene.folder / "dump").exists, "the step")
        process.send_signal(signal.SIGUSR1)
        assert process.wait(LIMIT_S) == 4
    finally:
        end_all(process)
    assert scene.calls[0] == "told"
    assert scene.calls[1].endswith("--exit-code=0 --num-nodes=2 --warned")


def test_an_end_that_is_announced_between_two_steps_starts_no_other(scene: Scene) -> None:
    process = scene.start(("launcher",), "-N 2", "restart 30\n", CODE="6")
    try:
        wait_for(lambda: scene.calls and not (scene.folder / "answers").read_text(), "the answer")
        time.sleep(0.2)  # bash reads the answer and begins to wait
        process.send_signal(signal.SIGUSR1)
        assert process.wait(LIMIT_S) == 6
    finally:
        end_all(process)
    assert scene.steps.count("launcher") == 1


def test_the_script_is_told_to_end_as_any_program(scene: Scene) -> None:
    scene.program("srun", 'touch "$DUMP"; for i in {1..200}; do sleep 0.1; done')
    process = scene.start(("launcher",), "-N 2", "")
    try:
        wait_for((scene.folder / "dump").exists, "the step")
        process.terminate()
        assert process.wait(LIMIT_S) == -signal.SIGTERM
    finally:
        end_all(process)
    assert not scene.calls


def test_a_step_whose_node_has_died_is_not_waited_for(scene: Scene) -> None:
    """srun stays until Slurm has noticed; the other launchers know, and leave when their hooks are done."""
    scene.program("srun", 'touch "$DUMP"; exec sleep 100')
    scene.program("sleep", 'case $1 in 5|2|1) exec /bin/sleep 0.1 ;; *) exec /bin/sleep "$1" ;; esac')
    process = scene.start(("launcher",), "-N 2", "stop 8\n")
    try:
        wait_for((scene.folder / "dump").exists, "the step")
        time.sleep(0.5)
        told = [{"time": 1, "kind": "attempt_ended", "end": "lost node"}, {"time": 2, "kind": "nodes_left"}]
        lines = [json.dumps(each, separators=(",", ":")) + "\n" for each in told]
        (scene.run / "events.jsonl").write_text(lines[0])
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)  # 20 times as long as the launchers' hooks have here
        (scene.run / "events.jsonl").write_text("".join(lines))
        assert process.wait(LIMIT_S) == 8
    finally:
        end_all(process)


hostile = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=0, max_size=30)
shells = st.sampled_from(
    ["$(id)", "`id`", "a b", "'", '"', "\\", "\n", "$HOME", "!!", "*", "~", "{a,b}", "#", "%j", "\u00e9\u4e2d"]
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(hostile | shells, min_size=1, max_size=6))
def test_any_words_reach_each_node_unchanged(words: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder))
        assert scene.done(("launcher", *words), "-N 2", "finish\n") == 0
        assert scene.steps[scene.steps.index("launcher") + 1 :] == words
        assert not (scene.folder / "evil").exists()


def test_a_word_of_100_kb_reaches_each_node(scene: Scene) -> None:
    word = "a'b\n$x" * 16000
    assert scene.done(("launcher", word), "-N 2", "finish\n") == 0
    assert scene.steps[-1] == word
