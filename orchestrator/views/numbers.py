"""How numbers are written for people: rewards, changes, times, amounts, and trends in one line. Pure."""

from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"
PLAIN_BARS = "_.-~=+*#"
"""For terminals that know no others."""
UNKNOWN = "–"

LEAST_RANGE = 0.1
"""Of a trend, as a share of its largest value: noise must not look like a trend."""


def number(value: float | None) -> str:
    """A reward or a score."""
    return UNKNOWN if value is None else f"{value:.3f}"


def change(value: float) -> str:
    """A difference of two such, with its sign."""
    return f"{value:+.3f}"


def amount(value: float) -> str:
    """A large number in at most four characters and its unit: 950, 9.1k, 12k, 3.4M."""
    for unit, size in (("", 1), ("k", 1e3), ("M", 1e6)):
        scaled = value / size
        if round(scaled) < 1000:
            return f"{scaled:.1f}{unit}" if unit and scaled < 9.95 else f"{scaled:.0f}{unit}"
    return f"{value / 1e9:.1f}G"


def latency(seconds: float) -> str:
    """The time of a rollout."""
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else duration(seconds)


def duration(seconds: float) -> str:
    """A time that somebody waits: 62 s, 13 min, 4.2 h, 3.1 d."""
    for unit, size, most in (("s", 1, 120), ("min", 60, 120), ("h", 3600, 48)):
        if seconds / size < most:
            scaled = seconds / size
            return f"{scaled:.1f} {unit}" if unit == "h" else f"{scaled:.0f} {unit}"
    return f"{seconds / 86400:.1f} d"


def sparkline(values: Sequence[float | None], width: int, *, bars: str = BARS) -> str:
    """The last values as bars, oldest first, several to a bar where there are more than fit; a gap where none is known."""
    buckets = _buckets(values, width)
    known = [value for value in buckets if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    span = max(high - low, LEAST_RANGE * max(abs(high), abs(low)), 1e-9)
    middle = (high + low) / 2
    low, top = middle - span / 2, len(bars) - 1
    places = [None if value is None else round((value - low) / span * top) for value in buckets]
    return "".join(" " if place is None else bars[place] for place in places)


def _buckets(values: Sequence[float | None], width: int) -> list[float | None]:
    """Means of neighbours, where there are more than `width`."""
    count = len(values)
    if count <= width:
        return list(values)
    parts = [values[place * count // width : (place + 1) * count // width] for place in range(width)]
    known = [[value for value in part if value is not None] for part in parts]
    return [sum(part) / len(part) if part else None for part in known]
