"""Log lines that a stranger can cause: the first few are written, then one in many."""

_ALL_OF_THE_FIRST = 20
_THEN_EVERY = 1000


class Thinned:
    """Counts what happened and says which times are worth a line."""

    def __init__(self) -> None:
        self.count = 0

    def is_worth_a_line(self) -> bool:
        """Count once more."""
        self.count += 1
        return self.count <= _ALL_OF_THE_FIRST or self.count % _THEN_EVERY == 0
