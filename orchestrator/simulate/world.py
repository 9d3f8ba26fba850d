"""A run in virtual time: the real rules of `orchestrator.run`, driven by a queue of events instead of asyncio.

Environments, inference servers, journal and trainer are imagined: they have latencies, losses, rooms and deaths drawn
from a seeded generator, and speak to the run through the same ports as the real ones. Nothing of the rules is
imitated. `World.kill` throws the process away and goes on from what its journal holds, as a restart would.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from envs.wire import Failure, Result, RolloutHeader
from orchestrator.dispatch.ports import CancelAttempt, StartAttempt
from orchestrator.dispatch.work import Attempt
from orchestrator.groups.group import Batch
from orchestrator.run.build import build_run
from orchestrator.run.commands import Origin, parse_command
from orchestrator.run.control import Reply
from orchestrator.run.ports import DrainRun, EndRun, EvaluationFinished, LoadWeights
from orchestrator.run.resume import JournaledWeights, resume
from orchestrator.run.run import Run
from orchestrator.run.settings import RunSettings
from orchestrator.simulate.journal import MemoryJournal
from orchestrator.sinks.archive import Archive, NoArchive

Draw = Callable[[random.Random], float]


@dataclass(slots=True)
class Behaviour:
    """How an env's rollouts go.

    `latency` is in seconds, `loss` the probability of a failure, `retryable` that of a retryable one among those;
    `sequences` draws how many sequences a rollout yields, `length` the tokens of each, `reward` its reward.
    """

    latency: Draw = lambda rng: rng.expovariate(1.0)
    loss: float = 0.0
    retryable: float = 0.5
    group_scored: bool = False
    sequences: Callable[[random.Random], int] = lambda rng: 1
    length: Callable[[random.Random], int] = lambda rng: 3
    reward: Draw = lambda rng: rng.random()


@dataclass(slots=True, eq=False)
class Server:
    """One imagined env server."""

    capacity: int
    ready: bool = True
    used: int = 0
    requests: dict[Attempt, None] = field(default_factory=dict)


class VirtualEnv:
    """An env's servers."""

    def __init__(self, name: str, *, servers: int, capacity: int, group_scored: bool) -> None:
        self.name = name
        self.group_scored = group_scored
        self._servers = [Server(capacity) for _ in range(servers)]
        self.restarts = 0

    @property
    def available(self) -> bool:
        return any(server.ready for server in self._servers)

    @property
    def ready_servers(self) -> int:
        return sum(server.ready for server in self._servers)

    @property
    def servers(self) -> int:
        return len(self._servers)

    def has_room(self, count: int) -> bool:
        return any(_has_room(server, count) for server in self._servers)

    def reserve(self, count: int) -> Server | None:
        free = [server for server in self._servers if _has_room(server, count)]
        if not free:
            return None
        server = min(free, key=lambda server: server.used)
        server.used += count
        return server

    def release(self, server: Server, attempt: Attempt) -> None:
        if attempt in server.requests:
            del server.requests[attempt]
            server.used -= attempt.count

    def kill(self, number: int) -> list[Attempt]:
        """A server dies; returns what was on it."""
        server = self._servers[number]
        lost, server.requests = list(server.requests), {}
        server.used, server.ready = 0, False
        self.restarts += 1
        return lost

    def revive(self, number: int) -> None:
        self._servers[number].ready = True


def _has_room(server: Server, count: int) -> bool:
    return server.ready and (server.used == 0 or server.used + count <= server.capacity)


@dataclass(slots=True, eq=False)
class VirtualEndpoint:
    """An imagined inference server."""

    url: str = "http://virtual/v1"
    healthy: bool = True
    inflight: int = 0
    version: int = 0
    version_newest: int = 0
    error: str = ""
    leaving: bool = False


class VirtualPool:
    """Inference servers that take `max_inflight` together; they come and go at once."""

    def __init__(self, max_inflight: int) -> None:
        self._max_inflight = max_inflight
        self.endpoints: list[VirtualEndpoint] = [VirtualEndpoint()]

    @property
    def endpoint(self) -> VirtualEndpoint:
        """The first of them, where there is one."""
        return self.endpoints[0]

    @property
    def limit(self) -> int:
        return self._max_inflight if self._ready() else 0

    def acquire(self, n: int, prefer: Any = None) -> VirtualEndpoint | None:
        ready = self._ready()
        chosen = prefer if prefer in ready else min(ready, key=lambda one: one.inflight, default=None)
        if chosen is not None:
            chosen.inflight += n
        return chosen

    def release(self, endpoint: VirtualEndpoint, n: int) -> None:
        endpoint.inflight -= n
        self._let_go(endpoint)

    def note_success(self, endpoint: Any) -> None: ...
    def note_failure(self, endpoint: Any, kind: str) -> None: ...

    def explain(self) -> str:
        return "" if self._ready() else "it is down"

    def refuse_max_inflight(self, value: int) -> str:
        return "" if value >= 1 else f"{value} is below 1"

    def set_max_inflight(self, value: int) -> None:
        self._max_inflight = value

    def refuse_add(self, url: str) -> str:
        return "it is there" if any(one.url == url and not one.leaving for one in self.endpoints) else ""

    def add_endpoint(self, url: str) -> None:
        for one in self.endpoints:
            if one.url == url:
                one.leaving = False
                return
        like = self.endpoints[0]
        self.endpoints.append(replace(like, url=url, inflight=0, leaving=False))

    def refuse_remove(self, url: str) -> str:
        others = [one for one in self.endpoints if one.url != url and not one.leaving]
        there = any(one.url == url and not one.leaving for one in self.endpoints)
        return "" if others and there else "it is the last one, or not there"

    def remove_endpoint(self, url: str) -> None:
        for one in list(self.endpoints):
            if one.url == url:
                one.leaving = True
                self._let_go(one)

    def _ready(self) -> list[VirtualEndpoint]:
        return [one for one in self.endpoints if one.healthy and not one.leaving]

    def _let_go(self, endpoint: VirtualEndpoint) -> None:
        if endpoint.leaving and not endpoint.inflight and endpoint in self.endpoints:
            self.endpoints.remove(endpoint)


class World:
    """Drives a run against behaviours and a trainer of a given speed."""

    def __init__(
        self,
        settings: RunSettings,
        behaviours: Mapping[str, Behaviour],
        *,
        seed: int = 0,
        max_inflight: int = 64,
        servers: int = 1,
        capacity: int = 1 << 20,
        train_s: Draw = lambda rng: 1.0,
        load_s: Draw = lambda rng: 0.0,
        publish_every: int = 1,
        archive: Archive | None = None,
    ) -> None:
        self.settings = settings
        self.behaviours = dict(behaviours)
        self.now = 0.0
        self.rng = random.Random(seed)
        self._archive = archive or NoArchive()
        self._train_s, self._load_s, self._publish_every = train_s, load_s, publish_every
        self.envs = {
            name: VirtualEnv(
                name, servers=servers, capacity=capacity, group_scored=behaviours[name].group_scored
            )
            for name in behaviours
        }
        self.pool = VirtualPool(max_inflight)
        self.journal = MemoryJournal()
        self.trained: list[tuple[int, int, Batch]] = []
        """Step, version that it was trained on, batch."""
        self.starts: list[Attempt] = []
        self.cancels: list[Attempt] = []
        self.ended = ""
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._count = itertools.count()
        self._life = 0
        self._offered: dict[int, Batch] = {}
        self._training = False
        self._loading = False
        self._to_load: LoadWeights | None = None
        self._drains = ""
        self.run = self._build()

    # --- life --------------------------------------------------------------------------------------------------------

    def _build(self) -> Run:
        names = [env.name for env in self.settings.train]
        evals = [env.plan.env for env in self.settings.evals]
        return build_run(
            self.settings,
            train={name: self.envs[name] for name in names},
            evals={name: self.envs[name] for name in evals},
            pool=self.pool,
            journal=self.journal,
            archive=self._archive,
            offer=self._offer,
            now=self.now,
        )

    def kill(self) -> None:
        """The process dies; another one goes on from what the journal holds."""
        self._life += 1
        for env in self.envs.values():
            for number in range(env.servers):
                env.kill(number)
                env.revive(number)
        for endpoint in list(self.pool.endpoints):
            self.pool.release(endpoint, endpoint.inflight)
        self._offered.clear()
        self._training = self._loading = False
        self._to_load = None
        recovered = self.journal.recover()
        self.run = self._build()
        weights = JournaledWeights(recovered.state)
        resume(self.run, recovered, weights, recovered.evals)
        for endpoint in self.pool.endpoints:
            endpoint.version = endpoint.version_newest = weights.loaded
        for batch in recovered.batches:
            self._offer(batch)
        self.run.start(self.now)

    def play(self, *, until: Callable[[], bool], max_events: int = 200_000) -> bool:
        """Go on until a condition holds; False when nothing can happen any more or the events are used up."""
        if self.run.state.value == "starting":
            self.run.start(self.now)
        self.turn()
        for _ in range(max_events):
            if until():
                return True
            due = self.run.next_event_at(self.now)
            if self._events and (due is None or self._events[0][0] <= due):
                self.now, _, event = heapq.heappop(self._events)
                event()
            elif due is not None:
                self.now = max(self.now, due)
            else:
                return until()
            self.turn()
        return until()

    def turn(self) -> None:
        """Let the run decide, and carry out what it says, until it has nothing more to do at once."""
        if self.run.state.value == "starting":
            self.run.start(self.now)
        more = True
        while more:
            more = self.run.advance(self.now)
            self._perform()
        self._train()
        if self._drains and self.run.idle:
            self.run.end(self._drains)
            self._perform()

    def at(self, delay: float, event: Callable[[], object]) -> None:
        """Something will happen."""
        heapq.heappush(self._events, (self.now + delay, next(self._count), event))

    def in_this_life(self, delay: float, event: Callable[[], None]) -> None:
        """Something will happen, unless the process dies before."""
        life = self._life
        self.at(delay, lambda: event() if life == self._life else None)

    # --- what happens in it ------------------------------------------------------------------------------------------

    def kill_server(self, env: str, number: int, *, away_s: float) -> None:
        """An env server dies and is back after a while."""
        lost = self.envs[env].kill(number)
        failure = Failure(0, "server_lost", "it died", retryable=True)
        for attempt in lost:
            self.run.on_failure(attempt, failure, self.now, together=len(lost))
        self._perform()
        self.at(away_s, lambda: self.envs[env].revive(number))

    def lose_endpoint(self, *, away_s: float) -> None:
        """The inference servers go away for a while."""
        lost = list(self.pool.endpoints)
        for endpoint in lost:
            endpoint.healthy = False
            self.run.on_endpoint_lost(endpoint, self.now)
        self._perform()

        def back() -> None:
            for endpoint in lost:
                endpoint.healthy = True

        self.at(away_s, back)

    def tell(self, command: Mapping[str, Any], by: str = "test") -> Reply:
        """A person gives a command."""
        reply = self.run.on_control(parse_command(command), Origin(by, self.now), self.now)
        self._perform()
        return reply

    def _perform(self) -> None:
        for instruction in self.run.drain():
            match instruction:
                case StartAttempt(attempt):
                    self.starts.append(attempt)
                    self._start(attempt)
                case CancelAttempt(attempt):
                    self.cancels.append(attempt)
                    self.envs[attempt.group.env].release(attempt.server, attempt)
                case LoadWeights():
                    self._to_load = instruction
                    self._load()
                case EvaluationFinished():
                    pass
                case DrainRun(why):
                    self._drains = why
                    self.run.stop(self.now)
                case EndRun(why):
                    self.ended = why

    def _start(self, attempt: Attempt) -> None:
        attempt.server.requests[attempt] = None
        behaviour = self.behaviours[attempt.group.env]
        fails = self.rng.random() < behaviour.loss
        retryable = self.rng.random() < behaviour.retryable

        def end() -> None:
            if attempt.ended or attempt not in attempt.server.requests:
                return
            self.envs[attempt.group.env].release(attempt.server, attempt)
            if fails:
                self.run.on_failure(attempt, Failure(0, "broken", "it broke", retryable=retryable), self.now)
            else:
                self.run.on_result(attempt, self.make_result(behaviour, attempt.count), self.now)
            self._perform()

        self.in_this_life(behaviour.latency(self.rng), end)

    def make_result(self, behaviour: Behaviour, count: int) -> Result:
        """What a server would answer for `count` rollouts."""
        rng = self.rng
        headers = [
            RolloutHeader(
                behaviour.reward(rng),
                [behaviour.length(rng) for _ in range(behaviour.sequences(rng))],
                "stop",
                False,
                {},
                {},
            )
            for _ in range(count)
        ]
        return result_of(headers)

    def _offer(self, batch: Batch) -> None:
        self._offered[batch.step] = batch

    def _train(self) -> None:
        if self._training or not self._offered:
            return
        batch = self._offered.pop(min(self._offered))
        self._training = True
        trained_on = self.run.parts.versions.published

        def done() -> None:
            self._training = False
            self.trained.append((batch.step, trained_on, batch))
            if batch.step % self._publish_every == 0:
                self.run.on_publish(batch.step, f"step_{batch.step}", self.now)
            self.run.on_ack(batch.step, self.now)
            self._perform()

        self.in_this_life(self._train_s(self.rng), done)

    def _load(self) -> None:
        """One version after the other; what was asked for meanwhile and is not the newest is left out."""
        if self._to_load is not None and not self._loading:
            asked, self._to_load = self._to_load, None
            self._loading = True
            self.in_this_life(self._load_s(self.rng), partial(self._loaded, asked.version, asked.path))

    def _loaded(self, version: int, path: str | None) -> None:
        for endpoint in self.pool.endpoints:
            endpoint.version = endpoint.version_newest = version
        self._loading = False
        self.run.on_loaded(version, path, self.now)
        self._load()


def result_of(headers: list[RolloutHeader]) -> Result:
    """A result with made-up tokens for these rollouts."""
    total = sum(sum(header.lengths) for header in headers)
    return Result(
        0,
        headers,
        np.zeros(total, dtype=np.int32),
        np.ones(total, dtype=np.uint8),
        np.zeros(total, dtype=np.float32),
        b"\x90",
    )
