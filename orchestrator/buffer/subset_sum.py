"""Can whole groups still make up an exact sum? Bounded subset sums on Python's big integers.

A set of sums is an integer whose bit `n` stands for the sum `n`: adding a group is one shift and one or, and
`k` groups of one size cost log k of them. Each environment may have a least and a most that it contributes.
Cost depends on the sum asked for and on the number of distinct sizes, never on how many groups there are.

Pure functions; what is queued, and in which order it is preferred, is not known here.
"""

from collections.abc import Collection, Sequence
from typing import Protocol


class Stock(Protocol):
    """`left` groups of one size."""

    @property
    def size(self) -> int: ...
    @property
    def left(self) -> int: ...


class Part(Protocol):
    """What one environment may still contribute: between `least` and `most`, out of `stock`.

    `sums` remembers what `stock` makes up to `sums_limit`; 0 means not known, and whoever changes the stock
    sets it back to that.
    """

    sums: int
    sums_limit: int

    @property
    def least(self) -> int: ...
    @property
    def most(self) -> int: ...
    @property
    def stock(self) -> Collection[Stock]: ...


def reachable(stock: Collection[Stock], limit: int) -> int:
    """The sums up to `limit` that whole groups of `stock` make, as a bitset."""
    sums = 1
    mask = (1 << (limit + 1)) - 1
    for lane in stock:
        size, count = lane.size, lane.left
        if not count or size > limit:
            continue
        if count * size > limit:
            count = limit // size
        copies = 1
        # 1, 2, 4, … and the rest: every number of copies from 0 to count is a sum of some of these.
        while count > copies:
            sums |= sums << (size * copies)
            count -= copies
            copies *= 2
        sums = (sums | sums << (size * count)) & mask
    return sums


def window(sums: int, least: int, most: int) -> int:
    """The members of `sums` from `least` to `most`."""
    if most < least:
        return 0
    return (sums & ((1 << (most + 1)) - 1)) >> least << least


def sumset(a: int, b: int, limit: int) -> int:
    """Every `x + y` up to `limit` with `x` of one set and `y` of the other."""
    if a == 1:
        return b & ((1 << (limit + 1)) - 1)
    if (a & ~(a << 1)).bit_count() > (b & ~(b << 1)).bit_count():
        a, b = b, a
    mask = (1 << (limit + 1)) - 1
    sums = 0
    base = 0
    # One round per run of consecutive members of `a`; a run widens `b` by doubling.
    while a and base <= limit:
        gap = (a & -a).bit_length() - 1
        a >>= gap
        base += gap
        length = (~a & (a + 1)).bit_length() - 1
        wide = b
        span = 1
        while span * 2 <= length:
            wide |= wide << span
            span *= 2
        wide |= wide << (length - span)
        sums |= (wide << base) & mask
        a >>= length
        base += length
    return sums


def meets(target: int, sets: Sequence[int]) -> bool:
    """Whether one member of each set can be picked so that they sum to `target`."""
    if not sets:
        return target == 0
    total = sets[0]
    for other in sets[1:]:
        total = sumset(total, other, target)
    return bool(total >> target & 1)


def completable(need: int, parts: Sequence[Part]) -> bool:
    """Whether whole groups of `parts` sum to exactly `need`, within every part's least and most."""
    bound = 1  # the sums that the parts with a bound make together
    free = []
    for part in parts:
        least, most = part.least, part.most
        if not least and most >= need:
            free.append(part)
            continue
        if least > need:
            return False
        if most:
            bound = sumset(bound, window(_sums(part, min(most, need)), least, most), need)
        if not bound:
            return False
    return _reaches(need, free, bound)


def _sums(part: Part, limit: int) -> int:
    if not part.sums or part.sums_limit < limit:
        part.sums = reachable(part.stock, limit)
        part.sums_limit = limit
    return part.sums


def _reaches(need: int, parts: Sequence[Part], rest: int) -> bool:
    """Whether whole groups of `parts` leave of `need` a member of `rest`."""
    left = 1 << need  # bit n: n is still needed after some choice
    for part in parts:
        for lane in part.stock:
            size, count = lane.size, lane.left
            if not count or size > need:
                continue
            if count * size > need:
                count = need // size
            copies = 1
            while count > copies:
                left |= left >> (size * copies)
                count -= copies
                copies *= 2
            left |= left >> (size * count)
            if left & rest:
                return True
    return bool(left & rest)
