"""Which rank gets which sequences of a batch: the same number each, and as even in tokens as it goes.

A pure function of the lengths and the world size, so that asking again gives every rank the same sequences.
Balanced largest differencing: blocks of one sequence per rank, ordered by length, are merged pairwise with
the heaviest share of one meeting the lightest of the other. O(n log n).
"""

import heapq
from collections.abc import Sequence


def partition(lengths: Sequence[int], world_size: int) -> list[list[int]]:
    """Indices of the sequences of each rank, in the batch's order. ValueError unless they divide evenly."""
    if world_size < 1 or len(lengths) % world_size:
        raise ValueError(f"{len(lengths)} sequences cannot be shared evenly by {world_size} ranks")
    if world_size == 1:
        return [list(range(len(lengths)))]
    if not lengths:
        return [[] for _ in range(world_size)]
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    # An entry is (-(heaviest - lightest), tie-break, shares from heavy to light), a share is (tokens, indices).
    heap = []
    for number, start in enumerate(range(0, len(order), world_size)):
        shares = [(lengths[index], [index]) for index in order[start : start + world_size]]
        heap.append((shares[-1][0] - shares[0][0], number, shares))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [
            (heavy[0] + light[0], heavy[1] + light[1])
            for heavy, light in zip(first, reversed(second), strict=True)
        ]
        merged.sort(key=lambda share: (-share[0], share[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
    return [sorted(indices) for _, indices in heap[0][2]]
