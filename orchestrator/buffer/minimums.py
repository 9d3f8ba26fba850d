"""Minimums that whole groups can keep: what is wanted of every batch, and what one exact batch can hold.

An env with groups of 8 and a minimum of 43 needs 48 of a batch. Where all envs' whole groups do not fit into one
exact batch, a buffer that never splits a group would wait for ever; so the minimums are lowered. Together and as
little as possible: first the largest lowering of any env is made as small as can be, then the sum of all
lowerings; where that leaves a choice, envs that come first keep more.

Two facts make it cheap. Beside the least whole groups of every env, what is left of the batch must be a sum of
group sizes, of whichever env: one bitset of reachable sums answers that. And lowering an env by a group never
makes an exact batch impossible, so the largest lowering is found by bisection.

Pure arithmetic on configured sizes; what is queued is not known here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from orchestrator.buffer.quotas import minimum_counts

Ints = NDArray[np.int64]

_NEVER = 1 << 60
"""More than any number of sequences; sums of a few still fit into 64 bits."""


@dataclass(frozen=True, slots=True)
class BatchMinimums:
    """Sequences of every batch, by env, in the order of the shares.

    `reachable` is whether any exact batch of whole groups exists; where none does, nothing is lowered.
    """

    batch_size: int
    wanted: dict[str, int]
    kept: dict[str, int]
    reachable: bool

    @property
    def lowered(self) -> bool:
        """Whether some env keeps less than was wanted."""
        return self.kept != self.wanted

    def shares(self) -> dict[str, Fraction]:
        """The kept minimums as exact shares of the batch, as a batch buffer takes them."""
        return {env: Fraction(count, self.batch_size) for env, count in self.kept.items()}


def reachable_sums(sizes: Mapping[str, int], limit: int) -> int:
    """The sums up to `limit` of any numbers of groups of these sizes, as a bitset."""
    sums = 1
    mask = (1 << (limit + 1)) - 1
    for size in set(sizes.values()):
        shift = size
        while shift <= limit:
            sums |= sums << shift & mask
            shift *= 2
    return sums


def achievable_minimums(
    shares: Mapping[str, float], group_sizes: Mapping[str, int], batch_size: int
) -> BatchMinimums:
    """What whole groups can give of `ceil(share × batch_size)` in one exact batch.

    `group_sizes` names every env that can be in a batch, those without a minimum too.
    """
    wanted = minimum_counts(shares, batch_size)
    unit = math.gcd(*group_sizes.values())
    if batch_size % unit:
        return BatchMinimums(batch_size, wanted, dict(wanted), reachable=False)
    # Every whole group is a multiple of the unit, so that sums are counted in units.
    total = batch_size // unit
    sums = reachable_sums({env: size // unit for env, size in group_sizes.items()}, total)

    def left(lowering: int) -> int:
        """What of the batch is free, in units, where every env may keep `lowering` less than it wants."""
        least = sum(_whole(count - lowering, group_sizes[env]) for env, count in wanted.items())
        return total - least // unit

    def fits(lowering: int) -> bool:
        free = left(lowering)
        return free >= 0 and bool(sums >> free & 1)

    low, high = -1, max(wanted.values(), default=0)
    if not fits(high):  # nothing is wanted any more, so that no exact batch exists
        return BatchMinimums(batch_size, wanted, dict(wanted), reachable=False)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    if high == 0:
        return BatchMinimums(batch_size, wanted, dict(wanted), reachable=True)
    kept = _least_lowered(wanted, group_sizes, high, unit, sums, left(high))
    return BatchMinimums(batch_size, wanted, kept, reachable=True)


def _whole(count: int, size: int) -> int:
    """The least number of sequences in whole groups that is at least `count`."""
    return -(-max(count, 0) // size) * size


def _least_lowered(
    wanted: Mapping[str, int], sizes: Mapping[str, int], lowering: int, unit: int, sums: int, free: int
) -> dict[str, int]:
    """What each env keeps so that none is lowered by more than `lowering` and all together by the least.

    Starting from the least that each env may keep, groups are given back until `free` units are used in the best
    way. A group given back is as much kept, except for the last one of an env, whose end lies beyond what was
    wanted. So the sum of all lowerings is smallest where what was given back, less these ends, is largest:
    `waste[n]` is the least sum of ends where `n` units were given back.
    """
    kept = {env: _whole(count - lowering, sizes[env]) for env, count in wanted.items()}
    short = [env for env in wanted if kept[env] < wanted[env]]
    waste = np.full(free + 1, _NEVER, dtype=np.int64)
    waste[0] = 0
    stages = [waste]
    for env in reversed(short):
        stages.append(_give_back(stages[-1], sizes[env] // unit, *_room(wanted[env], kept[env], sizes[env])))
    given = np.arange(free + 1, dtype=np.int64) * unit
    possible = _bits(sums, free + 1)[::-1] & (stages[-1] < _NEVER)
    at = int(np.argmax(np.where(possible, given - stages[-1], -_NEVER)))
    for env in short:
        after, before = stages.pop(), stages[-1]
        groups, end = _room(wanted[env], kept[env], sizes[env])
        for count in range(groups, -1, -1):
            was = at - count * (sizes[env] // unit)
            if was >= 0 and before[was] + (end if count == groups else 0) == after[at]:
                kept[env] = min(wanted[env], kept[env] + count * sizes[env])
                at = was
                break
    return {env: min(count, wanted[env]) for env, count in kept.items()}


def _room(wanted: int, kept: int, size: int) -> tuple[int, int]:
    """How many groups can be given back to an env, and by how much the last one goes beyond what was wanted."""
    top = _whole(wanted, size)
    return (top - kept) // size, top - wanted


def _give_back(waste: Ints, step: int, groups: int, end: int) -> Ints:
    """The least waste after up to `groups` groups of `step` units were given back; the last one wastes `end`."""
    best = waste.copy()
    span = 1  # best covers 0 to span - 1 groups; doubled until it covers all but the last
    while span < groups:
        more = min(span, groups - span)
        _take_smaller(best, best, more * step)
        span += more
    _take_smaller(best, waste + end, groups * step)
    return best


def _take_smaller(best: Ints, other: Ints, shift: int) -> None:
    if shift < len(best):
        best[shift:] = np.minimum(best[shift:], other[: len(best) - shift].copy())


def _bits(number: int, count: int) -> NDArray[np.bool_]:
    """The lowest `count` bits, lowest first."""
    raw = np.frombuffer((number & (1 << count) - 1).to_bytes(count // 8 + 1, "little"), dtype=np.uint8)
    return np.unpackbits(raw, bitorder="little")[:count].astype(np.bool_)
