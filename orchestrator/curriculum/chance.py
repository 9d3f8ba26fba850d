"""Random numbers of one decision, made from its key: there is no state that a restart could lose. Pure arithmetic."""

_MASK64 = (1 << 64) - 1


class Chance:
    """The numbers that belong to a key, in their order."""

    __slots__ = ("_state",)

    def __init__(self, key: int) -> None:
        self._state = key & _MASK64

    def random(self) -> float:
        """A number from 0 up to 1, without 1."""
        self._state = value = (self._state + 0x9E3779B97F4A7C15) & _MASK64
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
        return ((value ^ (value >> 31)) >> 11) / (1 << 53)

    def below(self, n: int) -> int:
        """A whole number from 0 up to `n`, without `n`."""
        return int(self.random() * n)
