"""What the order of ranks costs: its choice, a rendezvous of many nodes with and without it, and a dry run.

    python benchmarks/placement_time.py --rounds 7

The joins of the rendezvous are simulated over loopback, by threads of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from launch_time import COMMAND, ENVIRONMENT, HERE, REPOSITORY
from machine_time import summary
from train_speed import machine

from primus.launch.node_order import order_nodes
from primus.launch.nodes import rendezvous
from primus.machine.placement.rank_groups import RankGroups, place_groups_on_nodes
from primus.machine.placement.rank_order import build_switch_tree, choose_order
from primus.runs.node_record import RunNode

NODES = 512
PORT = 23457
DRY_RUN = (*COMMAND, "--dry-run", "slurm", "sbatch", "--placement", "near", "--gpus-per-node", "8")
TRAIN = ("--", "train", "pretrain", "--config", str(REPOSITORY / "examples" / "llama3.1_8B-pretrain.yaml"))
BATCH = ("--micro_batch_size", "1", "--global_batch_size", str(8 * NODES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--machine", default=f"cpu-{os.cpu_count()}-cores", help="class of machine, in the file's name")
    parser.add_argument("--output", type=Path, help="where the record goes, instead of results/")
    options = parser.parse_args()
    plain, ordered, one, many = [], [], [], []
    for _ in range(options.rounds):
        plain.append(rendezvous_ms(in_order=False))
        ordered.append(rendezvous_ms(in_order=True))
        one.append(dry_run_ms("1"))
        many.append(dry_run_ms(str(NODES)))
    record = {
        "machine": machine(os.cpu_count()),
        "rounds": options.rounds,
        "choice_cpu_ms": {
            str(size): summary([choice_ms(size) for _ in range(options.rounds)]) for size in (64, NODES, 4096)
        },
        f"rendezvous_of_{NODES}_ms": {"plain": summary(plain), "ordered": summary(ordered)},
        "rendezvous_ratio": statistics.median(b / a for a, b in zip(plain, ordered, strict=True)),
        "dry_run_ms": {"1 node": summary(one), f"{NODES} nodes": summary(many)},
        "dry_run_ratio": statistics.median(b / a for a, b in zip(one, many, strict=True)),
    }
    text = json.dumps(record, indent=1)
    output = options.output or HERE / "results" / f"placement_time-{options.machine}.json"
    output.write_text(text + "\n")
    print(f"{text}\nwritten: {output}")


def list_places(num_nodes: int) -> list[tuple[str, ...]]:
    """Leaves of 16 nodes, spines of 32 leaves, in the order of no alphabet."""
    places = [(f"spine{i // 512}", f"leaf{i // 16}") for i in range(num_nodes)]
    random.Random(num_nodes).shuffle(places)
    return places


def list_kinds(world_size: int) -> list[RankGroups]:
    """Tensor parallel 8, experts over 64 ranks, 4 pipeline stages."""
    data = world_size // 32
    return [
        RankGroups(name="expert group", size=8, stride=8, pattern="all-to-all", link_bytes=5e8),
        RankGroups(name="data-parallel group", size=data, stride=8, pattern="ring", link_bytes=1e9),
        RankGroups(name="pipeline", size=4, stride=8 * data, pattern="chain", link_bytes=1e8),
    ]


def choice_ms(num_nodes: int) -> float:
    """Milliseconds of CPU that the choice of an order takes."""
    places, began = list_places(num_nodes), time.process_time()
    choose_order(build_switch_tree(places), place_groups_on_nodes(list_kinds(8 * num_nodes), num_nodes, 8))
    return 1e3 * (time.process_time() - began)


def rendezvous_ms(*, in_order: bool) -> float:
    """Milliseconds until all nodes have their reply, from the moment when node 0 begins to listen."""
    places = list_places(NODES)
    reply, kept = rendezvous.JoinReply("run", 0), {}

    def assign(peers: Mapping[int, rendezvous.RendezvousPeer]) -> dict[int, int]:
        nodes = [RunNode(host="n0", scheduler_rank=0, place=places[0])]
        nodes += [
            RunNode(host=f"n{rank}", scheduler_rank=rank, place=peer.place) for rank, peer in sorted(peers.items())
        ]
        record = order_nodes(nodes, list_kinds(8 * NODES), 8)
        return {node.scheduler_rank: rank for rank, node in enumerate(record.nodes) if node.scheduler_rank}

    def join(rank: int) -> None:
        rendezvous.join_rendezvous(rendezvous.HeadAddress("127.0.0.1", PORT), rank, "same", 120, place=places[rank])

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(1, NODES)]
    for thread in threads:
        thread.start()
    began = time.perf_counter()
    if in_order:
        rendezvous.lead_rendezvous(PORT, NODES, reply, "same", 120, kept, assign)
    else:
        rendezvous.lead_rendezvous(PORT, NODES, reply, "same", 120, kept)
    for thread in threads:
        thread.join()
    taken = 1e3 * (time.perf_counter() - began)
    for peer in kept.values():
        peer.stream.close()
    return taken


def dry_run_ms(num_nodes: str) -> float:
    """Milliseconds of the dry run of a job with a placement."""
    command = (*DRY_RUN, "--nodes", num_nodes, *TRAIN, *BATCH)
    began = time.perf_counter()
    subprocess.run(command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, check=True)
    return 1e3 * (time.perf_counter() - began)


if __name__ == "__main__":
    main()
