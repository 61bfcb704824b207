"""The list of unfit nodes: what makes a node unfit, what clears it, and who reads and writes it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

from primus.errors import PrimusError, UsageError
from primus.runs import unfit_nodes
from primus.runs.unfit_nodes import DAY_S, EXPIRY_DAYS, NodeRecord, add_record, read_unfit_nodes

NOW = 1_800_000_000.0


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(tmp_path)}


def failure(node: str, run: str, attempt: int = 0) -> NodeRecord:
    return NodeRecord(
        node=node, kind="failure", reason="a GPU fell off the bus", time=0, run=run, attempt=attempt, signature="lost"
    )


def unfit(node: str) -> NodeRecord:
    return NodeRecord(node=node, kind="unfit", reason="GPU 5", time=0)


def names(environ: dict[str, str], now: float = NOW) -> list[str]:
    return [each.node for each in read_unfit_nodes(environ, now).unfit]


def test_a_second_failure_makes_a_node_unfit_and_a_second_record_of_one_attempt_does_not(
    environ: dict[str, str],
) -> None:
    add_record(environ, failure("n2", "/runs/a"), now=NOW)
    add_record(environ, failure("n2", "/runs/a"), now=NOW)
    assert names(environ) == []
    (suspect,) = read_unfit_nodes(environ, NOW).nodes
    assert (suspect.node, suspect.is_unfit) == ("n2", False)
    add_record(environ, failure("n3", "/runs/b"), now=NOW)
    assert names(environ) == []
    add_record(environ, failure("n2", "/runs/b"), now=NOW)
    assert names(environ) == ["n2"]
    found = read_unfit_nodes(environ, NOW).find("n2.cluster.example")
    assert found is not None
    assert found.reason == "2 failures on it (lost)"


def test_failures_of_attempts_of_one_run_count(environ: dict[str, str]) -> None:
    add_record(environ, failure("n2", "/runs/a", 0), now=NOW)
    add_record(environ, failure("n2", "/runs/a", 1), now=NOW)
    assert names(environ) == ["n2"]


def test_an_entry_expires_and_the_list_says_so(environ: dict[str, str]) -> None:
    add_record(environ, unfit("n2"), now=NOW)
    limit = NOW + EXPIRY_DAYS * DAY_S
    assert names(environ, limit - 1) == ["n2"]
    assert names(environ, limit) == []
    (note,) = read_unfit_nodes(environ, limit).notes
    assert note.startswith("the entry of n2 expired on ")
    add_record(environ, unfit("n3"), days=None, now=NOW)
    assert names(environ, NOW + 1000 * DAY_S) == ["n3"]


def test_two_failures_make_a_node_unfit_until_the_older_one_expires(environ: dict[str, str]) -> None:
    add_record(environ, failure("n2", "/runs/a"), now=NOW)
    add_record(environ, failure("n2", "/runs/b"), now=NOW + DAY_S)
    (node,) = read_unfit_nodes(environ, NOW + DAY_S).unfit
    assert node.expires == NOW + EXPIRY_DAYS * DAY_S
    assert names(environ, node.expires) == []


def test_a_node_that_is_cleared_counts_from_then_on(environ: dict[str, str]) -> None:
    add_record(environ, failure("n2", "/runs/a"), now=NOW)
    add_record(environ, failure("n2", "/runs/b"), now=NOW)
    fit = NodeRecord(node="n2", kind="fit", reason="new GPU", time=0)
    add_record(environ, fit, days=None, now=NOW + 1)
    assert names(environ) == []
    add_record(environ, failure("n2", "/runs/c"), now=NOW + 2)
    assert names(environ) == []
    add_record(environ, failure("n2", "/runs/d"), now=NOW + 3)
    assert names(environ) == ["n2"]


def test_a_list_of_a_newer_version_is_read_as_far_as_it_is_known(environ: dict[str, str], tmp_path: Path) -> None:
    record = add_record(environ, unfit("n2"), now=NOW)
    folder = tmp_path / "primus/unfit-nodes"
    values = structs.asdict(record)
    (folder / "n4.1.json").write_text(json.dumps(values | {"version": 2, "node": "n4", "color": "red"}))
    (folder / "n5.1.json").write_text(json.dumps(values | {"version": 2, "node": "n5", "kind": "limping"}))
    (folder / "n6.1.json").write_text('{"node": "n6"')
    listed = read_unfit_nodes(environ, NOW)
    assert [each.node for each in listed.unfit] == ["n2", "n4"]
    text = "\n".join(listed.notes)
    assert "n5.1.json is of a newer primus" in text
    assert "n6.1.json is damaged" in text
    assert "1 records of unfit nodes are of a newer primus: used as far as this one knows them" in text


def test_records_that_have_been_without_effect_for_long_are_removed(environ: dict[str, str], tmp_path: Path) -> None:
    add_record(environ, unfit("n2"), now=NOW)
    add_record(environ, unfit("n3"), days=None, now=NOW)
    add_record(environ, unfit("n4"), now=NOW + 2 * unfit_nodes.KEPT_DAYS * DAY_S)
    left = sorted(path.name.partition(".")[0] for path in (tmp_path / "primus/unfit-nodes").iterdir())
    assert left == ["n3", "n4"]


WRITER = """
import sys
from primus.runs.unfit_nodes import NodeRecord, add_record
environ = {"PRIMUS_UNFIT_NODES": sys.argv[1]}
for number in range(40):
    add_record(environ, NodeRecord(node=f"n{number}", kind="failure", reason="x", time=0, run=sys.argv[2], attempt=0))
"""


def test_writers_at_the_same_time_lose_no_record(tmp_path: Path) -> None:
    folder = str(tmp_path / "site")
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, folder, f"/runs/{number}"]) for number in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    listed = read_unfit_nodes({"PRIMUS_UNFIT_NODES": folder})
    assert len(listed.records) == 120
    assert len(listed.unfit) == 40
    assert not list(Path(folder).glob(".*"))


@pytest.mark.parametrize(("folder_mode", "file_mode"), [(0o775, 0o664), (0o755, 0o644), (0o700, 0o600)])
def test_who_may_read_the_folder_may_read_its_records(tmp_path: Path, folder_mode: int, file_mode: int) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    folder.chmod(folder_mode)
    before = os.umask(0o077)
    try:
        add_record({"PRIMUS_UNFIT_NODES": str(folder)}, unfit("n2"))
    finally:
        os.umask(before)
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == file_mode


def test_a_folder_that_is_missing_or_not_wanted_gives_an_empty_list(tmp_path: Path) -> None:
    assert read_unfit_nodes({"XDG_STATE_HOME": str(tmp_path)}).notes == ()
    (note,) = read_unfit_nodes({"PRIMUS_UNFIT_NODES": str(tmp_path / "none")}).notes
    assert "does not exist yet" in note
    assert read_unfit_nodes({"PRIMUS_UNFIT_NODES": ""}) == unfit_nodes.NO_NODES
    with pytest.raises(UsageError, match="there is no list"):
        add_record({"PRIMUS_UNFIT_NODES": ""}, unfit("n2"))


def test_a_folder_that_is_a_file_is_reported_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("n3\n")
    environ = {"PRIMUS_UNFIT_NODES": str(tmp_path / "list")}
    assert any("cannot be read" in note for note in read_unfit_nodes(environ).notes)
    with pytest.raises(PrimusError, match="cannot be written"):
        add_record(environ, unfit("n2"))


@pytest.mark.parametrize("name", ["", "../n3", "n 3", "-n3", "n3\n"])
def test_a_name_that_no_node_has_is_refused(environ: dict[str, str], name: str) -> None:
    with pytest.raises(UsageError, match="not the name of a node"):
        add_record(environ, unfit(name))


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("n3", "N3", True),
        ("n3", "n3.cluster.example", True),
        ("n3.a", "n3.b", False),
        ("10.0.0.1", "10.0.0.2", False),
        ("10.0.0.1", "10.0.0.1", True),
        ("n3", "n30", False),
    ],
)
def test_names_with_and_without_a_domain_mean_one_node(one: str, other: str, is_same: bool) -> None:
    assert unfit_nodes.is_same_node(one, other) is is_same
