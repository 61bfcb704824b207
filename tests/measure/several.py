"""`python several.py FOLDER SCENARIO LOCAL_SIZES`: processes that measure together, forked after one import of torch.

Each rank leaves FOLDER/rank_<r>.json; the exit codes of all are printed, and none outlives this program.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from primus.errors import PrimusError
from primus.machine.measurements import MeasurementPlan, list_pair_rounds
from primus.measure import suite
from primus.measure.endurance.endurance import EnduranceWorkload
from primus.measure.network import collectives, scan
from primus.measure.network.collectives import OPERATIONS, Buffers, RankGroup
from primus.runs.attempt import Attempt, RankPlace
from primus.runs.store import Run

SIZES = (8, 1000, 300_000)
CULPRIT = 1
LIMIT_S = 60.0
SLEEP_S = 0.06
PAIR_BYTES = 4096


def measure(group: RankGroup) -> dict[str, object]:
    """Every operation as it is, then with faults of one rank."""
    return {
        "right": [collectives.run(name, size, group, 0.05) for name in OPERATIONS for size in SIZES for _ in range(2)],
        "sent": [collectives.run(name, 1000, group, 0.05, _corrupting_sender(name)) for name in OPERATIONS],
        "received": [collectives.run(name, 1000, group, 0.05, _corrupting_receiver(name)) for name in OPERATIONS],
        "twice": collectives.run("all_reduce", 1000, group, 0.05, _twice),
        "unknown": collectives.run("all_reduce", 1000, group, 0.05, _unsupported),
        "pairs": _scan(group, scan.exchange_with_partner),
        "slow_pairs": _scan(group, _slow_exchange),
        "corrupt_pairs": _scan(group, _corrupt_exchange),
    }


def _corrupting_sender(name: str) -> collectives.Launch:
    def launch(buffers: Buffers, group: RankGroup) -> None:
        if group.member == CULPRIT:
            buffers.send[0] += 1
            buffers.receive[0] += 1  # what is reduced or sent in place
        OPERATIONS[name].launch(buffers, group)

    return launch


def _corrupting_receiver(name: str) -> collectives.Launch:
    def launch(buffers: Buffers, group: RankGroup) -> None:
        OPERATIONS[name].launch(buffers, group)
        if group.member == CULPRIT:
            buffers.receive[-1] += 1

    return launch


def _twice(buffers: Buffers, group: RankGroup) -> None:
    for _ in range(2):
        OPERATIONS["all_reduce"].launch(buffers, group)


def _unsupported(buffers: Buffers, group: RankGroup) -> None:
    raise RuntimeError("ProcessGroupGloo does not support this operation")


def _slow_exchange(buffers: Buffers, group: RankGroup, partner: int) -> None:
    if group.member == CULPRIT:
        time.sleep(SLEEP_S)
    scan.exchange_with_partner(buffers, group, partner)


def _corrupt_exchange(buffers: Buffers, group: RankGroup, partner: int) -> None:
    scan.exchange_with_partner(buffers, group, partner)
    if group.member == CULPRIT:
        buffers.receive[0] = -5.0


def _scan(group: RankGroup, exchange: scan.Exchange) -> list[object]:
    found: list[object] = []
    for number, meeting in enumerate(list_pair_rounds(group.size)):
        found += scan.run_round(number, meeting, group, PAIR_BYTES, between_nodes=False, exchange=exchange)
    return found


def alone(folder: Path, rank: int, local_rank: int, world_size: int) -> int:
    """The functions under test, in a group of their own."""
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=20))
    group = RankGroup("node", tuple(range(world_size)), rank, torch.device("cpu"), dist.group.WORLD)
    (folder / f"rank_{rank}.json").write_bytes(msgspec.json.encode(measure(group)))
    dist.destroy_process_group()
    return 0


def whole(folder: Path, rank: int, local_rank: int, world_size: int) -> int:
    """The suite, as a worker of a preflight runs it."""
    return _suite(folder, rank, local_rank, world_size, sizes_bytes=(8, 65536), is_quick=True, timeout_s=20.0)


def long(folder: Path, rank: int, local_rank: int, world_size: int) -> int:
    """A suite that goes on until something happens to one of its ranks."""
    sizes = tuple(range(2**20, 2**20 + 4000, 8))
    return _suite(folder, rank, local_rank, world_size, sizes_bytes=sizes, is_quick=False, timeout_s=4.0)


def soak(folder: Path, rank: int, local_rank: int, world_size: int) -> int:
    """The tests that take long, with faults: 1 flips a bit, 2 trains otherwise, 3 does not repeat itself."""
    trained = {0: ["a", "a"], 1: ["a", "a"], 2: ["b", "b"], 3: ["a", "c"]}[rank]
    calls = 0

    def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        torch.mm(a, b, out=out)
        if rank == CULPRIT and calls == 9:
            out.view(torch.int32)[0, 0] ^= 1

    workload = EnduranceWorkload(train=lambda _: (trained.pop(0), 1.0), multiply=multiply)
    attempt = Attempt(Run(folder), 0, RankPlace(rank, local_rank, world_size))
    asked = MeasurementPlan(
        tests=("host_memory", "quickstart", "burn_in"), sizes_bytes=(8,), pair_bytes=8, gemm_size=128, dtype="fp32",
        is_quick=True, timeout_s=20.0, burn_in_s=0.5,
    )  # fmt: skip
    suite.run(attempt, asked, workload)
    attempt.close()
    return 0


def _suite(folder: Path, rank: int, local_rank: int, world_size: int, **asked: object) -> int:
    attempt = Attempt(Run(folder), 0, RankPlace(rank, local_rank, world_size))
    tests = ("sanity", "gemm", "memory", "copies", "collectives", "pairs") if asked["is_quick"] else ("collectives",)
    try:
        suite.run(attempt, MeasurementPlan(tests=tests, pair_bytes=65536, gemm_size=128, dtype="fp32", **asked))  # type: ignore[arg-type]
    except PrimusError as error:
        attempt.record_failure(error, error.exit_code)
        return error.exit_code
    finally:
        attempt.close()
    return 0


SCENARIOS: dict[str, Callable[[Path, int, int, int], int]] = {
    "alone": alone,
    "whole": whole,
    "long": long,
    "soak": soak,
}


def _begin(scenario: str, folder: Path, rank: int, local_rank: int, world_size: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with (folder / f"rank_{rank}.out").open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    torch.set_num_threads(1)
    code = SCENARIOS[scenario](folder, rank, local_rank, world_size)
    sys.stdout.flush()
    os._exit(code)


def main(folder: Path, scenario: str, local_sizes: list[int]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    local_ranks = [local for size in local_sizes for local in range(size)]
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=_begin, args=(scenario, folder, rank, local, len(local_ranks), port))
        for rank, local in enumerate(local_ranks)
    ]
    for process in ranks:
        process.start()
    (folder / "pids.json").write_text(json.dumps([process.pid for process in ranks]))
    until = time.monotonic() + LIMIT_S
    try:
        for process in ranks:
            process.join(max(until - time.monotonic(), 0))
    finally:
        for process in ranks:
            process.kill()
    for process in ranks:
        process.join()
    print(json.dumps([process.exitcode for process in ranks]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], [int(size) for size in sys.argv[3].split(",")])
