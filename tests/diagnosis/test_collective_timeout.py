"""Which rank a timed out collective waited for."""

from __future__ import annotations

from pathlib import Path

from primus.diagnosis.collective_timeout import find_missing_ranks
from primus.diagnosis.diagnose import diagnose_logs
from primus.diagnosis.finding import Diagnosis

CAUGHT = (
    "[rank{rank}]:[E1206 18:44:12.{rank:09d} ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=7753, OpType=ALLREDUCE, NumelIn=544997376, NumelOut=68124672, "
    "Timeout(ms)=600000) ran for 600061 milliseconds before timing out."
)
ENQUEUED = (
    "[rank{rank}]:[E1206 18:44:13.{rank:09d} ProcessGroupNCCL.cpp:1664] [PG {group} Rank {rank}] Exception (either an "
    "error or timeout) detected by watchdog at work: 7753, last enqueued NCCL work: {enqueued}, last completed NCCL "
    "work: 7752."
)


def diagnose(tmp_path: Path, *lines: str) -> Diagnosis:
    (tmp_path / "console.log").write_text("\n".join(lines) + "\n")
    return diagnose_logs([tmp_path / "console.log"])


def test_the_rank_whose_watchdog_is_silent_is_named(tmp_path: Path) -> None:
    ranks = [rank for rank in range(8) if rank != 5]
    found = diagnose(tmp_path, "world_size: 8", *(CAUGHT.format(rank=rank) for rank in ranks))
    assert (found.first_rank, found.cause) == (5, None)
    assert (
        found.reason
        == "collective 7753 (ALLREDUCE, 544997376 elements) timed out: rank 5 did not report it, 7 others did"
    )


def test_the_rank_that_enqueued_less_is_named(tmp_path: Path) -> None:
    enqueued = {0: 7755, 1: 7755, 2: 7753, 3: 7755}
    lines = [ENQUEUED.format(rank=rank, group="1", enqueued=number) for rank, number in enqueued.items()]
    found = diagnose(tmp_path, *(CAUGHT.format(rank=rank) for rank in enqueued), *lines)
    assert found.first_rank == 2
    assert found.reason.endswith("rank 2 had enqueued 7753, the others up to 7755")


def test_numbers_of_two_process_groups_are_not_compared(tmp_path: Path) -> None:
    lines = [ENQUEUED.format(rank=rank, group=rank % 2, enqueued=7755 + rank % 2) for rank in range(6)]
    assert diagnose(tmp_path, *lines).first_rank is None


def test_a_folder_of_rank_logs_tells_how_many_ranks_there_are(tmp_path: Path) -> None:
    for rank in range(8):
        text = CAUGHT.format(rank=rank) if rank != 3 else "waiting for the data loader"
        (tmp_path / f"rank_{rank}.log").write_text(text + "\n")
    found = diagnose_logs([tmp_path])
    assert found.first_rank == 3 and "rank 3 did not report it" in found.reason


def test_no_rank_is_blamed_where_half_of_the_ranks_are_silent() -> None:
    reports = [(rank, CAUGHT.format(rank=rank)) for rank in range(4)]
    found = find_missing_ranks(reports, [], 8)
    assert found and found.missing == () and found.reason.endswith("timed out: ranks 0, 1, 2, 3 waited in it")
    assert find_missing_ranks([], range(8), 8) is None


def test_the_rank_of_a_line_without_a_prefix_is_that_of_the_watchdog() -> None:
    reports = [(None, CAUGHT.format(rank=rank).partition(":")[2]) for rank in (0, 1, 3)]
    found = find_missing_ranks(reports, [], 4)
    assert found and found.missing == (2,)


def test_ranks_that_call_different_collectives_are_told_and_none_is_said_to_lag(tmp_path: Path) -> None:
    found = diagnose(tmp_path, CAUGHT.format(rank=0), CAUGHT.format(rank=1).replace("ALLREDUCE", "BROADCAST"))
    assert found.first_rank is None and found.reason == (
        "a collective timed out: rank 0 waited in 7753 (ALLREDUCE, 544997376 elements), rank 1 in 7753 (BROADCAST, "
        "544997376 elements): the ranks call different collectives"
    )


def test_works_of_two_process_groups_are_not_compared(tmp_path: Path) -> None:
    works = [CAUGHT.format(rank=0), CAUGHT.format(rank=1).replace("7753", "9120")]
    same = [ENQUEUED.format(rank=rank, group="1", enqueued=9125) for rank in range(2)]
    other = [ENQUEUED.format(rank=rank, group=str(rank), enqueued=9125) for rank in range(2)]
    assert diagnose(tmp_path, *works, *same).first_rank == 0
    assert diagnose(tmp_path, *works, *other).first_rank is None
