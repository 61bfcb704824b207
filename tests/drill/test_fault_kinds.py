"""Where a fault may be planted, and why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.small_disk import mount_small_disk
from primus.drill import fault_kinds
from primus.drill.fault_kinds import (
    KINDS,
    FaultPermissions,
    choose_stopped_factor,
    find_layout_obstacle,
    find_node_obstacle,
    find_slow_time_s,
    find_target_node,
)
from primus.launch.supervision.straggler_detection import STRAGGLER_WINDOWS, WINDOW_S
from primus.machine.cluster import ClusterLayout

ONE, TWO = ClusterLayout(nproc=1), ClusterLayout(nproc=1, nnodes=2)
NOTHING = FaultPermissions()


@pytest.mark.parametrize(
    ("name", "layout", "allowed", "reason"),
    [
        ("slow-rank", ONE, NOTHING, "no other rank"),
        ("fill-disk", TWO, NOTHING, "--fill FOLDER"),
        ("drop-network", ONE, FaultPermissions(interface="eth0"), "one node has no network"),
        ("drop-network", TWO, NOTHING, "--network-interface NAME"),
        ("kill-rank", ONE, NOTHING, ""),
        ("slow-rank", TWO, NOTHING, ""),
    ],
)
def test_a_layout_says_which_faults_it_allows(
    name: str, layout: ClusterLayout, allowed: FaultPermissions, reason: str
) -> None:
    found = find_layout_obstacle(KINDS[name], layout, allowed)
    assert (reason in found) if reason else found == ""


def test_the_disk_of_the_machine_is_never_filled(tmp_path: Path) -> None:
    for folder in ("/", str(tmp_path), str(Path.home())):
        reason = find_node_obstacle(KINDS["fill-disk"], FaultPermissions(fill=folder), ())
        assert "is on the file system of" in reason, folder
    assert "not a folder" in find_node_obstacle(KINDS["fill-disk"], FaultPermissions(fill="/nowhere"), ())


def test_a_small_disk_of_its_own_may_be_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mount_small_disk(tmp_path / "small", 2) as folder:
        allowed = FaultPermissions(fill=str(folder))
        assert find_node_obstacle(KINDS["fill-disk"], allowed, (tmp_path,)) == ""
        assert "file system of" in find_node_obstacle(KINDS["fill-disk"], allowed, (folder,))
        monkeypatch.setattr(fault_kinds, "MOST_FILLED_BYTES", 1 << 20)
        assert "fills at most" in find_node_obstacle(KINDS["fill-disk"], allowed, (tmp_path,))


@pytest.mark.parametrize(
    ("interface", "reason"), [("lo", "loopback"), ("nothere0", "no interface"), ("../lo", "no interface")]
)
def test_an_interface_must_exist_and_not_be_the_loopback(interface: str, reason: str) -> None:
    assert reason in find_node_obstacle(KINDS["drop-network"], FaultPermissions(interface=interface), ())


def test_faults_of_node_0_and_of_the_last_node() -> None:
    four = ClusterLayout(nproc=2, nnodes=4)
    targets = {name: find_target_node(kind, four) for name, kind in KINDS.items()}
    assert targets == {
        "kill-rank": 3, "hang": 0, "kill-node": 3, "fill-disk": 0, "slow-rank": 3, "drop-network": 3,
    }  # fmt: skip


@pytest.mark.parametrize("step_s", [0.0, 0.01, 0.3, 2.7, 20.0, 120.0])
def test_a_rank_is_slow_for_as_many_slowed_steps_as_the_detection_needs(step_s: float) -> None:
    slowed_step_s = step_s * (1 + choose_stopped_factor(step_s))
    assert slowed_step_s >= 3 * step_s
    assert find_slow_time_s(step_s) >= max(WINDOW_S, slowed_step_s) * (STRAGGLER_WINDOWS + 1)
    assert slowed_step_s <= max(3 * step_s, 6 * WINDOW_S)
