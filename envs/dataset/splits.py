"""Which rows are in which split: all of them, those that a column names, or a share of them.

Shares are exact to a row and a function of the seed and the number of rows alone, so that every process has the
same. Rows are ranked by a hash of their number, and stay in the order of the file within a split. Pure.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


def share_out(count: int, shares: Mapping[str, float], *, seed: int) -> dict[str, Int64s]:
    """The row numbers of each split; shares are divided by their sum, and every row is in one split."""
    ranked = np.argsort(_hashes(count, seed), kind="stable")
    total = sum(shares.values())
    ends = np.rint(np.cumsum([share / total for share in shares.values()]) * count).astype(int)
    pieces = np.split(ranked, ends[:-1])
    return {split: np.sort(piece).astype(np.int64) for split, piece in zip(shares, pieces, strict=True)}


def group_by_value(values: Sequence[Any]) -> dict[str, Int64s]:
    """The row numbers of each value."""
    found: dict[str, list[int]] = {}
    for number, value in enumerate(values):
        found.setdefault(str(value), []).append(number)
    return {value: np.array(numbers, np.int64) for value, numbers in found.items()}


def _hashes(count: int, seed: int) -> NDArray[np.uint64]:
    """One well mixed number per row (the finaliser of SplitMix64); numpy's own shuffles may change with its version."""
    # Steps of the golden ratio, from a start that differs with the seed.
    start = (seed * 0xBF58476D1CE4E5B9 + 1) % 2**64
    mixed = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
