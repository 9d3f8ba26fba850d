"""What charts show: the numbers of every step as columns, and no more points of each than a screen can show.

Told the records of steps in order; a step that is told again (its trainer has reported meanwhile) takes the place of what
was known of it. Columns are exact in memory and are handed out as means over buckets of `width` steps each, a power of
two that follows from how many steps and columns there are. Whoever has the buckets of an earlier moment asks for those
that have changed since. Used by one thread at a time.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.facts.steps import EnvStep, Spread, StepRecord

MAX_POINTS = 1000
MAX_NUMBERS = 250_000
"""Of all columns together; with very many envs there are fewer points of each."""
MIN_POINTS = 100
MAX_METRICS = 8
"""Of an environment's own metrics: the first names by which it told them."""
MAX_ENVS = 64
RECENT = 50
"""Steps that the histograms are made of."""
_CHANGES = 256
_DIGITS = 5

Columns = dict[str, NDArray[np.float64]]
"""By the name of the number; the place of a step is one before its number."""

_LAST_OF_BUCKET = frozenset({"at", "seconds", "version"})


class Series:
    """The columns of one run. `revision` grows with every change."""

    def __init__(self) -> None:
        self.last = 0
        self.revision = 0
        self._run: Columns = {}
        self._envs: dict[str, Columns] = {}
        self._trainer: Columns = {}
        self._capacity = 64
        self._metrics: Counter[str] = Counter()
        self._changes: deque[tuple[int, int]] = deque(maxlen=_CHANGES)
        self._recent: deque[StepRecord] = deque(maxlen=RECENT)
        self._totals: dict[str, dict[str, Counter[str]]] = {}

    def put(self, records: Iterable[StepRecord]) -> None:
        """Take in records, oldest first."""
        first = None
        for record in records:
            if self._is_known(record):
                continue
            first = record.step if first is None else min(first, record.step)
            self._put(record)
        if first is not None:
            self.revision += 1
            self._changes.append((self.revision, first))

    @property
    def width(self) -> int:
        """Steps of one point."""
        count = len(self._run) + len(self._trainer) + sum(map(len, self._envs.values()))
        points = max(MIN_POINTS, min(MAX_POINTS, MAX_NUMBERS // max(1, count)))
        width = 1
        while -(-self.last // width) > points:
            width *= 2
        return width

    def changed_since(self, revision: int) -> int | None:
        """The first step that changed after a revision; None where nothing has."""
        if revision >= self.revision:
            return None
        steps = [step for number, step in self._changes if number > revision]
        return min(steps) if len(steps) == self.revision - revision else 1

    def buckets(self, since: int = 1) -> dict[str, Any]:
        """The buckets from the one with the step `since` on, column by column."""
        width = self.width
        first = max(0, since - 1) // width
        starts = range(first * width, self.last, width)

        def thinned(columns: Columns) -> dict[str, list[float | None]]:
            return {
                name: _bucket(column[first * width : self.last], width, keep_last=name in _LAST_OF_BUCKET)
                for name, column in columns.items()
            }

        return {
            "width": width,
            "from": first,
            "last": self.last,
            "steps": [min(start + width, self.last) for start in starts],
            "run": thinned(self._run),
            "envs": {env: thinned(columns) for env, columns in self._envs.items()},
            "trainer": thinned(self._trainer),
        }

    def histograms(self) -> dict[str, list[int]]:
        """Ages and lengths of the sequences of the last steps."""
        return {
            "steps": [record.step for record in (self._recent[0], self._recent[-1])] if self._recent else [],
            "staleness": _add_up(record.staleness for record in self._recent),
            "lengths": _add_up(record.lengths for record in self._recent),
        }

    def totals(self) -> dict[str, dict[str, dict[str, int]]]:
        """Per env, over all steps: rollouts by outcome, and by why they were not trained on."""
        return {
            env: {what: dict(counts) for what, counts in told.items()} for env, told in self._totals.items()
        }

    def formed_at(self, step: int) -> float | None:
        """When a step's batch was formed; None for a step that is not known."""
        return float(self._run["at"][step - 1]) if 0 < step <= self.last else None

    def of_env(self, env: str, name: str) -> NDArray[np.float64]:
        """The known values of one number of an env."""
        column = self._envs.get(env, {}).get(name, np.empty(0))
        return column[~np.isnan(column)]

    def _is_known(self, record: StepRecord) -> bool:
        """Whether it says nothing that is not known."""
        return record.step <= self.last and all(
            name in self._trainer and self._trainer[name][record.step - 1] == value
            for name, value in record.trainer.items()
        )

    def _put(self, record: StepRecord) -> None:
        step = record.step
        if step > self._capacity:
            self._grow(step)
        fresh = step > self.last
        self.last = max(self.last, step)
        self._set(self._run, step, _run_numbers(record))
        self._set(self._trainer, step, record.trainer)
        for env, told in islice(record.envs.items(), MAX_ENVS):
            columns = self._envs.setdefault(env, {})
            self._set(columns, step, _env_numbers(told))
            self._set(columns, step, self._bounded(env, columns, told.metrics))
            if fresh:
                totals = self._totals.setdefault(env, {"outcomes": Counter(), "dropped": Counter()})
                totals["outcomes"].update(told.outcomes)
                totals["dropped"].update(told.dropped)
        if fresh:
            self._recent.append(record)

    def _bounded(self, env: str, columns: Columns, metrics: Mapping[str, float]) -> dict[str, float]:
        """An env's own metrics, but for names beyond the first ones."""
        named = {f"metric {name}": value for name, value in metrics.items()}
        if self._metrics[env] < MAX_METRICS:
            room = MAX_METRICS - self._metrics[env]
            fresh = [name for name in named if name not in columns][:room]
            self._metrics[env] += len(fresh)
            return {name: value for name, value in named.items() if name in columns or name in fresh}
        return {name: value for name, value in named.items() if name in columns}

    def _set(self, columns: Columns, step: int, numbers: Mapping[str, float | None]) -> None:
        """A number that is not known is NaN, which is what numpy makes of None."""
        for name, value in numbers.items():
            if name not in columns:
                columns[name] = np.full(self._capacity, np.nan)
            columns[name][step - 1] = value

    def _grow(self, step: int) -> None:
        more = max(step, 2 * self._capacity) - self._capacity
        self._capacity += more
        rest = np.full(more, np.nan)
        for columns in (self._run, self._trainer, *self._envs.values()):
            for name, column in columns.items():
                columns[name] = np.concatenate([column, rest])


def _run_numbers(record: StepRecord) -> dict[str, float | None]:
    ages = record.staleness
    sequences = sum(ages)
    return {
        "at": record.at,
        "seconds": record.seconds,
        "version": record.version,
        "reward": record.reward,
        "sampled_reward": record.sampled_reward,
        "tokens": record.tokens,
        "rollouts_per_s": record.rollouts_per_s,
        "tokens_per_s": record.tokens_per_s,
        "truncated": record.truncated,
        "filtered": record.filtered,
        "staleness_mean": sum(age * n for age, n in enumerate(ages)) / sequences if sequences else None,
        "staleness_max": max((age for age, n in enumerate(ages) if n), default=None),
        **_of_spread("length", record.length),
        **{f"time {what}": seconds for what, seconds in record.time.items()},
    }


def _env_numbers(env: EnvStep) -> dict[str, float | None]:
    ended = sum(env.outcomes.values())
    return {
        "reward": env.reward,
        "sampled_reward": env.sampled_reward,
        "share": env.share,
        "target": env.target,
        "sequences": env.sequences,
        "inflight": env.inflight,
        "truncated": env.truncated if env.sequences else None,
        "failed": 1 - env.outcomes.get("completed", 0) / ended if ended else None,
        "quarantined": float(env.quarantined),
        **_of_spread("length", env.length),
        **_of_spread("latency", env.latency_s),
    }


def _of_spread(name: str, spread: Spread | None) -> dict[str, float | None]:
    return {
        f"{name}_mean": None if spread is None else spread.mean,
        f"{name}_p90": None if spread is None else spread.p90,
    }


def _bucket(values: NDArray[np.float64], width: int, *, keep_last: bool) -> list[float | None]:
    """Means over `width` values each, or the last value of each; of nothing, NaN, which is null in JSON."""
    if width > 1 and len(values):
        ends = np.minimum(np.arange(width, len(values) + width, width), len(values))
        if keep_last:
            values = values[ends - 1]
        else:
            known = ~np.isnan(values)
            starts = ends - width
            starts[-1] = (len(ends) - 1) * width
            sums = np.add.reduceat(np.where(known, values, 0.0), starts)
            counts = np.add.reduceat(known.astype(np.float64), starts)
            values = np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)
    return (values if keep_last else _rounded(values)).tolist()  # type: ignore[no-any-return]


def _rounded(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """To so many digits as a chart can show; a third of the bytes."""
    with np.errstate(divide="ignore", invalid="ignore"):
        places = _DIGITS - 1 - np.floor(np.log10(np.abs(values)))
        scale = np.where(np.isfinite(places), 10.0 ** np.clip(places, -300, 300), 1.0)
        return np.round(values * scale) / scale


def _add_up(histograms: Iterable[list[int]]) -> list[int]:
    total: list[int] = []
    for histogram in histograms:
        total.extend([0] * (len(histogram) - len(total)))
        for place, n in enumerate(histogram):
            total[place] += n
    return total
