"""A world in virtual time around the real dispatch core, assembly, buffer, mix and source: no asyncio, no clock.

Latencies, losses and the trainer's speed are drawn from a seeded generator; after every event the ledger must balance.
"""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from orchestrator.dispatch.staleness import Staleness

from envs.wire import Result, RolloutHeader
from orchestrator.buffer import BatchBuffer
from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.dispatch.ledger import Lane, Ledger
from orchestrator.dispatch.ports import Cancel, GroupCompleted, GroupDropped, Rules, Start, TrainRules
from orchestrator.dispatch.work import Attempt, PendingGroup
from orchestrator.facts import Facts
from orchestrator.groups.group import Batch, Group
from orchestrator.groups.scoring import mean
from orchestrator.mix import build_mix
from orchestrator.sinks.eval_sink import Evals
from orchestrator.sinks.train_sink import TrainSink
from orchestrator.tasks.source import SourceEnv, TrainSource


def make_data(rewards: list[float], length: int = 3) -> Result:
    """What came back: one short sequence per rollout."""
    n = len(rewards)
    return Result(
        id=0,
        rollouts=[RolloutHeader(reward, [length], "stop", False, {}, {}) for reward in rewards],
        tokens=np.arange(n * length, dtype=np.int32),
        mask=np.ones(n * length, dtype=np.uint8),
        logprobs=np.zeros(n * length, dtype=np.float32),
        transcript=b"\x90",
    )


@dataclass
class Port:
    """An env whose servers take everything while they are up."""

    name: str
    group_scored: bool = False
    available: bool = True

    def has_room(self, count: int) -> bool:
        return self.available


@dataclass
class Endpoint:
    url: str = "http://here/v1"
    inflight: int = 0


@dataclass
class Pool:
    """One endpoint that takes `limit`."""

    limit: int
    endpoint: Endpoint = field(default_factory=Endpoint)
    healthy: bool = True

    def acquire(self, n: int, prefer: Any = None) -> Endpoint | None:
        if not self.healthy:
            return None
        self.endpoint.inflight += n
        return self.endpoint

    def release(self, endpoint: Endpoint, n: int) -> None:
        endpoint.inflight -= n
        assert endpoint.inflight >= 0


class Record:
    """Remembers what would be written; a batch is durable at once, or when its callback in `waiting` is called."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.at_once = True
        self.waiting: list[Callable[[], None]] = []
        self.groups: list[Group] = []
        self.tasks: list[tuple[str, int, str]] = []
        self.batches: list[Batch] = []
        self.evicted: list[Group] = []

    def record_group(self, group: Group) -> None:
        self.events.append(f"group {group.id}")
        self.groups.append(group)

    def record_task(self, env: str, position: int, outcome: str) -> None:
        self.tasks.append((env, position, outcome))

    def record_batch(self, batch: Batch, on_durable: Callable[[], None]) -> None:
        self.events.append(f"batch {batch.step}")
        self.batches.append(batch)
        if self.at_once:
            on_durable()
        else:
            self.waiting.append(on_durable)

    def evict_group(self, group: Group, reason: str) -> None:
        self.evicted.append(group)

    def prune(self, env: str, low: int) -> None: ...


@dataclass
class Behaviour:
    """How an env's rollouts go: latency in seconds, probability of a failure, of a retryable one among them."""

    latency: Callable[[random.Random], float] = lambda rng: rng.expovariate(1.0)
    loss: float = 0.0
    retryable: float = 0.5
    group_scored: bool = False


class World:
    """Runs the core against behaviours and a trainer of a given speed."""

    def __init__(
        self,
        behaviours: dict[str, Behaviour],
        *,
        seed: int = 0,
        batch_size: int = 16,
        group_size: int = 4,
        group_sizes: dict[str, int] | None = None,
        slack: int = 0,
        max_inflight: int = 64,
        max_versions: int = 2,
        mode: str = "pace",
        train_s: float = 1.0,
        keep_equal_rewards: bool = True,
        evals: Evals | None = None,
        train_rules: dict[str, dict[str, Any]] | None = None,
        max_steps: int | None = None,
        **rules: Any,
    ) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self.behaviours = behaviours
        self.train_s = train_s
        self.ports = {name: Port(name, group_scored=b.group_scored) for name, b in behaviours.items()}
        self.eval_ports: dict[str, Port] = {}
        self.ledger = Ledger()
        self.pool = Pool(max_inflight)
        self.staleness = Staleness(batch_size=batch_size, max_versions=max_versions, mode=mode, slack=slack)  # type: ignore[arg-type]  # parametrised by tests
        names = list(behaviours)
        sizes = group_sizes or dict.fromkeys(names, group_size)
        self.mix = build_mix("flow", names, [1.0] * len(names), rng=random.Random(seed), breaker=False)
        self.source = TrainSource([SourceEnv(name, "train", None) for name in names], mix=self.mix, seed=seed)
        self.buffer: BatchBuffer[Group] = BatchBuffer(batch_size, envs=names, order="version")
        self.record = Record()
        self.facts = Facts(
            dict.fromkeys(names, 1 / len(names)), ledger=self.ledger, staleness=self.staleness, now=0.0
        )
        self.offered: list[Batch] = []
        self.trained: list[tuple[int, int, Batch]] = []
        self.assembly = TrainSink(
            buffer=self.buffer,
            batch_size=batch_size,
            max_steps=max_steps,
            group_sizes=sizes,
            count_tokens=False,
            keep_transcripts=False,
            staleness=self.staleness,
            tasks=self.source,
            mix=self.mix,
            record=self.record,
            facts=self.facts,
            advantage=mean,
            keep_equal_rewards=keep_equal_rewards,
            max_barren_batches=1000,
            available=lambda: frozenset(name for name, port in self.ports.items() if port.available),
            offer=self.offered.append,
        )
        self.evals = evals or Evals([])
        self.eval_results: list[dict[str, Any]] = []
        defaults: dict[str, Any] = {
            "rollout_timeout_s": 1e6,
            "group_timeout_s": 1e7,
            "max_attempts": 3,
            "backoff_s": 0.1,
            "max_backoff_s": 1.0,
        }
        self.core = Dispatcher(
            train={
                name: TrainRules(
                    port=self.ports[name], group_size=sizes[name], **(train_rules or {}).get(name, {})
                )
                for name in names
            },
            evals=self.eval_ports,
            rules=Rules(**(defaults | rules)),
            source=self.source,
            eval_source=self.evals,
            mix=self.mix,
            placement=self.pool,
            staleness=self.staleness,
            ledger=self.ledger,
            queued=lambda: self.buffer.sequences,
            starved=lambda: (),
            expected_size=sizes.__getitem__,
            now=0.0,
        )
        self.starts: list[Attempt] = []
        self.cancels: list[Attempt] = []
        self.peak = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._training = False

    def add_eval_env(self, name: str, behaviour: Behaviour) -> None:
        self.behaviours[name] = behaviour
        self.eval_ports[name] = Port(name, group_scored=behaviour.group_scored)
        self.core._ready[Lane.EVAL, name] = type(next(iter(self.core._ready.values())))()

    def at(self, delay: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._count), event))

    def turn(self) -> None:
        """Let the core act and carry out what it says."""
        while True:
            self.core.stuck = self.assembly.stuck
            more = self.core.advance(self.now)
            again = self._perform()
            assert self.ledger.balances()
            if not more and not again:
                break
        self._train()
        self.peak = max(self.peak, self.ledger.total_inflight)

    def _perform(self) -> bool:
        worked = False
        while instructions := self.core.drain():
            for instruction in instructions:
                worked = True
                match instruction:
                    case Start(attempt):
                        self.starts.append(attempt)
                        self._start(attempt)
                    case Cancel(attempt):
                        self.cancels.append(attempt)
                    case GroupCompleted(group) if group.lane is Lane.TRAIN:
                        self.assembly.completed(group, self.now)
                    case GroupCompleted(group):
                        result = self.evals.finished(group, self.now)
                        if result is not None:
                            self.eval_results.append(result)
                    case GroupDropped(group, reason, again) if group.lane is Lane.TRAIN:
                        self.assembly.dropped(group, reason, again=again, now=self.now)
                assert self.ledger.balances()
        return worked

    def _start(self, attempt: Attempt) -> None:
        behaviour = self.behaviours[attempt.group.env]
        fails = self.rng.random() < behaviour.loss
        retryable = self.rng.random() < behaviour.retryable

        def end() -> None:
            if fails:
                self.core.fail(attempt, "broken", retryable=retryable, lost=False, now=self.now)
            else:
                self.core.finish(
                    attempt, make_data([self.rng.random() for _ in range(attempt.count)]), self.now
                )

        self.at(behaviour.latency(self.rng), end)

    def _train(self) -> None:
        if self._training or not self.offered:
            return
        batch = self.offered.pop(0)
        self._training = True
        trained_on = self.staleness.published

        def done() -> None:
            self._training = False
            self.trained.append((batch.step, trained_on, batch))
            self.staleness.publish(batch.step)
            self.staleness.serving = batch.step
            self.staleness.trained = batch.step
            if self.staleness.mode == "drop":
                self.core.drop_stale(self.now)
                self._perform()
            self.assembly.form(self.now)

        self.at(self.train_s, done)

    def run(self, *, until: Callable[[], bool], max_events: int = 200_000) -> bool:
        """Run until a condition holds; False when nothing can happen any more or the events are used up."""
        self.turn()
        for _ in range(max_events):
            if until():
                return True
            due = self.core.next_event_at(self.now)
            if self._events and (due is None or self._events[0][0] <= due):
                self.now, _, event = heapq.heappop(self._events)
                event()
                self._perform()
            elif due is not None and due < 1e6:
                self.now = max(self.now, due)
            else:
                return until()
            self.turn()
        return until()

    def steps(self) -> int:
        return len(self.trained)

    def ages(self) -> Counter[int]:
        """Age in versions of every sequence that was trained on."""
        ages: Counter[int] = Counter()
        for _, version, batch in self.trained:
            for group in batch.groups:
                ages[version - group.version] += group.size
        return ages


def open_group(world: World) -> PendingGroup:
    """The oldest open group."""
    return next(iter(world.core._groups))
