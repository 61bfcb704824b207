"""Jobs of Slurm avoid unfit nodes; with programs that stand for Slurm's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakes import cli
from fakes.slurm import FakeSlurm
from primus.launch.nodes.avoided_nodes import spare_needed_nodes
from primus.runs.unfit_nodes import NodeRecord, add_record

TASK = ("--", "train", "pretrain", "--config", "night.yaml")
EXPERIMENT = """\
workspace: out
modules: {pre_trainer: {framework: abacus, model: tiny, overrides: {mock_data: true, seq_length: 8, train_iters: 2}}}
"""
NODES = 'for node in n1 n2 n3 n4; do echo "$node|idle"; done'


class Submitter:
    """Somebody with a Slurm of four nodes and a list of unfit ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "night.yaml").write_text(EXPERIMENT)
        self.slurm = FakeSlurm(folder / "bin")
        self.slurm.answers(sbatch="echo 41", squeue="echo '41|RUNNING|None|n[1-2]'", sinfo=NODES)
        self.environ = self.slurm.environ | {"PRIMUS_UNFIT_NODES": str(folder / "site")}

    def add(self, *names: str) -> None:
        for number, name in enumerate(names):
            add_record(self.environ, NodeRecord(node=name, kind="unfit", reason="GPU 5", time=0), now=1e10 + number)

    def primus(self, *words: str, code: int = 0, **env: str) -> str:
        done = cli.run(*words, cwd=self.folder, **(self.environ | env))
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    @property
    def event(self) -> dict[str, dict[str, str]]:
        """The event of the newest run."""
        lines = (max((self.folder / "out/night").glob("2*")) / "events.jsonl").read_text().splitlines()
        return next(event for event in map(json.loads, lines) if event["kind"] == "unfit_nodes")


@pytest.fixture
def user(tmp_path: Path) -> Submitter:
    return Submitter(tmp_path)


def test_a_dry_run_shows_the_nodes_that_a_job_would_avoid_and_asks_nobody(user: Submitter) -> None:
    user.add("n2")
    shown = user.primus("--dry-run", "slurm", "sbatch", "-N", "2", *TASK)
    assert "sbatch --parsable --exclude=n2 " in shown
    assert "unfit nodes, avoided:\n  n2: GPU 5 (since" in shown
    values = json.loads(user.primus("--json", "--dry-run", "slurm", "srun", "-N", "2", *TASK))
    assert "--exclude=n2" in values["argv"] and list(values["avoided"]) == ["n2"]
    assert user.slurm.calls("sinfo") == []


def test_a_job_excludes_the_unfit_nodes_that_the_cluster_has_and_those_of_the_user(user: Submitter) -> None:
    user.add("n2.cluster", "n77")
    said = user.primus("slurm", "sbatch", "-N", "1", "--exclude", "n[3-4]", *TASK)
    (option,) = [word for word in user.slurm.argv("sbatch") if word.startswith("--exclude")]
    assert option == "--exclude=n[3-4],n2"
    assert "avoids n2, which is unfit: GPU 5" in said and "n77" not in said
    assert list(user.event["avoided"]) == ["n2"]
    assert "avoided nodes: n2: GPU 5" in user.primus("direct", "--", "runs", "show", "night", "--workspace", "out")


def test_a_list_that_leaves_too_few_nodes_gives_back_those_of_the_oldest_evidence(user: Submitter) -> None:
    user.add("n1", "n2", "n3", "n4")
    said = user.primus("slurm", "sbatch", "-N", "3", *TASK)
    assert "--exclude=n4" in user.slurm.argv("sbatch")
    assert "warning: n1 may be used although it is unfit: GPU 5" in said
    assert "the job needs 3 of 4 nodes" in said
    assert set(user.event["used"]) == {"n1", "n2", "n3"}
    said = user.primus("slurm", "sbatch", "-N", "4", *TASK)
    assert not [word for word in user.slurm.argv("sbatch") if word.startswith("--exclude")]


def test_a_job_that_no_cluster_could_start_is_not_the_fault_of_the_list(user: Submitter) -> None:
    user.add("n1")
    user.primus("slurm", "sbatch", "-N", "9", *TASK)
    assert "--exclude=n1" in user.slurm.argv("sbatch")


def test_nodes_that_are_down_are_not_counted_as_left(user: Submitter) -> None:
    user.slurm.answers(sinfo="echo 'n1|idle'; echo 'n2|idle'; echo 'n3|down*'; echo 'n4|drained'")
    user.add("n2")
    said = user.primus("slurm", "sbatch", "-N", "2", *TASK)
    assert "warning: n2 may be used although it is unfit" in said


def test_a_node_that_is_asked_for_by_name_is_used_and_that_is_said(user: Submitter) -> None:
    user.add("n2", "n3")
    said = user.primus("slurm", "sbatch", "-w", "n[1-2]", "-N", "2", *TASK)
    assert "--exclude=n3" in user.slurm.argv("sbatch")
    assert "warning: n2 is asked for by name and unfit: GPU 5" in said


def test_a_step_inside_an_allocation_avoids_only_nodes_that_have_a_spare_one(user: Submitter) -> None:
    user.add("n2", "n9")
    inside = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]"}
    words = ("--dry-run", "slurm", "srun")
    assert "--exclude=n2 " in user.primus(*words, "-N", "2", *TASK, **inside)
    shown = user.primus(*words, "-N", "3", *TASK, **inside)
    assert "--exclude" not in shown
    assert "warning: n2 may be used although it is unfit: GPU 5" in shown
    assert "--exclude" not in user.primus(*words, *TASK, **inside), "a step takes all nodes of its allocation"


def test_the_folder_of_the_option_reaches_the_nodes(user: Submitter) -> None:
    user.add("n2")
    other = user.folder / "other"
    done = user.primus("slurm", "sbatch", f"--unfit-nodes={other}", "-N", "2", *TASK)
    assert "does not exist yet" in done
    assert user.slurm.env("sbatch")["PRIMUS_UNFIT_NODES"] == str(other)
    assert not [word for word in user.slurm.argv("sbatch") if word.startswith("--exclude")]


def test_a_file_of_excluded_nodes_is_left_to_slurm(user: Submitter) -> None:
    user.add("n2")
    said = user.primus("slurm", "sbatch", "--exclude=./bad", "-N", "2", *TASK)
    assert "the list of unfit nodes is not applied: --exclude=./bad is a file" in said


def test_no_more_nodes_are_given_back_than_a_job_needs() -> None:
    avoided = {"n3": "new", "n2": "older", "n1": "oldest"}
    for needed in range(1, 8):
        chosen = spare_needed_nodes(avoided, 6, needed)
        assert len(chosen.avoided) == (3 if needed > 6 else min(3, 6 - needed))
        assert chosen.avoided.keys() | chosen.used.keys() == avoided.keys()
    assert list(spare_needed_nodes(avoided, 6, 5).avoided) == ["n3"]
