"""What supervision costs a training step, and how soon a death is decided on.

    python benchmarks/supervision_time.py --rounds 40

The step is that of the quickstart's model. Within one process blocks of steps with supervision (the rank's heartbeat,
and its launcher's watch in a process of its own) take turns with blocks without; what counts is the median of the
ratios of neighboring blocks. Beside it stands the processor time that supervision takes, which noise on the machine
does not change. A death is a rank that is killed by SIGKILL; the decision is the `restart` event.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path

from launch_time import COMMAND, ENVIRONMENT, HERE, REPOSITORY
from train_speed import machine

PLUGINS = REPOSITORY / "tests" / "fakes" / "shifts"
STEPS_IN_BLOCK = 5
SEQUENCE, BATCH = 256, 8
WATCHER = """
import sys, time
from pathlib import Path
from primus.launch.nodes.control_channel import ControlChannel
from primus.launch.supervision import worker_processes
from primus.launch.supervision.attempt_monitor import AttemptMonitor, NodeAttempt
from primus.launch.signals import StopSignals
from primus.machine.cluster import ClusterLayout
layout = ClusterLayout(nproc=1)
place = NodeAttempt(folder=Path(sys.argv[1]), layout=layout, ranks=(0,), environ={}, hang_timeout_s=600.0)
guard = AttemptMonitor(place, ControlChannel({}, {}), StopSignals(), lambda kind, **fields: None, print)
print("ready", flush=True)
while True:
    guard.is_over(time.monotonic())
    time.sleep(worker_processes.POLL_S)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="pairs of blocks of steps")
    parser.add_argument("--deaths", type=int, default=3, help="ranks killed in each layout")
    parser.add_argument("--machine", default=f"cpu-{os.cpu_count()}-cores", help="class of machine, in the file's name")
    parser.add_argument("--output", type=Path, help="where the record goes, instead of results/")
    options = parser.parse_args()
    record = {
        "machine": machine(os.cpu_count()),
        "rounds": {"blocks": options.rounds, "deaths": options.deaths},
        "training_step": step_cost(options.rounds),
        "seconds_from_death_to_decision": {
            f"{nodes} nodes of {nproc}": deaths(nodes, nproc, options.deaths)
            for nodes, nproc in ((1, 1), (1, 2), (2, 1))
        },
    }
    text = json.dumps(record, indent=1)
    output = options.output or HERE / "results" / f"supervision-{options.machine}.json"
    output.parent.mkdir(exist_ok=True)
    output.write_text(text + "\n")
    print(f"{text}\nwritten: {output}")


def step_cost(rounds: int) -> dict[str, object]:
    """Milliseconds of a step with and without supervision, and the share that supervision takes."""
    from primus.runs.store import RunMetadata, create_run

    step = quickstart_step()
    for _ in range(STEPS_IN_BLOCK):
        step()
    with tempfile.TemporaryDirectory() as place:
        run = create_run(Path(place) / "run", RunMetadata(id="run", name="run", task="train", created=time.time()))
        run.attempt_folder(0).mkdir(parents=True)
        command = [sys.executable, "-c", WATCHER, str(run.attempt_folder(0))]
        with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE) as watcher:
            try:
                times, watched_s, watch_cpu_s = blocks(step, run, watcher, rounds)
            finally:
                watcher.kill()
        beat_cpu_s = heartbeat_cpu_s(run.attempt_folder(0))
    ratios = [on / off for on, off in zip(times[True], times[False], strict=True)]
    share = (watch_cpu_s / watched_s + beat_cpu_s) / (os.cpu_count() or 1)
    return {
        "with_ms": summary(times[True]),
        "without_ms": summary(times[False]),
        "ratio": summary(ratios, 4),
        "watch_cpu_share_of_one_core": round(watch_cpu_s / watched_s, 5),
        "heartbeat_cpu_share_of_one_core": round(beat_cpu_s, 5),
        "cpu_share_of_the_machine": round(share, 5),
    }


def blocks(step, run, watcher: subprocess.Popen, rounds: int) -> tuple[dict[bool, list[float]], float, float]:
    """Milliseconds of a step by whether it is supervised, seconds of supervision, and its launcher's processor time."""
    from primus.runs.attempt import LAUNCHER_VARIABLE, Attempt

    assert watcher.stdout and watcher.stdout.readline() == b"ready\n"
    watcher.send_signal(signal.SIGSTOP)
    os.environ[LAUNCHER_VARIABLE] = str(watcher.pid)
    times: dict[bool, list[float]] = {True: [], False: []}
    watched_s, watch_cpu_s = 0.0, 0.0
    for number in range(rounds):
        for is_supervised in (True, False) if number % 2 else (False, True):
            if not is_supervised:
                times[False].append(block_ms(step, None))
                continue
            attempt = Attempt(run, 0)
            watcher.send_signal(signal.SIGCONT)
            began, cpu_s = time.perf_counter(), cpu_of(watcher.pid)
            times[True].append(block_ms(step, attempt))
            watched_s += time.perf_counter() - began
            watch_cpu_s += cpu_of(watcher.pid) - cpu_s
            watcher.send_signal(signal.SIGSTOP)
            attempt.close()
    return times, watched_s, watch_cpu_s


def quickstart_step():
    """One training step of the quickstart's model, by the trainer's own functions."""
    import torch

    from primus.experiment import resolve_experiment
    from primus.frameworks.native.engine.model import build_model
    from primus.frameworks.native.engine.optimizer import build_optimizer
    from primus.frameworks.native.engine.step import prepare_model, train_step

    found = resolve_experiment(REPOSITORY / "examples" / "quickstart.yaml", (), {}, "pre_trainer").experiment.trainer
    model = build_model(found.model, "cpu", 1)
    trainable = prepare_model(model, device="cpu")
    optimizer = build_optimizer(model, found.optimizer)
    tokens = torch.randint(0, found.model.vocab_size, (BATCH, SEQUENCE + 1))
    batches = [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())]
    return lambda: train_step(trainable, optimizer, batches, learning_rate=1e-4, clip_grad=1.0).values.tolist()


def block_ms(step, attempt) -> float:
    began = time.perf_counter()
    for number in range(STEPS_IN_BLOCK):
        step()
        if attempt is not None:
            attempt.beat("train", number, {"step_time_s": 0.1, "compute_time_s": 0.1})
    return 1e3 * (time.perf_counter() - began) / STEPS_IN_BLOCK


def cpu_of(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def heartbeat_cpu_s(folder: Path) -> float:
    """Processor time of one heartbeat, of which there is one a second."""
    from primus.runs.attempt import HeartbeatWriter, heartbeat_file

    heartbeat = HeartbeatWriter(heartbeat_file(folder, 9))
    began = time.process_time()
    for _ in range(200):
        heartbeat._write_heartbeat()
    taken = (time.process_time() - began) / 200
    heartbeat.close()
    return taken


def deaths(nnodes: int, nproc: int, rounds: int) -> dict[str, float]:
    """Seconds from SIGKILL to the decision; the highest rank is killed."""
    return summary([death_s(nnodes, nproc) for _ in range(rounds)], 2)


def death_s(nnodes: int, nproc: int) -> float:
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        with closing(socket.create_server(("", 0))) as probe:
            port = str(probe.getsockname()[1])
        folder, env = Path(place), ENVIRONMENT | {"PRIMUS_PLUGINS": str(PLUGINS)}
        launchers = []
        for node in range(nnodes):
            (folder / str(node)).mkdir()
            several = ["--nnodes", str(nnodes), "--node-rank", str(node), "--master-addr", "127.0.0.1"]
            several = [*several, "--master-port", port] if nnodes > 1 else []
            options = ["--nproc", str(nproc), *several, "--max-restarts", "1", "--restart-delay", "60"]
            command = [*COMMAND, "direct", *options, "--", "shift", "--steps", "5000"]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            launchers.append(stack.enter_context(subprocess.Popen(command, cwd=folder / str(node), env=env, **quiet)))
        last, own = nnodes * nproc - 1, folder / str(nnodes - 1)
        pid = wait_for(lambda: at_work(own, last))
        wait_for(lambda: at_work(folder / "0", 0))
        killed_at = time.time()
        os.kill(pid, signal.SIGKILL)
        decided_at = wait_for(lambda: restart_time(folder / "0"))
        for launcher in launchers:
            launcher.terminate()
        for launcher in launchers:
            launcher.wait(20)
    return decided_at - killed_at


def at_work(folder: Path, rank: int) -> int | None:
    for file in folder.glob(f"out/shift/latest/logs/attempt_0/rank_{rank}.heartbeat.json"):
        beat = json.loads(file.read_text())
        return beat["pid"] if beat["phase"] == "train" else None
    return None


def restart_time(folder: Path) -> float | None:
    lines = (folder / "out/shift/latest/events.jsonl").read_text().splitlines()
    return next((event["time"] for event in map(json.loads, lines) if event["kind"] == "restart"), None)


def wait_for(look):
    deadline = time.monotonic() + 60
    while (found := look()) is None:
        assert time.monotonic() < deadline, "not within 60 s"
        time.sleep(0.02)
    return found


def summary(values: list[float], digits: int = 1) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


if __name__ == "__main__":
    main()
