"""Batches that follow targets: which of the batches that could be taken is, and that one always is."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.buffer import BatchBuffer

THIRDS = {"a": 0.4, "b": 0.3, "c": 0.3}


def fill(buffer: BatchBuffer[str], **groups: int) -> None:
    for env, count in groups.items():
        for _ in range(count):
            buffer.add(env, env=env, size=4)


def test_a_batch_has_of_each_env_what_it_is_due_whoever_came_first() -> None:
    """By arrival the batch would be all of a."""
    buffer: BatchBuffer[str] = BatchBuffer(40, targets=THIRDS)
    fill(buffer, a=10, b=5, c=5)
    assert Counter(buffer.take() or []) == {"a": 4, "b": 3, "c": 3}


def test_what_whole_groups_could_not_give_comes_in_the_next_batch() -> None:
    """Of ten groups that two batches hold, each env has its share to the group."""
    buffer: BatchBuffer[str] = BatchBuffer(20, targets=THIRDS)
    fill(buffer, a=9, b=9, c=9)
    assert Counter((buffer.take() or []) + (buffer.take() or [])) == {"a": 4, "b": 3, "c": 3}


def test_an_env_that_has_too_little_is_not_waited_for_and_made_up_for_by_a_batch_at_most() -> None:
    """The others fill its place; when it is back it has twice its share once, and then its share."""
    buffer: BatchBuffer[str] = BatchBuffer(40, targets=THIRDS)
    fill(buffer, a=30, b=30)
    for _ in range(4):
        assert Counter(buffer.take() or [])["c"] == 0
    fill(buffer, a=30, b=30, c=30)
    assert [Counter(buffer.take() or [])["c"] for _ in range(5)][2:] == [3, 3, 3]


def test_the_oldest_of_each_env_are_taken_and_a_minimum_comes_before_a_target() -> None:
    """c has a target of nothing and a minimum all the same."""
    buffer: BatchBuffer[int] = BatchBuffer(8, targets={"a": 1.0, "c": 0.0}, minimums={"c": 0.5})
    for number, env in enumerate("aaacca"):
        buffer.add(number, env=env, size=2)
    assert buffer.take() == [0, 1, 3, 4]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 7)), max_size=14),
    st.integers(4, 20),
    st.sampled_from([{}, {"a": 0.5}, {"b": 0.2, "c": 0.3}]),
)
def test_there_is_a_batch_whenever_there_is_one_without_targets(
    groups: list[tuple[str, int]], size: int, minimums: dict[str, float]
) -> None:
    """Targets choose among exact batches with every minimum, and refuse none."""
    plain: BatchBuffer[tuple[str, int]] = BatchBuffer(size, minimums=minimums, envs="abc")
    even: BatchBuffer[tuple[str, int]] = BatchBuffer(size, minimums=minimums, targets=THIRDS)
    for env, count in groups:
        if count <= size:
            plain.add((env, count), env=env, size=count)
            even.add((env, count), env=env, size=count)
    expected, batch = plain.take(), even.take()
    assert (batch is None) == (expected is None)
    if batch is not None:
        assert sum(count for _, count in batch) == size
        for env, least in even.minimums.items():
            assert sum(count for name, count in batch if name == env) >= least


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unit": "tokens", "targets": {"a": 1.0}}, "targets need unit = sequences"),
        ({"quotas": {"a": 1.0}, "targets": {"a": 1.0}}, "and no quotas"),
        ({"envs": ["a", "b"], "targets": {"a": 1.0}}, "targets must name every env"),
    ],
)
def test_targets_that_cannot_be_followed_are_refused(options: dict[str, object], message: str) -> None:
    """Each mistake is named."""
    with pytest.raises(ValueError, match=message):
        BatchBuffer(8, **options)  # type: ignore[arg-type]  # what is refused here


def test_targets_are_shares_of_rollouts_also_where_one_yields_several_sequences() -> None:
    """Rollouts of a yield three sequences each, so that half of the rollouts are three quarters of the batch."""
    buffer: BatchBuffer[str] = BatchBuffer(48, targets={"a": 0.5, "b": 0.5})
    for _ in range(12):
        buffer.add("a", env="a", size=12, rollouts=4)
        buffer.add("b", env="b", size=4, rollouts=4)
    assert [Counter(buffer.take() or []) for _ in range(3)] == [{"a": 3, "b": 3}] * 3
