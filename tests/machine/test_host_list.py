"""Host lists as Slurm writes them."""

from __future__ import annotations

import pytest

from primus.errors import UsageError
from primus.machine.host_list import expand_hosts


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("a", ["a"]), ("a,b", ["a", "b"]), ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[1,3-4]-x", ["n1-x", "n3-x", "n4-x"]),
        ("r[1-2]n[1-2],z", ["r1n1", "r1n2", "r2n1", "r2n2", "z"]), ("", []),
    ],
)  # fmt: skip
def test_node_lists_are_expanded_as_slurm_does(nodes: str, expected: list[str]) -> None:
    assert expand_hosts(nodes) == expected


@pytest.mark.parametrize("nodes", ["n[1-", "n[a-b]", "n]1[", "a b", "n[1,,2]"])
def test_what_is_no_list_of_nodes_is_refused(nodes: str) -> None:
    with pytest.raises(UsageError):
        expand_hosts(nodes)
