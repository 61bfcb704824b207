from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from primus.data.filter.dedup.clusters import connect_documents
from primus.data.filter.dedup.key_files import Keys
from primus.data.filter.dedup.matches import choose_num_ranges, divide_key_space, match_keys


def plain_clusters(count: int, pairs: list[tuple[int, int]]) -> list[int]:
    """Least number of each connected component, by painting until nothing changes."""
    color = list(range(count))
    changed = True
    while changed:
        changed = False
        for one, other in pairs:
            least = min(color[one], color[other])
            changed |= (color[one], color[other]) != (least, least)
            color[one] = color[other] = least
    return color


edges = st.integers(1, 40).flatmap(
    lambda count: st.tuples(
        st.just(count), st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=60)
    )
)


@given(edges, st.integers(1, 7))
def test_clusters_are_connected_components_named_by_their_first_document(
    graph: tuple[int, list[tuple[int, int]]], size: int
) -> None:
    count, pairs = graph
    arrays = [np.array(pairs[at : at + size], np.int64).reshape(-1, 2) for at in range(0, len(pairs), size)]
    assert connect_documents(count, arrays).tolist() == plain_clusters(count, pairs)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1)), max_size=60),
    st.integers(1, 9),
    st.integers(1, 12),
    st.booleans(),
)
def test_matches_connect_just_the_documents_of_equal_key_however_few_fit_into_memory(
    keys: list[tuple[int, int]], group: int, most_held: int, exact: bool
) -> None:
    found = []
    for at in range(0, len(keys), group):
        some = np.array(keys[at : at + group], np.uint64).reshape(-1, 2)
        numbers = np.arange(at, at + len(some), dtype=np.int64)
        found.append(Keys(some[:, 0], numbers, some[:, 1] if exact else None))
    pairs = list(match_keys(found, most_held))
    names = [key if exact else key[0] for key in keys]
    assert connect_documents(len(keys), pairs).tolist() == [names.index(name) for name in names]
    assert all((some[:, 0] < some[:, 1]).all() for some in pairs)
    assert sum(map(len, pairs)) == len(names) - len(set(names))


def test_ranges_of_keys_meet_and_cover_all() -> None:
    ranges = divide_key_space(choose_num_ranges(50, most_held=7))
    assert len(ranges) == 8
    assert ranges[0][0] == 0 and ranges[-1][1] == (1 << 64) - 1
    assert all(one[1] + 1 == other[0] for one, other in pairwise(ranges))
