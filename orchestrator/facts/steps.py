"""What is known of one step: a record made when its batch is formed, kept in the journal with it, and read by everyone.

`metrics.jsonl`, trackers, the page and the display show these records; nobody counts anew. Plain data.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

ENDS = ("completed", "failed", "retryable", "cut")
"""How an attempt ended: with rollouts, with a failure that is final or may be asked again, or by others than itself."""
SLOWEST = "slowest"
"""In their place, for a group that completed: the time of the slowest of its attempts that brought rollouts."""

FINEST_S = 0.001
PER_OCTAVE = 16
"""Times of attempts are counted in steps of 1/16 octave from a millisecond on: each is right to about 2 %."""

BUCKETS = 24
"""Of the histogram of lengths: the last one has everything from 2**(BUCKETS - 1) tokens on."""


class Spread(msgspec.Struct):
    """A number over many rollouts or sequences."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class EnvStep(msgspec.Struct):
    """One env in one step. What is in the batch first, then what happened since the step before, in the batch or not."""

    sequences: int
    share: float
    target: float
    reward: float | None
    tokens: int
    length: Spread | None
    truncated: float
    """Share of its sequences that a length limit cut."""
    sampled_reward: float | None
    """Mean over all rollouts that were scored; those of groups that are not trained on are in it."""
    latency_s: Spread | None
    metrics: dict[str, float]
    outcomes: dict[str, int]
    dropped: dict[str, int]
    inflight: int
    quarantined: bool
    times: dict[str, dict[int, int]] = {}
    """How many attempts took how long, by how they ended (`ENDS`), and groups (`SLOWEST`); see `seconds_of`."""


class StepRecord(msgspec.Struct):
    """One step. `at`, `acknowledged_at` and `trainer` are added by who reads it from the journal."""

    step: int
    version: int
    seconds: float
    """Of the run's own time, earlier processes included, when the batch was formed."""
    groups: int
    sequences: int
    tokens: int
    reward: float
    sampled_reward: float | None
    length: Spread
    lengths: list[int]
    """Sequences shorter than 2, 4, 8, … tokens."""
    staleness: list[int]
    """Sequences of age 0, 1, 2, … in versions."""
    truncated: float
    filtered: float
    """Share of the rollouts since the step before whose group had equal rewards."""
    rollouts: int
    rollouts_per_s: float
    tokens_per_s: float
    time: dict[str, float]
    """Seconds since the step before, by what was waited for; see `interval.TIMES`."""
    envs: dict[str, EnvStep]
    at: float = 0.0
    acknowledged_at: float | None = None
    trainer: dict[str, float] = {}
    """What the trainer reported about the step."""
    trained_s: list[float] = []
    """How long the trainer had each batch that it was done with since the step before."""
    loaded_s: list[float] = []
    """How long the inference servers took for each version that they loaded since the step before."""


def time_step(seconds: float) -> int:
    """The step of a time on the scale of `EnvStep.times`."""
    return max(0, round(PER_OCTAVE * math.log2(seconds / FINEST_S))) if seconds > FINEST_S else 0


def seconds_of(step: float) -> float:
    """The time in the middle of such a step."""
    return float(FINEST_S * 2 ** (step / PER_OCTAVE))


def spread(values: "Sequence[float] | NDArray[np.float64]") -> Spread | None:
    """Mean and quantiles (the smallest value that so many do not exceed); None of nothing."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    n = len(ordered)
    if not n:
        return None
    p50, p90, p99 = (float(ordered[max(0, -(-n * share // 100) - 1)]) for share in (50, 90, 99))
    return Spread(float(ordered.mean()), p50, p90, p99, float(ordered[-1]))


def length_histogram(lengths: "NDArray[np.float64]") -> list[int]:
    """How many are below 2, 4, 8, …; as long as the longest needs."""
    places = np.minimum(np.log2(np.maximum(lengths, 1)).astype(np.int64), BUCKETS - 1)
    return np.bincount(places).tolist() if len(places) else []
