"""The batch buffer against brute force: emission, minimums, choice and what remains."""

import itertools
import random
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.buffer import BatchBuffer
from orchestrator.buffer.quotas import Quotas
from orchestrator.buffer.subset_sum import completable, reachable, sumset
from tests.support.buffer_oracle import Queued, expected_batch, expected_by_quota, in_order

ENVS = ("math", "code", "logic")
SIZES = ((1, 2, 4, 8, 16), (7, 8), tuple(range(1, 17)), (3,), (4, 6), (2, 5, 9), (1,))
SHARES = (0.0, 0.1, 0.25, 0.29, 0.4, 0.5, 0.9)

Order = Literal["arrival", "version"]
Group = tuple[str, int, int]

thorough = settings(max_examples=600, deadline=None, derandomize=True, database=None)


@st.composite
def queues(draw: st.DrawFn, most: int = 9) -> tuple[int, list[Group]]:
    """A batch size, and groups (env, size, version) of a size family that fits it."""
    batch_size = draw(st.integers(1, 40))
    sizes = [size for size in draw(st.sampled_from(SIZES)) if size <= batch_size] or [batch_size]
    group = st.tuples(st.sampled_from(ENVS), st.sampled_from(sizes), st.integers(0, 3))
    return batch_size, draw(st.lists(group, min_size=1, max_size=most))


def drain_and_compare(
    buffer: BatchBuffer[int], queue: list[Queued], minimums: dict[str, int], order: Order
) -> int:
    """Take until there is no batch, comparing every batch and every remainder; how many there were."""
    for taken in itertools.count():
        queue = in_order(queue, order)
        expected = expected_batch(queue, buffer.batch_size, minimums)
        assert buffer.can_take() == (expected is not None)
        assert ("can be taken" in buffer.explain()) == (expected is not None)
        batch = buffer.take()
        if expected is None:
            assert batch is None
            return taken
        assert batch == [group.id for group in expected]
        queue = [group for group in queue if group not in expected]
        assert len(buffer) == len(queue)
        assert buffer.sequences == sum(group.size for group in queue)
    raise AssertionError("unreachable")


def fill(buffer: BatchBuffer[int], groups: list[Group]) -> list[Queued]:
    queue = [Queued(at, env, size, version) for at, (env, size, version) in enumerate(groups)]
    for group in queue:
        buffer.add(group.id, env=group.env, size=group.size, version=group.version)
    return queue


@thorough
@given(
    queues(),
    st.dictionaries(st.sampled_from(ENVS), st.sampled_from(SHARES)),
    st.sampled_from(["arrival", "version"]),
)
def test_every_batch_is_the_one_that_brute_force_finds(
    drawn: tuple[int, list[Group]], shares: dict[str, float], order: Order
) -> None:
    """Batches, their order and the remainder are those of an enumeration of all subsets."""
    batch_size, groups = drawn
    buffer: BatchBuffer[int] = BatchBuffer(batch_size, minimums=shares, order=order)
    queue = fill(buffer, groups)
    drain_and_compare(buffer, queue, buffer.minimums, order)


@thorough
@given(queues(), st.sets(st.sampled_from(ENVS)), st.integers(0, 3))
def test_waived_minimums_and_evictions_leave_the_choice_exact(
    drawn: tuple[int, list[Group]], unavailable: set[str], oldest: int
) -> None:
    """After envs became unavailable and old versions left, batches are still those of brute force."""
    batch_size, groups = drawn
    buffer: BatchBuffer[int] = BatchBuffer(batch_size, minimums={"math": 0.5, "code": 0.25})
    minimums = {env: count for env, count in buffer.minimums.items() if env not in unavailable}
    queue = fill(buffer, groups)
    buffer.can_take()  # a choice that must not outlive the changes below
    for env in unavailable:
        buffer.set_available(env, False)
    gone = buffer.evict_older_than(oldest)
    assert gone == [group.id for group in queue if group.version < oldest]
    drain_and_compare(buffer, [group for group in queue if group.version >= oldest], minimums, "arrival")


@pytest.mark.parametrize("seed", range(4))
def test_a_bulk_of_random_queues_agrees_with_brute_force(seed: int) -> None:
    """A thousand further queues per seed; half of the batch sizes are the sum of some queued groups."""
    rng = random.Random(seed)
    batches = 0
    for _ in range(1000):
        sizes = rng.choice(SIZES)
        groups = [(rng.choice(ENVS), rng.choice(sizes), rng.randint(0, 3)) for _ in range(rng.randint(4, 10))]
        some = rng.sample(groups, rng.randint(1, len(groups)))
        batch_size = max(
            max(sizes), sum(size for _, size, _ in some) if rng.random() < 0.5 else rng.randint(1, 40)
        )
        shares = {env: rng.choice(SHARES) for env in ENVS if rng.random() < 0.5}
        order: Order = rng.choice(["arrival", "version"])
        buffer: BatchBuffer[int] = BatchBuffer(batch_size, minimums=shares, order=order)
        batches += drain_and_compare(buffer, fill(buffer, groups), buffer.minimums, order)
    assert batches > 300


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(queues(), st.tuples(*[st.integers(0, 5)] * 3))
def test_quotas_are_met_as_nearly_as_any_exact_batch_meets_them(
    drawn: tuple[int, list[Group]], weights: tuple[int, ...]
) -> None:
    """With quotas, a batch exists whenever an exact one does, and no other deviates less."""
    batch_size, groups = drawn
    targets = {env: float(weight) for env, weight in zip(ENVS, weights, strict=True)}
    if not any(weights):
        return
    buffer: BatchBuffer[int] = BatchBuffer(batch_size, quotas=targets)
    quotas = Quotas(targets)
    queue = fill(buffer, groups)
    while sum(group.size for group in queue) >= batch_size:
        queued = {env: sum(g.size for g in queue if g.env == env) for env in ENVS}
        plan = quotas.plan(batch_size, queued)
        expected = expected_by_quota(queue, batch_size, plan.counts)
        batch = buffer.take()
        assert batch == (None if expected is None else [group.id for group in expected])
        if expected is None:
            return
        quotas.settle(plan, {env: sum(g.size for g in expected if g.env == env) for env in ENVS})
        queue = [group for group in queue if group not in expected]
    assert buffer.take() is None


@dataclass(slots=True)
class Shelf:
    size: int
    left: int


@dataclass(slots=True)
class Bounds:
    least: int
    most: int
    stock: list[Shelf] = field(default_factory=list)
    sums: int = 0
    sums_limit: int = 0


def sums_of(stock: list[Shelf]) -> set[int]:
    return {
        sum(shelf.size * count for shelf, count in zip(stock, counts, strict=True))
        for counts in itertools.product(*(range(shelf.left + 1) for shelf in stock))
    }


stocks = st.lists(st.builds(Shelf, st.integers(1, 9), st.integers(0, 3)), max_size=3)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.builds(Bounds, st.integers(0, 12), st.integers(0, 40), stocks), max_size=3),
    st.integers(0, 50),
)
def test_an_exact_sum_within_bounds_is_found_if_and_only_if_it_exists(parts: list[Bounds], need: int) -> None:
    """The bitsets answer as an enumeration of all counts does."""
    choices = [{s for s in sums_of(part.stock) if part.least <= s <= part.most} for part in parts]
    expected = any(sum(picked) == need for picked in itertools.product(*choices))
    if any(part.most < part.least for part in parts):
        return
    assert completable(need, parts) == expected
    for part in parts:
        assert reachable(part.stock, need) == sum(1 << s for s in sums_of(part.stock) if s <= need)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.sets(st.integers(0, 60)), st.sets(st.integers(0, 60)), st.integers(0, 100))
def test_the_sums_of_two_sets_are_every_pair_up_to_the_limit(a: set[int], b: set[int], limit: int) -> None:
    """Adding two bitsets gives exactly the pairwise sums."""
    expected = {x + y for x in a for y in b if x + y <= limit}
    assert sumset(sum(1 << x for x in a), sum(1 << y for y in b), limit) == sum(1 << s for s in expected)
