"""Several configurations side by side: the points of a sweep, and which of them no other one beats. Pure."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.errors import ConfigError
from orchestrator.simulate.answers import Answers

MOST_POINTS = 256


@dataclass(frozen=True, slots=True)
class Point:
    """A configuration with a name, and what it does; `best` where none is faster and as fresh, or fresher and as fast.

    `values` are those of a sweep, by key.
    """

    name: str
    answers: Answers
    values: Mapping[str, str]
    best: bool = False

    @property
    def speed(self) -> float:
        """Sequences per second."""
        return self.answers.mean(lambda one: one.sequences_per_s) or 0.0

    @property
    def staleness(self) -> float:
        """Mean age in versions."""
        return self.answers.mean(lambda one: one.staleness) or 0.0


@dataclass(frozen=True, slots=True)
class Refused:
    """A configuration that there is no answer of, and why."""

    name: str
    reason: str
    values: Mapping[str, str]


def parse_sweeps(told: Sequence[str]) -> list[dict[str, str]]:
    """Every combination of `KEY=VALUE,VALUE`, each as values by key; ConfigError where one cannot be read."""
    axes = []
    for text in told:
        key, sign, values = text.partition("=")
        choices = [value.strip() for value in values.split(",") if value.strip()]
        if not sign or not key.strip() or not choices:
            raise ConfigError(f"--sweep {text}: write KEY=VALUE,VALUE, such as dispatch.max_inflight=64,128")
        axes.append([(key.strip(), value) for value in choices])
    keys = [axis[0][0] for axis in axes]
    twice = [key for key in keys if keys.count(key) > 1]
    if twice:
        raise ConfigError(f"--sweep {twice[0]}: it is named twice; give all its values at once")
    points = [dict(point) for point in itertools.product(*axes)]
    if len(points) > MOST_POINTS:
        raise ConfigError(
            f"--sweep: these are {len(points)} points; at most {MOST_POINTS} are simulated at once"
        )
    return points


def mark_best(points: Sequence[Point]) -> list[Point]:
    """The front of speed against staleness: points that no other one beats in one without losing in the other."""

    def beaten(one: Point) -> bool:
        return any(
            other.speed >= one.speed
            and other.staleness <= one.staleness
            and (other.speed > one.speed or other.staleness < one.staleness)
            for other in points
        )

    return [replace(point, best=not beaten(point)) for point in points]
