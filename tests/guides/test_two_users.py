"""Two users of one file system: what one leaves behind stops no command of the other."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes import cli
from fakes.small_disk import fill_disk, mount_small_disk
from fakes.unix_users import GROUP, UnixUser, find_shared_python, make_public_place, make_shared_folder, make_users
from primus.runs.store import Run, RunOutcome, list_runs

EXPERIMENT = """\
exp_name: night
workspace: out
modules:
  pre_trainer:
    framework: abacus
    model: tiny
    overrides: {mock_data: true, seq_length: 8, train_iters: 3, auto_continue_train: true}
"""
TASK = ("direct", "--", "train", "pretrain", "--config", "night.yaml")
RUNS = ("direct", "--", "runs")


class Site:
    """Two users and their shared folder."""

    def __init__(self, folder: Path) -> None:
        self.first, self.second = make_users(folder)
        self.shared = make_shared_folder(folder / "shared")
        (self.shared / "night.yaml").write_text(EXPERIMENT)
        self.night = make_shared_folder(make_shared_folder(self.shared / "out") / "night")

    def leave_interrupted_run(self, user: UnixUser, umask: int) -> Run:
        """A run of `user` that ended early, with a checkpoint."""
        user.run(*TASK, cwd=self.shared, umask=umask)
        run = list_runs(self.night)[-1]
        info = run.directory.stat()
        mode = (run.directory / "metadata.json").stat().st_mode
        run.update_metadata(outcome=RunOutcome(state="interrupted", exit_code=143))
        (run.directory / "metadata.json").chmod(mode)
        (run.checkpoints / "step_00000001").mkdir(parents=True)
        (run.checkpoints / "step_00000001" / "manifest.json").write_text("{}")
        for path in [run.checkpoints, *run.checkpoints.rglob("*"), run.directory / "metadata.json"]:
            os.chown(path, info.st_uid, info.st_gid)
        return run


@pytest.fixture
def site() -> Iterator[Site]:
    with make_public_place() as folder:
        yield Site(folder)


def test_an_interrupted_run_of_another_user_does_not_stop_the_same_command(site: Site) -> None:
    theirs = site.leave_interrupted_run(site.first, 0o022)
    done = site.second.run(*TASK, cwd=site.shared)
    shown = theirs.directory.relative_to(site.shared)
    assert f"{shown} ended early and is not resumed, because it belongs to nobody" in done.stderr
    (own,) = [run for run in list_runs(site.night) if run.directory != theirs.directory]
    assert own.directory.owner() == "daemon"
    assert own.read_metadata().outcome.state == "done"
    refused = site.second.run(
        "direct", "--", "train", "pretrain", "--run", str(theirs.directory), cwd=site.shared, code=1
    )
    assert f"{theirs.directory} belongs to nobody, and you may not change it" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize("umask", [0o002, 0o007])
def test_a_run_of_the_group_is_resumed_by_another_user(site: Site, umask: int) -> None:
    theirs = site.leave_interrupted_run(site.first, umask)
    site.second.run(*TASK, cwd=site.shared, umask=umask)
    assert [run.id for run in list_runs(site.night)] == [theirs.id]
    assert theirs.read_metadata().outcome.state == "done"
    assert theirs.read_metadata().attempts == 2


def test_a_private_run_is_neither_read_nor_in_the_way(site: Site) -> None:
    site.leave_interrupted_run(site.first, 0o077)
    done = site.second.run(*TASK, cwd=site.shared)
    assert "nobody" not in done.stderr
    listed = site.second.run(*RUNS, "list", cwd=site.shared, code=0)
    assert "no runs in ./output" in listed.stdout
    listed = site.second.run(*RUNS, "list", "--workspace", "out", cwd=site.shared)
    assert "no permission to read 1 more" in listed.stdout and "done" in listed.stdout


def test_cleaning_deletes_ones_own_runs_behind_those_of_another_user(site: Site) -> None:
    theirs = site.leave_interrupted_run(site.first, 0o022)
    site.second.run(*TASK, "--train_iters", "2", cwd=site.shared)
    site.second.run(*TASK, "--train_iters", "4", cwd=site.shared)
    site.night.chmod(0o3775)  # as /tmp: only the owner of an entry removes it
    done = site.second.run(*RUNS, "clean", "--workspace", "out", "--keep", "0", "--yes", cwd=site.shared, code=1)
    assert [run.id for run in list_runs(site.night)] == [theirs.id]
    assert "2 runs" in done.stdout
    assert f"{theirs.directory.relative_to(site.shared)} belongs to nobody" in done.stderr
    assert "rm -r" not in done.stderr


def test_a_list_of_unfit_nodes_is_read_and_cleared_by_every_member_of_the_group(site: Site) -> None:
    folder = str(make_shared_folder(site.shared / "unfit"))
    nodes = ("direct", "--", "nodes")
    site.first.run(*nodes, "add", "n3", "--reason", "GPU 5", cwd=site.shared, umask=0o077, PRIMUS_UNFIT_NODES=folder)
    listed = site.second.run("--json", *nodes, "list", cwd=site.shared, PRIMUS_UNFIT_NODES=folder).stdout
    (node,) = json.loads(listed)["nodes"]
    assert (node["node"], node["records"][0]["user"]) == ("n3", "nobody")
    os.chmod(folder, 0o3775)
    site.second.run(*nodes, "remove", "n3", cwd=site.shared, PRIMUS_UNFIT_NODES=folder)
    assert "no unfit nodes" in site.first.run(*nodes, "list", cwd=site.shared, PRIMUS_UNFIT_NODES=folder).stdout


def test_a_user_without_a_home_folder_trains_and_reads_the_list(site: Site) -> None:
    lost = {"HOME": "/nonexistent/home"}
    done = site.second.run(*TASK, cwd=site.shared, **lost)
    assert "Traceback" not in done.stderr
    site.second.run("direct", "--", "nodes", "list", cwd=site.shared, **lost)
    refused = site.second.run("direct", "--", "nodes", "add", "n3", "--reason", "x", cwd=site.shared, code=1, **lost)
    assert "/nonexistent/home/.local/state/primus/unfit-nodes" in refused.stderr


def test_a_full_home_folder_stops_no_training_and_no_list(site: Site) -> None:
    with mount_small_disk(site.second.home / "disk", 1) as disk:
        disk.chmod(0o777)
        fill_disk(disk)
        done = site.second.run(*TASK, cwd=site.shared, HOME=str(disk))
        assert "Traceback" not in done.stderr
        for task in ("nodes", "jobs"):
            site.second.run("direct", "--", task, "list", cwd=site.shared, HOME=str(disk))
        words = ("direct", "--", "nodes", "add", "n3", "--reason", "x")
        refused = site.second.run(*words, cwd=site.shared, code=1, HOME=str(disk))
        assert "No space left on device" in refused.stderr and "choose another folder" in refused.stderr
    (run,) = list_runs(site.night)
    assert run.read_metadata().outcome.state == "done"


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_prepared_data_of_another_user_are_used_or_their_owner_is_named(site: Site, umask: int) -> None:
    make_shared_folder(site.shared / "data")
    (site.shared / "text.jsonl").write_text('{"text": "some words of a text"}\n' * 20)
    words = ("direct", "--", "data", "prepare", "--input", "text.jsonl", "--tokenizer", "bpe:260")
    words += ("--output", "data/mine/text")
    site.first.run(*words, cwd=site.shared, umask=umask)
    if umask == 0o022:
        again = site.second.run(*words, cwd=site.shared)
        assert "data/mine/text" in again.stdout
        return
    refused = site.second.run(*words, cwd=site.shared, code=1)
    assert "data/mine belongs to nobody" in refused.stderr and "Traceback" not in refused.stderr


def test_a_folder_of_runs_that_another_user_keeps_for_themself_is_named(site: Site) -> None:
    site.night.chmod(0o755)
    refused = site.second.run(*TASK, cwd=site.shared, code=1)
    assert "cannot be created: Permission denied" in refused.stderr
    assert "out/night belongs to root: choose another --workspace, or another exp_name" in refused.stderr


def test_a_read_only_checkout_without_an_environment_names_the_way_out(site: Site) -> None:
    """Any command of a user who may not write into the checkout, and then one with an environment elsewhere."""
    checkout = site.shared / "checkout"
    (checkout / "src").mkdir(parents=True)
    for name in ("primus-cli", "pyproject.toml", "constraints.txt"):
        (checkout / name).write_bytes((cli.SOURCE.parent / name).read_bytes())
    (checkout / "primus-cli").chmod(0o755)
    for folder in (checkout, checkout / "src"):
        folder.chmod(0o555)
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(site.second.home), "PRIMUS_PYTHON": find_shared_python()}
    for words in (["setup"], ["direct", "--", "runs", "list"]):
        done = subprocess.run(
            [checkout / "primus-cli", *words],
            env=environ,
            cwd=site.shared,
            user=site.second.name,
            group=GROUP,
            extra_groups=[GROUP],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 1
        assert f"{checkout}/.venv cannot be created: its folder is not writable" in done.stderr
        assert "name another folder: PRIMUS_VENV=~/primus-venv" in done.stderr
    assert {path.name for path in checkout.iterdir()} == {"constraints.txt", "primus-cli", "pyproject.toml", "src"}


def test_the_checkout_of_another_user_is_only_read(site: Site) -> None:
    """The packages belong to root, as an installation of the site does; both users run them at the same time."""
    for user in (site.first, site.second):
        user.run(*TASK, "--auto_continue_train", "false", cwd=site.shared, umask=0o077)
    assert {run.directory.owner() for run in list_runs(site.night)} == {"nobody", "daemon"}
