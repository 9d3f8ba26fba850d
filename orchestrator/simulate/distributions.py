"""Numbers that differ from one time to the next: fixed, log-normal, or drawn from values. Pure; the generator is an argument."""

import bisect
import itertools
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import ConfigError

SPREAD = 1.0
"""Standard deviation of the logarithm, where a mean is stated and no spread."""

TINY = 1e-12


@dataclass(frozen=True, slots=True)
class Distribution:
    """`at` is the value that a share of all do not exceed, `mean` what comes on average; `text` says it to people."""

    at: Callable[[float], float]
    mean: float
    text: str

    def draw(self, rng: random.Random) -> float:
        """One of them."""
        return self.at(rng.random())


def fixed(value: float) -> Distribution:
    """Always the same."""
    return Distribution(lambda share: value, value, f"{value:g}")


def log_normal(mean: float, spread: float) -> Distribution:
    """Mostly below the mean, at times far above it; `spread` is the standard deviation of the logarithm."""
    if not spread or not mean:
        return fixed(mean)
    normal = statistics.NormalDist(math.log(mean) - spread**2 / 2, spread)
    return Distribution(
        lambda share: math.exp(normal.inv_cdf(share or TINY)), mean, f"mean {mean:g}, spread {spread:g}"
    )


def drawn(values: Sequence[float], weights: Sequence[float], text: str = "") -> Distribution:
    """One of some values."""
    total = sum(weights)
    steps = list(itertools.accumulate(weight / total for weight in weights))
    last = len(values) - 1
    mean = sum(value * weight for value, weight in zip(values, weights, strict=True)) / total
    return Distribution(
        lambda share: values[min(bisect.bisect(steps, share), last)],
        mean,
        text or f"one of {', '.join(f'{value:g}' for value in values)}",
    )


def between(bounds: Sequence[tuple[float, float]], weights: Sequence[float]) -> Distribution:
    """Anywhere between two bounds, which rise, each pair of them with its weight."""
    total = sum(weights)
    ends = list(itertools.accumulate(weight / total for weight in weights))
    begins = [0.0, *ends[:-1]]
    last = len(bounds) - 1

    def at(share: float) -> float:
        place = min(bisect.bisect(ends, share), last)
        low, high = bounds[place]
        within = (share - begins[place]) / ((ends[place] - begins[place]) or 1.0)
        return low + (high - low) * min(1.0, within)

    middles = [(low + high) / 2 for low, high in bounds]
    mean = sum(middle * weight for middle, weight in zip(middles, weights, strict=True)) / total
    return Distribution(at, mean, f"mean {mean:.3g}, {bounds[0][0]:.3g} to {bounds[-1][1]:.3g}")


def parse_distribution(path: str, told: Any, *, least: float) -> Distribution:
    """What a file states: a number, `{ mean, spread }`, or `{ values, weights }`; ConfigError names the path."""
    if isinstance(told, Mapping):
        if "values" in told:
            return _parse_values(path, told, least)
        _only(path, told, ("mean", "spread"))
        if "mean" not in told:
            raise ConfigError(
                f"{path}: a table has mean (and spread) or values (and weights); got {dict(told)}"
            )
        mean = parse_number(f"{path}.mean", told["mean"], least=least)
        return log_normal(mean, parse_number(f"{path}.spread", told.get("spread", SPREAD), least=0.0))
    return fixed(parse_number(path, told, least=least))


def _parse_values(path: str, told: Mapping[str, Any], least: float) -> Distribution:
    _only(path, told, ("values", "weights"))
    values = told["values"]
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{path}.values: a list of numbers is needed; got {values!r}")
    weights = told.get("weights", [1.0] * len(values))
    if not isinstance(weights, list) or len(weights) != len(values):
        raise ConfigError(
            f"{path}.weights: one for each of the {len(values)} values is needed; got {weights!r}"
        )
    numbers = [parse_number(f"{path}.values", value, least=least) for value in values]
    parts = [parse_number(f"{path}.weights", weight, least=0.0) for weight in weights]
    if not sum(parts):
        raise ConfigError(f"{path}.weights: one of them must be above 0")
    return drawn(numbers, parts)


def parse_number(path: str, told: Any, *, least: float, most: float = math.inf) -> float:
    """A finite number within bounds; ConfigError names the path."""
    if isinstance(told, bool) or not isinstance(told, int | float) or not math.isfinite(told):
        raise ConfigError(f"{path}: a number is needed; got {told!r}")
    if told < least:
        raise ConfigError(f"{path}: {told:g} is below {least:g}")
    if told > most:
        raise ConfigError(f"{path}: {told:g} is above {most:g}")
    return float(told)


def _only(path: str, told: Mapping[str, Any], known: Sequence[str]) -> None:
    unknown = [key for key in told if key not in known]
    if unknown:
        raise ConfigError(f'{path}: unknown key "{unknown[0]}"; known here: {", ".join(known)}')
