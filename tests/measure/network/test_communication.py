"""Real processes measure over gloo what they exchange; wrong, slow, dead and stopped ones are found."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from fakes.tools import is_gone
from measure import several
from primus.errors import EXIT_TIMED_OUT
from primus.machine import measurements
from primus.machine.measurements import Collective, MeasurementResults, Pair, RankMeasurements
from primus.measure.network import collectives
from primus.preflight.performance import fault_localization
from primus.preflight.performance import judge as performance
from primus.runs.files import read_json
from primus.runs.store import RankFailure

SEVERAL = Path(several.__file__)
SOURCE = Path(__file__).parents[3] / "src"
CULPRIT = 1

pytestmark = pytest.mark.native


@contextlib.contextmanager
def started(folder: Path, scenario: str, local_sizes: str) -> Iterator[subprocess.Popen[str]]:
    """The processes of a scenario; none is left behind, whatever happens."""
    folder.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    words = [sys.executable, str(SEVERAL), str(folder), scenario, local_sizes]
    with subprocess.Popen(words, env=env, text=True, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            for one in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            process.kill()


def codes(process: subprocess.Popen[str]) -> list[int]:
    """Exit codes of the ranks, once all have ended."""
    found: list[int] = json.loads(process.communicate(timeout=70)[0])
    return found


Answers = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[2, 5])
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What each of several ranks found in scenario `alone`."""
    folder = tmp_path_factory.mktemp(f"alone_{request.param}")
    with started(folder, "alone", str(request.param)) as process:
        ended = codes(process)
    logs = "\n".join(path.read_text() for path in folder.glob("*.out"))
    assert ended == [0] * request.param, logs
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(request.param)]


def of(answers: Answers, key: str) -> list[Collective]:
    return msgspec.convert(answers[0][key], list[Collective])


def test_all_ranks_agree_on_every_figure(answers: Answers) -> None:
    assert all(answer == answers[0] for answer in answers)


def test_every_operation_is_right_again_and_again(answers: Answers) -> None:
    # AMD-AGI/Primus reduces the buffer that it checks again and again, and always warns.
    found = of(answers, "right")
    assert {one.operation for one in found} == set(collectives.OPERATIONS)
    assert [one for one in found if one.wrong or one.problem] == []


def test_figures_follow_the_conventions_of_nccl_tests(answers: Answers) -> None:
    n = len(answers)
    factors = {
        "all_reduce": 2 * (n - 1) / n,
        "all_gather": (n - 1) / n,
        "reduce_scatter": (n - 1) / n,
        "all_to_all": (n - 1) / n,
        "broadcast": 1.0,
        "send_recv": 1.0,
    }
    for one in of(answers, "right"):
        assert one.time_s == max(one.rank_times_s) and len(one.rank_times_s) == n
        assert one.algbw_gb_per_s == pytest.approx(one.size_bytes / one.time_s / 1e9)
        assert one.busbw_gb_per_s == pytest.approx(one.algbw_gb_per_s * factors[one.operation])
        assert one.size_bytes % (4 * n) == 0


def test_a_rank_that_sends_garbage_is_the_source_of_it(answers: Answers) -> None:
    for one in of(answers, "sent"):
        sources = {entry.source for entry in one.wrong}
        if one.operation in ("all_reduce", "reduce_scatter"):
            assert sources == {None}
        elif one.operation == "broadcast":  # the culprit is not the root, and receives the root's data
            assert sources == set()
        else:
            assert sources == {CULPRIT}, one.operation


def test_a_rank_that_spoils_what_it_received_is_the_only_one_with_errors(answers: Answers) -> None:
    for one in of(answers, "received"):
        assert {entry.rank for entry in one.wrong} == {CULPRIT}, one.operation
        assert sum(entry.count for entry in one.wrong) == 1


def test_a_sum_that_is_reduced_twice_is_wrong_everywhere(answers: Answers) -> None:
    wrong = msgspec.convert(answers[0]["twice"], Collective).wrong
    assert [entry.rank for entry in wrong] == list(range(len(answers)))
    assert {entry.count for entry in wrong} == {collectives.round_bytes(1000, len(answers)) // 4}


def test_what_the_backend_lacks_is_said_and_never_faked(answers: Answers) -> None:
    found = msgspec.convert(answers[0]["unknown"], Collective)
    assert found.problem.startswith("not offered by gloo")
    assert found.busbw_gb_per_s is None


def results_of(answers: Answers, key: str) -> dict[fault_localization.PairResult, Pair]:
    found = msgspec.convert(answers[0][key], list[Pair])
    return {
        fault_localization.PairResult(one.first, one.second, None if one.wrong else one.gb_per_s): one for one in found
    }


def test_the_pair_scan_meets_each_two_once_and_right(answers: Answers) -> None:
    n = len(answers)
    found = results_of(answers, "pairs")
    assert len(found) == n * (n - 1) // 2
    assert all(one.wrong == 0 and one.gb_per_s for one in found.values())


@pytest.mark.parametrize("key", ["slow_pairs", "corrupt_pairs"])
def test_the_pair_scan_names_the_rank_that_sleeps_or_corrupts(answers: Answers, key: str) -> None:
    found = results_of(answers, key)
    # Five ranks on two busy cores differ tenfold by themselves: only half of the sleep tells slow from unlucky.
    bad = fault_localization.find_bad_pairs(found, floor=several.PAIR_BYTES / (several.SLEEP_S / 2) / 1e9, below=1.0)
    if len(answers) > 2:
        assert fault_localization.find_culprits(found, bad) == [CULPRIT]
    else:  # of one pair nobody can say which of the two it is
        assert fault_localization.find_culprits(found, bad) == [0, 1]


def test_the_suite_measures_nodes_of_different_sizes(tmp_path: Path) -> None:
    with started(tmp_path, "whole", "2,1") as process:
        assert codes(process) == [0, 0, 0]
    found = read_json(tmp_path / measurements.FILE, MeasurementResults)
    assert (found.world_size, found.backend, found.problem) == (3, "gloo", "")
    assert [(rank.rank, rank.local_rank, rank.node) for rank in found.ranks] == [(0, 0, 0), (1, 1, 0), (2, 0, 1)]
    tests = ["sanity", "gemm_fp32", *(f"memory_{name}" for name in ("copy", "mul", "add", "triad", "dot"))]
    for rank in found.ranks:
        assert [figure.test for figure in rank.figures] == tests
        assert [figure.problem for figure in rank.figures if figure.problem] == []
    assert {(one.scope, one.ranks) for one in found.collectives} == {
        ("node", (0, 1)),
        ("node", (2,)),
        ("all", (0, 1, 2)),
    }
    assert [(pair.first, pair.second, pair.between_nodes) for pair in found.pairs] == [(0, 1, False), (0, 2, True)]
    assert all(one.problem.startswith("single rank") for one in found.collectives if one.ranks == (2,))


def wait_for_results(folder: Path, rank: int) -> None:
    """Wait until the leader of the ranks has measured something, and all are in the middle."""
    until = time.monotonic() + 40
    while time.monotonic() < until:
        with contextlib.suppress(Exception):
            if read_json(folder / measurements.find_measurements_file(rank), RankMeasurements).collectives:
                return
        time.sleep(0.05)
    raise AssertionError("the suite did not begin")


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_hangs_ends_the_others_within_the_limit(tmp_path: Path, fate: signal.Signals) -> None:
    with started(tmp_path, "long", "3") as process:
        wait_for_results(tmp_path, 0)
        pids = json.loads((tmp_path / "pids.json").read_text())
        os.kill(pids[2], fate)
        begun = time.monotonic()
        while not all(map(is_gone, pids[:2])):
            assert time.monotonic() - begun < 15, "the survivors hang"
        if fate == signal.SIGSTOP:
            os.kill(pids[2], signal.SIGKILL)
        ended = codes(process)
    assert ended[2] == -signal.SIGKILL
    failures = [read_json(tmp_path / f"logs/attempt_0/rank_{rank}.error.json", RankFailure) for rank in (0, 1)]
    assert "among 3 ranks" in failures[0].problem
    assert all(failure.exit_code == code for failure, code in zip(failures, ended, strict=False))
    if fate == signal.SIGSTOP:
        assert EXIT_TIMED_OUT in ended
    asked = measurements.MeasurementPlan(sizes_bytes=(8,), pair_bytes=8, gemm_size=8)
    found = performance.read_results(tmp_path, asked, world_size=3)
    assert found.problem and found.collectives
    assert all(map(is_gone, pids))
