"""Words of the command line that change an experiment."""

from __future__ import annotations

from primus.config.overrides import parse_overrides
from primus.config.source import Leaf


def test_a_window_of_steps_is_the_value_of_profile() -> None:
    tree = parse_overrides(["--profile", "steps=5:8", "--profile-memory", "--profile-ranks", "0,8", "lr=1"])
    assert {name: leaf.value for name, leaf in tree.items() if isinstance(leaf, Leaf)} == {
        "profile": "steps=5:8",
        "profile_memory": True,
        "profile_ranks": "0,8",
        "lr": 1,
    }
