"""Tasks that move between pools: each is in one, and is found there."""

import sys

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.curriculum.pools import Pools


@given(st.integers(1, 30), st.integers(2, 7), st.data())
def test_every_task_is_found_in_the_pool_that_it_was_put_into(
    size: int, count: int, data: st.DataObject
) -> None:
    """And nowhere else, whatever was moved in which order."""
    pools, where = Pools(size, count), dict.fromkeys(range(size), 0)
    moves = st.tuples(st.integers(0, size - 1), st.integers(0, count - 1))
    for task, pool in data.draw(st.lists(moves, max_size=60)):
        pools.move(task, pool)
        where[task] = pool
    members = [{task for task, its in where.items() if its == pool} for pool in range(count)]
    assert pools.counts == [len(own) for own in members]
    assert [pools.of(task) for task in range(size)] == list(where.values())
    for pool, own in enumerate(members):
        found = {pools.at(pool, (place + 0.5) / len(own)) for place in range(len(own))}
        assert found == own


def test_moving_takes_no_memory() -> None:
    """After every task has been in every pool it is as small as at first."""
    size, count = 10_000, 6
    pools = Pools(size, count)
    at_first = pools.nbytes
    for pool in (*range(1, count), 2, 0):
        for task in range(size):
            pools.move(task, pool)
    assert pools.nbytes == at_first <= 10 * size + 4 * sys.getsizeof(0) * count
