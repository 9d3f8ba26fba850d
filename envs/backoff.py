"""How long to wait before the next attempt: twice as long each time, up to a limit. Pure."""


def backoff_s(attempt: int, *, first_s: float, max_s: float) -> float:
    """Pause after the failed attempt with this number, counted from 1."""
    # Beyond 2**32 any limit is reached, and the power of a float would overflow at some point.
    return min(max_s, first_s * 2.0 ** min(attempt - 1, 32))
