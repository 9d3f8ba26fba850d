"""What would be delivered, in virtual time: the real strategies and the real batch buffer, pretended rollouts.

Rollouts take log-normal times (or fixed ones) and are lost with a given probability; as many as there are slots
are in flight, like in a run that never waits for its trainer. A group's rollouts start as slots become free, each
frees its slot by itself, and the group is reported when the last one ends. Dispatch, staleness and the trainer are left
out; `world` has them. The same scenario and seed give the same result. It knows nothing of configuration files or
terminals.
"""

import heapq
import itertools
import math
import random
import statistics
from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.buffer import BatchBuffer
from orchestrator.errors import StalledError
from orchestrator.mix.breaker import Change, CircuitBreaker
from orchestrator.mix.delivered import largest_deviation
from orchestrator.mix.strategy import EnvMixStrategy, normalised

# A simulation without a batch for this many times a batch and all slots will not see one any more.
PATIENCE = 200

MixBuilder = Callable[[Sequence[str], Sequence[float], random.Random], EnvMixStrategy]


@dataclass(frozen=True, slots=True)
class SimEnv:
    """How an env behaves. `latency_s` is the mean; `loss` the probability of not reaching the buffer."""

    name: str
    weight: float
    latency_s: float = 1.0
    loss: float = 0.0
    group_size: int = 1
    max_inflight: int | None = None
    minimum: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_s) and self.latency_s > 0):
            raise ValueError(f'env "{self.name}": a latency of {self.latency_s} s is not a positive number')
        if not 0 <= self.loss <= 1:
            raise ValueError(f'env "{self.name}": a loss of {self.loss} is not between 0 and 1')


@dataclass(frozen=True, slots=True)
class Regime:
    """From `after` delivered sequences on, these envs have these latencies and losses."""

    after: int
    envs: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run to be imagined. It ends after `steps` batches, or at `duration_s` if that comes first.

    `spread` is the standard deviation of the logarithm of a latency; 0 makes latencies fixed. `lose_groups`:
    a group is lost as a whole (as filters do) or each of its rollouts by itself.
    """

    envs: Sequence[SimEnv]
    max_inflight: int = 256
    batch_size: int = 256
    steps: int = 40
    duration_s: float = math.inf
    spread: float = 1.0
    lose_groups: bool = True
    regime: Regime | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SimBatch:
    """A batch: when it was complete and what is in it."""

    time_s: float
    counts: Mapping[str, int]


@dataclass(slots=True)
class MixResult:
    """What a simulated run delivered. `deliveries` holds the index of the env of each delivered sequence."""

    env_names: tuple[str, ...]
    targets: dict[str, float]
    deliveries: "array[int]" = field(default_factory=lambda: array("H"))
    batches: list[SimBatch] = field(default_factory=list)
    rollouts: int = 0
    time_s: float = 0.0
    quarantines: list[tuple[float, str, str]] = field(default_factory=list)

    def deviation(self, start: int, stop: int) -> float:
        """Largest deviation from a target among the deliveries in this range, in percentage points."""
        counts = Counter(self.deliveries[start:stop])
        total = max(1, counts.total())
        shares = {name: counts[index] / total for index, name in enumerate(self.env_names)}
        return largest_deviation(shares, self.targets)

    def batch_deviations(self, first: int = 0, last: int | None = None) -> list[float]:
        """Largest deviation within each batch, in percentage points; batches count from 0."""
        found = []
        for batch in self.batches[first:last]:
            total = sum(batch.counts.values())
            found.append(largest_deviation({n: c / total for n, c in batch.counts.items()}, self.targets))
        return found

    def shares(self) -> dict[str, float]:
        """Share of each env in all batches."""
        counts = Counter[str]()
        for batch in self.batches:
            counts.update(batch.counts)
        total = max(1, counts.total())
        return {name: counts[name] / total for name in self.env_names}

    def step_times(self) -> list[float]:
        """Seconds from each batch to the next; the first counts from the start."""
        times = [0.0, *(batch.time_s for batch in self.batches)]
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    @property
    def rollouts_per_delivered(self) -> float:
        return self.rollouts / len(self.deliveries) if self.deliveries else math.inf

    @property
    def delivered_per_s(self) -> float:
        return len(self.deliveries) / self.time_s if self.time_s else 0.0


def simulate(scenario: Scenario, build: MixBuilder) -> MixResult:
    """Run a scenario with the strategy that `build` makes."""
    return _Run(scenario, build).run()


class _Group:
    __slots__ = ("accepted", "env", "left")

    def __init__(self, env: SimEnv, accepted: int) -> None:
        self.env = env
        self.accepted = accepted
        self.left = env.group_size


class _Run:
    """The state of one simulated run."""

    def __init__(self, scenario: Scenario, build: MixBuilder) -> None:
        names = [env.name for env in scenario.envs]
        shares = normalised(names, [env.weight for env in scenario.envs])
        self.scenario = scenario
        self.mix = build(names, shares, random.Random(f"mix {scenario.seed}"))
        # Latencies and losses have a stream of their own per env: strategies meet the same fates.
        self.fate = {name: random.Random(f"fate {scenario.seed} {name}") for name in names}
        self.envs = {env.name: env for env in scenario.envs}
        self.index = {name: index for index, name in enumerate(names)}
        minimums = {env.name: env.minimum for env in scenario.envs if env.minimum}
        self.buffer = BatchBuffer[tuple[str, int]](scenario.batch_size, minimums=minimums)
        self.outcome = MixResult(tuple(names), dict(zip(names, shares, strict=True)))
        self.capped = {env.name for env in scenario.envs if env.max_inflight is not None}
        self.inflight = Counter[str]()
        self.running = 0
        self.now = 0.0
        self.events: list[tuple[float, int, _Group]] = []
        self.waiting: deque[_Group] = deque()
        self.regime = scenario.regime
        self.rollouts_at_batch = 0
        self.patience = PATIENCE * (scenario.batch_size + scenario.max_inflight)

    def run(self) -> MixResult:
        scenario, outcome = self.scenario, self.outcome
        while len(outcome.batches) < scenario.steps:
            self._fill()
            if not self.events:
                raise StalledError("no env may start a group: each cap is below its group size")
            self.now, _, group = heapq.heappop(self.events)
            if self.now > scenario.duration_s:
                break
            self._end_rollout(group)
            if outcome.rollouts - self.rollouts_at_batch > self.patience:
                raise StalledError(f"no batch after {self.patience:,} more rollouts: {self.buffer.explain()}")
        outcome.time_s = min(self.now, scenario.duration_s)
        return outcome

    def _fill(self) -> None:
        """Use every free slot: for what is left to start of the open group, then for the next group."""
        while self.running < self.scenario.max_inflight:
            if self.waiting:
                self._start(self.waiting.popleft())
                continue
            name = self._pick()
            if name is None:
                return
            self._open(self.envs[name])

    def _pick(self) -> str | None:
        eligible = None
        if self.capped:
            eligible = {
                env.name
                for env in self.scenario.envs
                if env.weight > 0
                and (env.max_inflight is None or self.inflight[env.name] + env.group_size <= env.max_inflight)
            }
            if not eligible:
                return None
        if isinstance(self.mix, CircuitBreaker):
            return self.mix.try_pick(eligible)
        return self.mix.pick(eligible)

    def _open(self, env: SimEnv) -> None:
        fate, size = self.fate[env.name], env.group_size
        if self.scenario.lose_groups:
            accepted = 0 if fate.random() < env.loss else size
        else:
            accepted = sum(fate.random() >= env.loss for _ in range(size))
        self.waiting.extend([_Group(env, accepted)] * size)
        self.mix.on_dispatch(env.name, size, now=self.now)
        self.inflight[env.name] += size

    def _start(self, group: _Group) -> None:
        took, spread = group.env.latency_s, self.scenario.spread
        if spread:
            took *= math.exp(self.fate[group.env.name].gauss(-spread * spread / 2, spread))
        self.outcome.rollouts += 1
        heapq.heappush(self.events, (self.now + took, self.outcome.rollouts, group))
        self.running += 1

    def _end_rollout(self, group: _Group) -> None:
        name = group.env.name
        self.running -= 1
        self.inflight[name] -= 1
        group.left -= 1
        if group.left:
            return
        self.mix.on_finish(name, group.env.group_size, group.accepted, now=self.now)
        if group.accepted:
            self._deliver(name, group.accepted)
        if isinstance(self.mix, CircuitBreaker):
            for transition in self.mix.drain_transitions():
                self.buffer.set_available(transition.env, transition.change is Change.RESTORED)
                self.outcome.quarantines.append((self.now, transition.env, transition.change.value))

    def _deliver(self, name: str, size: int) -> None:
        outcome = self.outcome
        outcome.deliveries.extend([self.index[name]] * size)
        self.buffer.add((name, size), env=name, size=size)
        if self.buffer.sequences >= self.scenario.batch_size:
            batch = self.buffer.take()
            if batch is not None:
                counts = Counter[str]()
                for env, sequences in batch:
                    counts[env] += sequences
                outcome.batches.append(SimBatch(self.now, counts))
                self.rollouts_at_batch = outcome.rollouts
        if self.regime is not None and len(outcome.deliveries) >= self.regime.after:
            for env_name, (latency_s, loss) in self.regime.envs.items():
                self.envs[env_name] = replace(self.envs[env_name], latency_s=latency_s, loss=loss)
            self.regime = None


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed, interpolated."""
    if not values:
        return math.nan
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]
