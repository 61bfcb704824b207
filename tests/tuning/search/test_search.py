"""The search finds the best settings at a third of the cost of the grid, and its answer is a patch."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml
from msgspec import structs

from primus.errors import UsageError
from primus.runs.files import write_json, write_text
from primus.runs.store import RankFailure, Run, RunMetadata, RunOutcome
from primus.tuning.search.experiment_patch import format_experiment_patch
from primus.tuning.search.grid import list_combinations, parse_keys
from primus.tuning.search.halving import list_rungs, search_best
from primus.tuning.search.search import SearchResult, format_search_result
from primus.tuning.search.study import StudyRecord, open_study
from primus.tuning.search.trial import TrialResult, measure_run

EXPERIMENT = """\
exp_name: night
modules:
  pre_trainer:
    framework: native
    overrides:                     # own settings
      # batch
      micro_batch_size: 8          # sequences
      lr: 2.0e-3
    note: end
"""


def test_words_become_combinations() -> None:
    keys = parse_keys(["micro_batch_size=1,2", "--shape=[1,2],[3]"])
    assert keys == {"micro_batch_size": ["1", "2"], "shape": ["[1,2]", "[3]"]}
    assert len(list_combinations(keys)) == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["micro_batch_size"], "not a key with values"),
        (["lr=1,,2"], "not a key with values"),
        (["lr=1", "lr=2"], "lr is given twice"),
    ],
)
def test_words_that_are_no_keys_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_keys(words)


def test_too_many_combinations_are_refused() -> None:
    with pytest.raises(UsageError, match="10,000 combinations"):
        list_combinations({key: list("0123456789") for key in "abcd"})


def measure(rng: random.Random, speeds: Mapping[str, float], settings: Mapping[str, str], steps: int) -> TrialResult:
    """A noisy measurement, more exact with more steps; settings without a speed are out of memory."""
    speed = speeds.get(settings.get("a", ""))
    if speed is None and settings:
        return TrialResult(settings=dict(settings), steps=steps, state="out of memory")
    cost = (1 / (speed or 90)) * (1 + rng.gauss(0, 0.03 / steps**0.5))
    return TrialResult(settings=dict(settings), steps=steps, cost=cost, low=cost * 0.99, high=cost * 1.01)


def test_the_best_of_30_is_found_at_a_third_of_the_cost() -> None:
    found = 0
    for seed in range(20):
        rng, spent = random.Random(seed), 0
        # A quarter is out of memory; the speeds of the others differ by 2 % and more.
        speeds = {str(i): 100 * 1.02**i for i in rng.sample(range(30), 23)}

        def measure_and_count(settings: Mapping[str, str], steps: int) -> TrialResult:
            nonlocal spent
            spent += steps
            return measure(rng, speeds, settings, steps)  # noqa: B023

        rungs = list_rungs(90, 3)
        best = search_best(
            [{}, *({"a": str(i)} for i in range(30))],
            rungs,
            lambda some, steps: [measure_and_count(each, steps) for each in some],
        )[0]
        found += speeds[best.settings["a"]] == max(speeds.values())
        assert spent <= 30 * 90 / 3
    assert found >= 18


def test_a_search_in_which_all_are_out_of_memory_ends() -> None:
    results = search_best(
        [{}, {"a": "1"}],
        [6, 20],
        lambda some, steps: [TrialResult(settings=dict(each), steps=steps, state="failed") for each in some],
    )
    assert [result.state for result in results] == ["failed"]


def test_a_study_keeps_its_trials_and_is_used_by_one_process(tmp_path: Path) -> None:
    record = StudyRecord(config="f.yaml", keys={"a": ["1", "2"]}, metric="tokens_per_s")
    with open_study(tmp_path, "night", record, "content") as study:
        study.add_result(TrialResult(settings={"a": "1"}, steps=6, state="out of memory"))
        study.add_result(TrialResult(settings={"a": "2"}, steps=6, cost=1.0))
        with (
            pytest.raises(UsageError, match="is used by process"),
            open_study(tmp_path, "night", record, "content"),
        ):
            pass
    with open_study(tmp_path, "night", record, "content") as study:
        assert study.find_result({"a": "1"}, 20) is not None, "what is out of memory stays so"
        assert study.find_result({"a": "2"}, 6) is not None
        assert study.find_result({"a": "2"}, 20) is None
    with open_study(tmp_path, "night", record, "other content") as study:
        assert study.find_result({"a": "2"}, 6) is None


def test_a_longer_trial_of_the_same_settings_leaves_the_shorter_one(tmp_path: Path) -> None:
    record = StudyRecord(config="f.yaml", keys={"a": ["1"]}, metric="tokens_per_s")
    with open_study(tmp_path, "night", record, "content") as study:
        for steps in (6, 18):
            study.add_result(TrialResult(settings={"a": "1"}, steps=steps, cost=float(steps)))
        found = [study.find_result({"a": "1"}, steps) for steps in (6, 18)]
        assert [trial.cost for trial in found if trial] == [6.0, 18.0]
        study.add_result(TrialResult(settings={"a": "2"}, steps=18, state="failed"))
        assert study.find_result({"a": "2"}, 6) is None, "it may succeed with fewer steps"


def test_the_patch_changes_settings_and_keeps_comments(tmp_path: Path) -> None:
    (tmp_path / "night.yaml").write_text(EXPERIMENT)
    patch = format_experiment_patch(
        "night.yaml", EXPERIMENT, {"micro_batch_size": "4", "recompute_activations": "true"}
    )
    subprocess.run(["patch", "-p1"], cwd=tmp_path, input=patch, text=True, check=True, capture_output=True)
    changed = (tmp_path / "night.yaml").read_text()
    assert "      micro_batch_size: 4          # sequences\n" in changed
    assert "    overrides:                     # own settings\n      recompute_activations: true\n" in changed
    assert (
        changed.replace("micro_batch_size: 4", "micro_batch_size: 8").replace("      recompute_activations: true\n", "")
        == EXPERIMENT
    )
    assert format_experiment_patch("night.yaml", "exp_name: night\n", {"lr": "1"}) == ""


def test_the_patch_puts_variables_under_env(tmp_path: Path) -> None:
    settings = {"env.OMP_NUM_THREADS": "2", "env.OMP_PROC_BIND": "close"}
    (tmp_path / "night.yaml").write_text(EXPERIMENT)
    patch = format_experiment_patch("night.yaml", EXPERIMENT, settings)
    subprocess.run(["patch", "-p1"], cwd=tmp_path, input=patch, text=True, check=True, capture_output=True)
    changed = (tmp_path / "night.yaml").read_text()
    assert yaml.safe_load(changed)["env"] == {"OMP_NUM_THREADS": 2, "OMP_PROC_BIND": "close"}
    assert changed.startswith(EXPERIMENT)
    again = format_experiment_patch("night.yaml", changed, {"env.OMP_NUM_THREADS": "4"})
    assert "-  OMP_NUM_THREADS: 2" in again and "+  OMP_NUM_THREADS: 4" in again


def test_processes_that_share_a_study_execute_each_trial_once(tmp_path: Path) -> None:
    record = StudyRecord(config="f.yaml", keys={"lr": ["1", "2"]}, metric="loss")
    with (
        open_study(tmp_path, "night", record, "content", shares_host=True) as first,
        open_study(tmp_path, "night", record, "content", shares_host=True) as second,
    ):
        with first.claim_trial({"lr": "1"}, 6) as is_ours, second.claim_trial({"lr": "1"}, 6) as is_also_ours:
            assert is_ours and not is_also_ours
            with second.claim_trial({"lr": "2"}, 6) as is_other_free:
                assert is_other_free
            first.add_result(TrialResult(settings={"lr": "1"}, steps=6, cost=1.0))
        second.add_result(TrialResult(settings={"lr": "2"}, steps=6, cost=2.0))
        for study in (first, second):
            assert study.find_result({"lr": "1"}, 6) is not None
            assert study.find_result({"lr": "2"}, 6) is not None
            assert len(study.record.trials) == 2
        damaged = next((first.folder / "trials").iterdir())
        damaged.write_text("{")
        assert len(first.record.trials) == 1


def test_a_search_on_a_machine_with_other_work_is_not_steady() -> None:
    written = TrialResult(settings={}, steps=9, value=10.0, cost=0.1, low=0.09, high=0.11)
    best = TrialResult(settings={"lr": "1"}, steps=9, value=20.0, cost=0.05, low=0.04, high=0.06, core_wait=0.4)
    result = SearchResult(
        study="s", metric="tokens_per_s", best=best, as_written=written, is_better=True, gain=1.0, steps=18,
        share_of_grid=0.5, trials=[written, best],
    )  # fmt: skip
    assert "not steady: threads waited up to 40% of the time for a core" in format_search_result(result)
    quiet = structs.replace(result, best=structs.replace(best, core_wait=0.01))
    assert "not steady" not in format_search_result(quiet)
    worse = structs.replace(result, is_better=False, trials=[structs.replace(written, settings={"env.A": "x" * 90})])
    assert "not steady" in format_search_result(worse)
    assert max(map(len, format_search_result(worse).splitlines())) < 170


def make_trial_run(
    folder: Path,
    losses: Sequence[float | None],
    failure: RankFailure | None = None,
    rates: Sequence[float] | None = None,
) -> Run:
    """A run of a step for each loss, which has failed if there is a failure."""
    run = Run(folder / "20250101_000000-0001")
    recorded: list[dict[str, object]] = [{"time": 0.0, "kind": "run_started", "step": 0, "device": "x"}]
    recorded += [
        {
            "time": float(number),
            "kind": "step",
            "step": number,
            "loss": loss,
            "tokens_per_s": rates[number - 1] if rates else 10.0,
        }
        for number, loss in enumerate(losses, 1)
    ]
    write_text(run.events, "".join(json.dumps(event) + "\n" for event in recorded))
    state, code = ("failed", 1) if failure else ("done", 0)
    outcome = RunOutcome(state=state, exit_code=code, first_failure=failure)  # type: ignore[arg-type]
    metadata = RunMetadata(id=run.id, name="t", task="train pretrain", created=0.0, outcome=outcome)
    write_json(run.directory / "metadata.json", metadata)
    return run


def test_the_loss_of_a_trial_is_the_mean_of_its_last_tenth(tmp_path: Path) -> None:
    run = make_trial_run(tmp_path, [9.0] * 28 + [1.0, 2.0, 3.0])
    assert measure_run(run, {}, 31, "loss").value == 2.0
    lost = make_trial_run(tmp_path / "b", [1.0] * 30 + [None])
    assert measure_run(lost, {}, 31, "loss").state == "failed"


@pytest.mark.parametrize(
    ("problem", "signature", "state"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "", "out of memory"),
        ("rank 0 exited", "gpu-out-of-memory", "out of memory"),
        ("HIP Out Of Memory on device 3", "", "out of memory"),
        ("rank 0 exited\nmore", "nccl-timeout", "failed"),
    ],
)
def test_a_trial_that_needs_too_much_memory_is_told_from_one_that_failed(
    problem: str, signature: str, state: str, tmp_path: Path
) -> None:
    failure = RankFailure(rank=0, host="a", time=0.0, problem=problem, exit_code=1, signature=signature)
    found = measure_run(make_trial_run(tmp_path, [], failure), {}, 9, "tokens_per_s")
    assert (found.state, found.reason) == (state, problem.splitlines()[0])


def test_the_speed_of_a_trial_is_that_of_its_steady_steps(tmp_path: Path) -> None:
    """The first step, which compiles, and the warm-up do not count; a rate is not the time of a token."""
    rates = [1.0] + [20.0, 40.0, 60.0, 80.0] + [100.0] * 15
    found = measure_run(make_trial_run(tmp_path, [1.0] * 20, rates=rates), {}, 20, "tokens_per_s")
    assert found.value == pytest.approx(100.0) and found.cost == pytest.approx(0.01)
    assert (found.low, found.high) == (pytest.approx(0.01), pytest.approx(0.01))


def test_a_trial_needs_three_steady_steps_after_the_first_one(tmp_path: Path) -> None:
    rates = [1.0] + [100.0] * 3
    assert measure_run(make_trial_run(tmp_path / "a", [1.0] * 4, rates=rates), {}, 4, "tokens_per_s").value
    with pytest.raises(UsageError, match="2 steady steps"):
        measure_run(make_trial_run(tmp_path / "b", [1.0] * 3, rates=rates), {}, 3, "tokens_per_s")
    slow_first = measure_run(make_trial_run(tmp_path / "c", [1.0] * 4, rates=[1.0, 90.0, 100.0, 110.0]), {}, 4,
                             "tokens_per_s")  # fmt: skip
    assert slow_first.value == pytest.approx(100.0)


def test_intervals_that_touch_are_no_difference() -> None:
    fast = TrialResult(settings={"a": "1"}, steps=9, cost=1.0, low=0.9, high=1.1)
    slow = TrialResult(settings={}, steps=9, cost=1.2, low=1.1, high=1.3)
    assert not fast.is_better(slow) and fast.is_better(structs.replace(slow, low=1.11))
    assert fast.is_better(structs.replace(slow, low=None)) and not structs.replace(slow, high=None).is_better(fast)


def test_what_failed_in_a_rung_takes_no_part_in_the_next_one() -> None:
    trained: list[list[str]] = []

    def measure_all(some: Sequence[Mapping[str, str]], steps: int) -> list[TrialResult]:
        trained.append([each.get("a", "as written") for each in some])
        state = {True: "done", False: "failed"}
        return [
            TrialResult(settings=dict(each), steps=steps, state=state[name in ("as written", "1")], cost=1.0)  # type: ignore[arg-type]
            for each, name in zip(some, trained[-1], strict=True)
        ]

    search_best([{}, *({"a": str(number)} for number in range(11))], [6, 18], measure_all)
    assert trained[1] == ["as written", "1"], "three would be kept"


def test_each_rung_has_three_times_the_steps_of_the_one_before() -> None:
    assert list_rungs(270, 4) == [10, 30, 90, 270]
    assert list_rungs(90, 3) == [10, 30, 90] and list_rungs(20, 3) == [6, 6, 20] and list_rungs(4, 2) == [4, 4]
