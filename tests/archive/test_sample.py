"""Which groups keep their conversations."""

import pytest

from orchestrator.archive.sample import Kept, Sample


def kept_of(most: int, rewards: list[tuple[float, float]]) -> list[int]:
    """The numbers of the groups that are kept in the end, of groups with these worst and best rewards."""
    sample, kept = Sample(most), list[int]()
    for number, (low, high) in enumerate(rewards):
        keep, gives_way = sample.offer(Kept(number, low, high))
        if gives_way is not None:
            kept.remove(gives_way.seq)
        if keep:
            kept.append(number)
    return kept


@pytest.mark.parametrize(
    ("most", "rewards", "kept"),
    [
        (0, [(0, 1), (0, 1)], []),
        (1, [(0.5, 0.6), (0, 1)], [0]),
        (3, [(0.5, 0.6)] * 5, [0, 1, 2]),
        (3, [(0.5, 0.6), (0.5, 0.6), (0.5, 0.6), (0.5, 0.9), (0.1, 0.6), (0.2, 0.8)], [0, 3, 4]),
        (3, [(0.5, 0.6), (0.4, 0.7), (0.3, 0.8), (0.2, 0.9), (0.1, 1.0)], [0, 1, 4]),
        (2, [(0.5, 0.6), (0.5, 0.6), (0.1, 0.6), (0.5, 0.9), (0.5, 0.95)], [0, 4]),
    ],
)
def test_the_first_the_best_and_the_worst_are_kept(
    most: int, rewards: list[tuple[float, float]], kept: list[int]
) -> None:
    """Whatever the order, and never more than there is room for."""
    assert kept_of(most, rewards) == kept
