"""From the lines of metrics.jsonl to the flat names that trackers know; docs/tracking.md lists them.

What is nested is joined by "/": `env/math/latency_s/p90`. Only numbers are kept; a histogram becomes its mean and its largest
value. Names that environments and trainers make up are bounded in number, so that no tracker is filled with them. Pure.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MOST_NAMES = 2000
"""Numbers of one step; what is beyond them is left out."""

_LEFT_OUT = frozenset({"kind", "step", "at", "acknowledged_at", "lengths"})
"""What is not a number of its own; `length` says the same as the histogram `lengths`."""


def flat_step(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step."""
    numbers: dict[str, float] = {}
    for name, value in line.items():
        if name in _LEFT_OUT:
            continue
        if name == "staleness":
            numbers.update(_of_histogram(name, value))
            continue
        for path, number in _numbers("env" if name == "envs" else name, value):
            if len(numbers) >= MOST_NAMES:
                return numbers
            numbers[path] = number
    return numbers


def flat_eval(result: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an evaluation's result."""
    left_out = {*_LEFT_OUT, "env"}
    return {
        path: number
        for name, value in result.items()
        if name not in left_out
        for path, number in _numbers(name, value)
    }


def _numbers(path: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for name, inside in value.items():
            yield from _numbers(f"{path}/{name}", inside)
    elif isinstance(value, bool | int | float):
        yield path, float(value)


def _of_histogram(name: str, counts: Sequence[int]) -> dict[str, float]:
    """Of counts by value, 0 first."""
    total = sum(counts)
    if not total:
        return {}
    mean = sum(value * n for value, n in enumerate(counts)) / total
    largest = max(value for value, n in enumerate(counts) if n)
    return {f"{name}/mean": mean, f"{name}/max": float(largest)}
