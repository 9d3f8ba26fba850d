"""How many rollouts one engine is given at a time: a fixed number, or one steered by the engine's own metrics.

Pure and synchronous: time and readings come in as arguments, a limit comes out, always within its bounds.
The adaptive controller looks for the largest limit at which the engine neither preempts (work thrown away),
nor runs out of cache, nor lets requests queue:

- grow while the limit is used and everything fits: by half as long as no pressure was ever seen, then in
  small steps, and from the level on that last did not fit only one step per `probe_s`;
- trim by a small step on a full cache or a queue that lasts;
- cut by a quarter on preemptions;
- hold while more is in flight than the limit, because the last decrease has not taken effect yet;
- freeze when readings stop: an engine that cannot be seen is neither given more nor cut.
"""

import math
from dataclasses import dataclass, field
from typing import Protocol

from orchestrator.dispatch.placement import even_shares
from orchestrator.inference.metrics import EngineMetrics


class ConcurrencyController(Protocol):
    """The limit of one endpoint."""

    @property
    def limit(self) -> int:
        """Rollouts that may be in flight now; at least 1."""

    def observe(self, metrics: EngineMetrics | None, *, inflight: int, now: float) -> None:
        """A reading of the engine's metrics, or None if there was none."""

    def reset(self) -> None:
        """The engine was restarted: its counters begin again."""

    def resize(self, low: int, high: int) -> None:
        """Other bounds from now on."""


@dataclass(frozen=True, slots=True)
class FixedConcurrency:
    """`max_inflight` rollouts over all endpoints, in even shares. A lost endpoint takes its share with it."""

    max_inflight: int

    def __post_init__(self) -> None:
        _check_bounds(1, self.max_inflight)

    def bounds(self, endpoints: int) -> list[tuple[int, int]]:
        """The least and the most for each endpoint."""
        return [(share, share) for share in even_shares(self.max_inflight, endpoints)]

    def controllers(self, endpoints: int) -> list[ConcurrencyController]:
        """One controller per endpoint."""
        return [FixedController(share) for share, _ in self.bounds(endpoints)]


@dataclass(frozen=True, slots=True)
class AdaptiveConcurrency:
    """Between `min_inflight` and `max_inflight` rollouts over all endpoints, each endpoint steered by itself.

    Growth stops at `grow_below` of the cache, trimming starts at `trim_above`; a queue counts as lasting after
    `queue_patience` readings in a row. `probe_s` is the pause between steps past the level that last did not fit; after
    `stale_s` without a reading, preemptions are counted afresh.
    """

    min_inflight: int
    max_inflight: int
    start_inflight: int | None = None
    grow_below: float = 0.80
    trim_above: float = 0.92
    queue_patience: int = 3
    probe_s: float = 60.0
    stale_s: float = 30.0

    def __post_init__(self) -> None:
        _check_bounds(self.min_inflight, self.max_inflight)
        if not 0.0 < self.grow_below <= self.trim_above <= 1.0:
            raise ValueError(
                f"grow_below and trim_above must satisfy 0 < grow_below <= trim_above <= 1, "
                f"got {self.grow_below} and {self.trim_above}"
            )

    def bounds(self, endpoints: int) -> list[tuple[int, int]]:
        """The least and the most for each endpoint."""
        lows, highs = even_shares(self.min_inflight, endpoints), even_shares(self.max_inflight, endpoints)
        return list(zip(lows, highs, strict=True))

    def controllers(self, endpoints: int) -> list[ConcurrencyController]:
        """One controller per endpoint."""
        starts = even_shares(self.start_inflight or self.min_inflight, endpoints)
        return [
            AdaptiveController(self, low=low, high=high, start=start)
            for (low, high), start in zip(self.bounds(endpoints), starts, strict=True)
        ]


class FixedController:
    """A limit that stays."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    @property
    def limit(self) -> int:
        return self._limit

    def observe(self, metrics: EngineMetrics | None, *, inflight: int, now: float) -> None:
        """Nothing that an engine says changes a fixed limit."""

    def reset(self) -> None:
        """Nothing to forget."""

    def resize(self, low: int, high: int) -> None:
        self._limit = high


_GROW_FAST = 0.5
_GROW_STEP = 0.03
_TRIM_STEP = 0.06
_CUT = 0.75
_PREEMPTED_CEILING = 0.9
_QUEUE_SHARE = 0.05  # a shorter queue is what arrivals look like between two scheduling rounds
_USED = 0.9  # the limit counts as used from this share on: placement keeps whole groups together


@dataclass(slots=True)
class AdaptiveController:
    """Steers one endpoint's limit; see the module's docstring for the rules."""

    options: AdaptiveConcurrency
    low: int
    high: int
    start: int
    _limit: float = field(init=False)
    _fast: bool = field(default=True, init=False)
    _ceiling: float = field(default=math.inf, init=False)
    _probe_at: float = field(default=-math.inf, init=False)
    _preemptions: int | None = field(default=None, init=False)
    _queued: int = field(default=0, init=False)
    _seen_at: float = field(default=-math.inf, init=False)

    def __post_init__(self) -> None:
        self._limit = float(min(max(self.start, self.low), self.high))

    @property
    def limit(self) -> int:
        return int(self._limit)

    def reset(self) -> None:
        """The engine was restarted: counters begin again, the level it can carry is still the best guess."""
        self._preemptions = None
        self._queued = 0

    def resize(self, low: int, high: int) -> None:
        """The limit stays where it is, as far as the new bounds allow."""
        self.low, self.high = low, high
        self._set(self._limit)

    def observe(self, metrics: EngineMetrics | None, *, inflight: int, now: float) -> None:
        """Take one reading and move the limit at most one step."""
        if metrics is None:
            return  # frozen: nothing is known
        if now - self._seen_at > self.options.stale_s:
            # What happened while nothing was read belongs to no limit of ours: begin to count again.
            self.reset()
        self._seen_at = now
        preempted = self._preemptions is not None and metrics.preemptions > self._preemptions
        self._preemptions = metrics.preemptions
        queued = metrics.waiting > _QUEUE_SHARE * (metrics.running + metrics.waiting)
        self._queued = self._queued + 1 if queued else 0
        if inflight > self.limit:
            return  # the last decrease has not taken effect
        level = min(
            self._limit, float(inflight)
        )  # what did not fit is what was in flight, not what was allowed
        if preempted:
            self._decrease(level * _CUT, ceiling=level * _PREEMPTED_CEILING, now=now)
        elif self._queued >= self.options.queue_patience:
            step = min(max(level * _TRIM_STEP, metrics.waiting / 2), level * (1.0 - _CUT))
            self._decrease(level - max(1.0, step), ceiling=level, now=now)
        elif metrics.cache_usage > self.options.trim_above:
            self._decrease(level - max(1.0, level * _TRIM_STEP), ceiling=level, now=now)
        elif metrics.waiting == 0 and inflight >= math.floor(_USED * self.limit):
            self._grow(metrics.cache_usage, now)

    def _decrease(self, target: float, *, ceiling: float, now: float) -> None:
        self._fast = False
        self._queued = 0  # a further step down needs a queue that lasts as long again
        self._ceiling = min(self._ceiling, ceiling)
        self._probe_at = now + self.options.probe_s
        self._set(target)

    def _grow(self, usage: float, now: float) -> None:
        if usage >= self.options.grow_below:
            return
        step = self._limit * (_GROW_FAST if self._fast else _GROW_STEP)
        if usage > 0.0:
            # Cache use follows the limit with a delay: no step whose use, once it has come, would be too much.
            step = min(step, self._limit * (self.options.grow_below / usage - 1.0))
        step = max(1.0, step)
        if self._limit + step >= self._ceiling:
            # This level did not fit before; the work may have changed, so it is tried again now and then.
            if now < self._probe_at:
                return
            self._probe_at = now + self.options.probe_s
            self._ceiling = max(self._ceiling, self._limit + 2 * step)
        self._set(self._limit + step)

    def _set(self, limit: float) -> None:
        self._limit = min(max(limit, float(self.low)), float(self.high))


def _check_bounds(low: int, high: int) -> None:
    if not 1 <= low <= high:
        raise ValueError(f"min_inflight and max_inflight must satisfy 1 <= min <= max, got {low} and {high}")
