"""Minimums that whole groups can keep, against brute force and in a real buffer."""

import itertools
from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.buffer import BatchBuffer
from orchestrator.buffer.minimums import BatchMinimums, achievable_minimums

ENVS = ("a", "b", "c", "d")


def holds(kept: dict[str, int], sizes: dict[str, int], batch_size: int) -> bool:
    """Whether some exact batch of whole groups has at least this of every env, by trying all numbers of groups."""
    counts = [range(0, batch_size + 1, size) for size in sizes.values()]
    return any(
        sum(amounts) == batch_size
        and all(amount >= kept.get(env, 0) for env, amount in zip(sizes, amounts, strict=True))
        for amounts in itertools.product(*counts)
    )


def smallest_lowering(
    wanted: dict[str, int], sizes: dict[str, int], batch_size: int
) -> tuple[int, int] | None:
    """The largest and the sum of the lowerings of the best of all vectors of minimums."""
    counts = [range(0, batch_size + 1, size) for size in sizes.values()]
    found = []
    for amounts in itertools.product(*counts):
        if sum(amounts) == batch_size:
            given_up = [
                max(0, wanted.get(env, 0) - amount) for env, amount in zip(sizes, amounts, strict=True)
            ]
            found.append((max(given_up), sum(given_up)))
    return min(found, default=None)


@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(
    st.integers(1, 40),
    st.lists(
        st.tuples(st.integers(1, 12), st.sampled_from([0, 0.1, 0.2, 0.25, 0.29, 0.33, 0.5, 0.9, 1])),
        min_size=1,
        max_size=3,
    ),
)
def test_minimums_are_lowered_by_the_least_that_brute_force_finds(
    batch_size: int, envs: list[tuple[int, float]]
) -> None:
    """What is kept fits into one exact batch, and no other lowering is smaller in its largest part, then in sum."""
    sizes = {env: size for env, (size, _) in zip(ENVS, envs, strict=False)}
    shares = {env: share for env, (_, share) in zip(ENVS, envs, strict=False) if share}
    found = achievable_minimums(shares, sizes, batch_size)
    best = smallest_lowering(found.wanted, sizes, batch_size)
    assert found.reachable == (best is not None)
    if best is None:
        assert not found.lowered
        return
    lowered = [found.wanted[env] - found.kept[env] for env in found.wanted]
    assert min(lowered, default=0) >= 0
    assert (max(lowered, default=0), sum(lowered)) == best
    assert holds(found.kept, sizes, batch_size)
    assert found.lowered == (best != (0, 0))


@pytest.mark.parametrize(
    ("batch_size", "group_size", "share", "envs", "kept"),
    [
        (128, 8, 0.33, 3, [43, 40, 40]),
        (24, 8, 0.5, 2, [12, 8]),
        (64, 8, 0.2, 5, [13, 13, 13, 8, 8]),
        (100, 10, 0.25, 4, [25, 25, 20, 20]),
    ],
)
def test_batches_form_with_the_minimums_that_are_kept(
    batch_size: int, group_size: int, share: float, envs: int, kept: list[int]
) -> None:
    """A buffer that never splits a group forms no batch with what was wanted, and one with what is kept."""
    names = [f"env{index}" for index in range(envs)]
    found = achievable_minimums(dict.fromkeys(names, share), dict.fromkeys(names, group_size), batch_size)
    assert found.lowered
    assert list(found.kept.values()) == kept

    def fill(minimums: dict[str, float] | dict[str, Fraction]) -> BatchBuffer[int]:
        buffer: BatchBuffer[int] = BatchBuffer(batch_size, minimums=minimums, envs=names)
        for number in range(2 * batch_size):
            buffer.add(number, env=names[number % envs], size=group_size)
        return buffer

    assert fill(dict.fromkeys(names, share)).take() is None
    buffer = fill(found.shares())
    assert buffer.minimums == found.kept
    assert buffer.take() is not None


def test_minimums_that_fit_are_what_was_wanted() -> None:
    """Nothing is lowered where an exact batch with every minimum exists, however little room is left."""
    found = achievable_minimums({"a": 0.5, "b": 0.25}, {"a": 8, "b": 8, "c": 4}, 32)
    assert found == BatchMinimums(32, {"a": 16, "b": 8}, {"a": 16, "b": 8}, reachable=True)
    assert not found.lowered


def test_the_count_is_that_of_exact_arithmetic() -> None:
    """0.29 of 100 is 29, not the 30 of binary fractions."""
    found = achievable_minimums({"a": 0.29}, {"a": 1}, 100)
    assert found.wanted == {"a": ceil(Fraction("0.29") * 100)} == {"a": 29}


def test_a_group_that_fits_no_exact_batch_keeps_nothing() -> None:
    """Groups of 24 beside groups of 16 are in no exact batch of 32."""
    found = achievable_minimums({"a": 0.5, "b": 0.25}, {"a": 24, "b": 16}, 32)
    assert (found.wanted, found.kept) == ({"a": 16, "b": 8}, {"a": 0, "b": 8})


def test_without_any_exact_batch_nothing_is_lowered() -> None:
    """Where no whole groups make the batch, other minimums would not either."""
    found = achievable_minimums({"a": 0.5}, {"a": 6, "b": 9}, 32)
    assert not found.reachable
    assert found.kept == found.wanted == {"a": 16}


@pytest.mark.parametrize("batch_size", [4096, 65536])
def test_many_envs_of_odd_sizes_are_answered(batch_size: int) -> None:
    """Twenty envs of coprime group sizes, all with minimums that do not fit: an exact answer, not an enumeration."""
    sizes = {f"env{index}": 101 + 2 * index for index in range(20)}
    found = achievable_minimums(dict.fromkeys(sizes, 0.05), sizes, batch_size)
    assert found.lowered
    assert all(0 < found.kept[env] <= found.wanted[env] for env in sizes)
