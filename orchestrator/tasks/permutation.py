"""A seeded order of any number of tasks, without a table. Pure arithmetic."""

import hashlib

_ROUNDS = 8
_MASK64 = (1 << 64) - 1


class Permutation:
    """A seeded permutation of range(size), evaluated at one point at a time, without a table.

    A Feistel network permutes the smallest range of an even number of bits that holds `size`; a result outside
    of `size` is permuted again until it falls inside, which takes less than four rounds on average.
    """

    __slots__ = ("_bits", "_keys", "epoch", "size")

    def __init__(self, seed: int, env: str, split: str, epoch: int, size: int) -> None:
        self.epoch = epoch
        self.size = size
        self._bits = max(1, ((size - 1).bit_length() + 1) // 2)
        key = digest(seed, env, split, f"epoch {epoch}")
        self._keys = [_scramble(key + round_number * 0x9E3779B97F4A7C15) for round_number in range(_ROUNDS)]

    def at(self, place: int) -> int:
        """Where `place` is moved to."""
        bits = self._bits
        mask = (1 << bits) - 1
        value = place
        while True:
            left, right = value >> bits, value & mask
            for key in self._keys:
                left, right = right, left ^ (_scramble(right + key) >> (64 - bits))
            value = (left << bits) | right
            if value < self.size:
                return value


def _scramble(value: int) -> int:
    """Spread every bit of a number over 64 bits."""
    value &= _MASK64
    value = ((value ^ (value >> 32)) * 0xD6E8FEB86659FD93) & _MASK64
    value = ((value ^ (value >> 32)) * 0xD6E8FEB86659FD93) & _MASK64
    return value ^ (value >> 32)


def digest(seed: int, *words: str) -> int:
    """A 64-bit number that depends on all of its arguments; the lengths keep neighbouring words apart."""
    text = "".join(f"{len(word)}:{word}" for word in (str(seed), *words))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
