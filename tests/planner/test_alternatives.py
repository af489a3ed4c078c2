"""The cuts that plans are compared with: valid always, and torchgpipe's where it has one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncpipe.planner.alternatives import block_partitions


@given(st.lists(st.integers(1, 10**6), min_size=16, max_size=60, unique=True), st.integers(1, 4))
def test_blocks_differ_by_no_more_than_the_largest_layer(cost: list[int], n: int) -> None:
    """The theorem, of costs that start at 0: all different, no block is ever empty."""
    cost = [number - min(cost) for number in cost]
    rest = iter(cost)
    blocks = [sum(next(rest) for _ in range(size)) for size in block_partitions(cost, n)]
    assert max(blocks) - min(blocks) <= max(cost) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("cost", "n", "balance"),
    [
        ([1, 2, 3, 4, 5, 6], 2, (4, 2)),  # a good one
        ([4, 4, 3, 2, 4, 4], 3, (2, 3, 1)),  # of two largest blocks the last counts
        ([0.3, 0.2, 0.1, 0.1, 0.1, 0.3, 0.2, 0.2], 5, (1, 1, 4, 1, 1)),  # borders cross on the way
        ([1, 1, 1, 1, 50, 50], 5, (2, 1, 1, 1, 1)),  # torchgpipe never comes back from this one
        ([0, 0, 1000, 7], 3, (2, 1, 1)),  # and answers 3, 0, 1 to this one
    ],
)
def test_known_cuts(cost: list[float], n: int, balance: tuple[int, ...]) -> None:
    assert block_partitions(cost, n) == balance


# Costs that are all different leave no block empty, so that torchgpipe comes to an end.
different = st.lists(st.integers(0, 10**6), min_size=1, max_size=40, unique=True)


@given(different, st.data())
def test_the_cuts_are_those_of_torchgpipe(cost: list[int], data: st.DataObject) -> None:
    torchgpipe = pytest.importorskip("torchgpipe.balance.blockpartition")
    n = data.draw(st.integers(1, max(1, len(cost) // 2)))
    theirs = tuple(map(len, torchgpipe.solve(cost, n)))
    assert block_partitions(cost, n) == theirs
