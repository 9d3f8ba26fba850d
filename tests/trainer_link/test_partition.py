"""Sharing a batch among ranks: evenly in number, nearly so in tokens, and always the same way."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.trainer_link.partition import partition


@given(st.integers(1, 9), st.integers(0, 12), st.data())
def test_every_sequence_goes_to_one_rank_and_every_rank_gets_as_many(
    world_size: int, each: int, data: st.DataObject
) -> None:
    """A partition in equal numbers, each share in the batch's order."""
    lengths = data.draw(
        st.lists(st.integers(1, 5000), min_size=world_size * each, max_size=world_size * each)
    )
    shares = partition(lengths, world_size)
    assert [len(share) for share in shares] == [each] * world_size
    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
    assert all(share == sorted(share) for share in shares)
    assert shares == partition(list(lengths), world_size)


@given(st.integers(2, 9), st.integers(1, 12), st.data())
def test_no_rank_is_further_above_the_mean_than_the_longest_sequence(
    world_size: int, each: int, data: st.DataObject
) -> None:
    """For any lengths."""
    lengths = data.draw(
        st.lists(st.integers(1, 5000), min_size=world_size * each, max_size=world_size * each)
    )
    loads = [sum(lengths[index] for index in share) for share in partition(lengths, world_size)]
    assert max(loads) - sum(lengths) / world_size <= max(lengths)


@pytest.mark.parametrize("world_size", [2, 8, 32])
def test_typical_lengths_are_balanced_within_a_thousandth(world_size: int) -> None:
    """Long-tailed lengths, as rollouts have them."""
    rng = random.Random(5)
    lengths = [min(16_384, int(rng.lognormvariate(6.5, 0.9)) + 1) for _ in range(1024)]
    loads = [sum(lengths[index] for index in share) for share in partition(lengths, world_size)]
    assert max(loads) * world_size <= sum(lengths) * 1.001


def test_a_number_that_does_not_divide_is_an_error_that_says_so() -> None:
    """The batch size must be a multiple of the world size."""
    with pytest.raises(ValueError, match="10 sequences cannot be shared evenly by 4 ranks"):
        partition([1] * 10, 4)
    with pytest.raises(ValueError, match="0 ranks"):
        partition([], 0)
