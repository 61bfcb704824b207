"""What a drill measures on one machine: on 2 to 4 nodes of a real Slurm, two hosts of a real sshd, and in a container.

    bash tests/cluster/install.sh          as root, on Debian
    python benchmarks/failure_drill.py --nodes 2 3 4 --places slurm ssh podman

Each node is a slurmd with a host name of its own; the job trains a small Llama with the engine native, one process on
each node. The nodes share the processors and the loopback interface of the machine, so that times are those of a busy
host, and no network can be dropped. The scratch disk is a file system in memory. With ssh two addresses of the loopback
interface are two hosts; a container has two processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launch_time import HERE, REPOSITORY
from train_speed import machine

sys.path.insert(0, str(REPOSITORY / "tests"))  # real servers and engines of the tests

SLURM = REPOSITORY / "tests/cluster/slurm.sh"
EXPERIMENT = """\
workspace: ./output
modules:
  pre_trainer:
    framework: native
    config: pre_trainer.yaml
    model: llama_quickstart.yaml
    overrides: {
      mock_data: true, seq_length: 32, train_iters: 100000, micro_batch_size: 1, global_batch_size: 12, bf16: false,
      num_layers: 1, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 2, num_query_groups: 2,
      vocab_size: 256, lr: 1.0e-3, min_lr: 1.0e-4,
    }
"""
KEPT = (
    "fault",
    "state",
    "reason",
    "rank",
    "host",
    "detect_s",
    "restart_s",
    "steps_lost",
    "restarted_by",
    "blamed_rank",
    "blamed_hosts",
    "is_blame_right",
    "losses",
)
"""What the record has of each fault."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--faults", nargs="*", default=[], help="only these faults")
    parser.add_argument("--minutes", type=float, default=15.0, help="time limit of each drill")
    parser.add_argument("--machine", default=f"cpu-{os.cpu_count()}-cores", help="class of machine, in the file's name")
    parser.add_argument("--output", type=Path, help="where the record goes, instead of results/")
    options = parser.parse_args()
    output = options.output or HERE / "results" / f"failure_drill-{options.machine}.json"
    record: dict[str, Any] = json.loads(output.read_text()) if output.exists() else {"drills": {}}
    record |= {"machine": machine(os.cpu_count()), "load_before": list(os.getloadavg())}
    faults = ["--faults", *options.faults] if options.faults else []
    for place in options.places:
        with tempfile.TemporaryDirectory(prefix="failure-drill-") as name:
            folder = Path(name)
            (folder / "job.yaml").write_text(EXPERIMENT)
            (folder / "small").mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder / "small")], check=True)
            try:
                with PLACES[place](folder, options.nodes) as runtimes:
                    for title, words in runtimes.items():
                        record["drills"][title] = run_drill(folder, words, [*faults, "--minutes", str(options.minutes)])
                        output.write_text(json.dumps(record, indent=1).replace(f"{folder}/", "") + "\n")
            finally:
                subprocess.run(["umount", "--lazy", str(folder / "small")], check=True)
    print(output)


@contextmanager
def start_slurm(folder: Path, counts: list[int]) -> Iterator[dict[str, list[str]]]:
    """A Slurm with a node for each of the highest count; gives the runtime's words by title."""
    (folder / "slurm").mkdir()
    os.environ["SLURM_CONF"] = str(folder / "slurm/slurm.conf")
    try:
        subprocess.run(["bash", str(SLURM), "up", str(folder / "slurm"), str(max(counts))], check=True)
        yield {f"{count} nodes": ["slurm", "srun", "-N", str(count)] for count in counts}
    finally:
        subprocess.run(["bash", str(SLURM), "down", str(folder / "slurm")], check=True)


@contextmanager
def start_ssh(folder: Path, counts: list[int]) -> Iterator[dict[str, list[str]]]:
    """Two hosts of an sshd."""
    from cluster.test_ssh import Server

    os.environ |= {"PYTHONPATH": str(REPOSITORY / "src"), "PRIMUS_PLUGINS": ""}
    server = Server(folder / "sshd")
    try:
        yield {"2 hosts of ssh": server.words()}
    finally:
        server.stop()


@contextmanager
def start_podman(folder: Path, counts: list[int]) -> Iterator[dict[str, list[str]]]:
    """An image of this machine's files in podman."""
    from cluster import containers

    engine = containers.Podman(folder / "podman")
    os.environ.update(engine.environ)
    try:
        mounts = [*containers.mounts(), "--mount", f"{folder / 'small'}:{folder / 'small'}"]
        own = ["--engine", engine.name, "--image", engine.image, *mounts, "--env", "PRIMUS_PYTHON=/none"]
        yield {"a container of podman": ["container", *own, "--", "direct", "--nproc", "2"]}
    finally:
        engine.end()


PLACES: dict[str, Callable[..., Any]] = {"slurm": start_slurm, "ssh": start_ssh, "podman": start_podman}


def run_drill(folder: Path, runtime: list[str], options: list[str]) -> dict[str, Any]:
    """The record of one drill; what it prints is shown."""
    output = folder / f"drill-{len(list(folder.glob('drill-*')))}"
    words = [*runtime, "--", "drill", "--steps", "24", "--fill", str(folder / "small"), *options]
    words += ["--output", str(output), "--", "train", "pretrain", "--config", "job.yaml"]
    environ = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
    environ["OMP_NUM_THREADS"] = "1"  # the nodes share the processors, and threads of one rank wait for each other
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    print("primus-cli", *words, flush=True)
    done = subprocess.run([str(REPOSITORY / "primus-cli"), *words], cwd=folder, env=environ, check=False)
    result = json.loads((output / "drill.json").read_text())
    kept = {
        name: result[name] for name in ("duration_s", "reference", "start_s", "hang_timeout_s", "outage", "goodput")
    }
    cases = [{name: case[name] for name in KEPT if case[name] not in (None, "")} for case in result["cases"]]
    return {"exit_code": done.returncode, "hosts": result["hosts"], **kept, "cases": cases}


if __name__ == "__main__":
    main()
