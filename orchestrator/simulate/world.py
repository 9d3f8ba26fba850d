"""A run in virtual time: the real rules of `orchestrator.run`, driven by a queue of events instead of asyncio.

Environments, inference servers, journal and trainer are imagined: they have latencies, losses, rooms and deaths drawn
from a seeded generator, and speak to the run through the same ports as the real ones. Nothing of the rules is
imitated. `World.kill` throws the process away and goes on from what its journal holds, as a restart would.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Mapping, MutableSequence
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
from orchestrator.run.ports import DrainRun, EndRun, EvaluationFinished, LoadWeights, RunJournal
from orchestrator.run.resume import JournaledWeights, resume
from orchestrator.run.run import Run
from orchestrator.run.settings import RunSettings
from orchestrator.simulate.journal import MemoryJournal
from orchestrator.simulate.neighbours import Behaviour, Draw, VirtualEnv, VirtualPool
from orchestrator.sinks.archive import Archive, NoArchive


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
        envs: Mapping[str, VirtualEnv] | None = None,
        pool: VirtualPool | None = None,
        record: RunJournal | None = None,
    ) -> None:
        """`envs`, `pool` and `record`: instead of those that the other arguments describe."""
        self.settings = settings
        self.behaviours = dict(behaviours)
        self.now = 0.0
        self.rng = random.Random(seed)
        self._archive = archive or NoArchive()
        self._train_s, self._load_s, self._publish_every = train_s, load_s, publish_every
        self.envs = envs or {
            name: VirtualEnv(
                name, servers=servers, capacity=capacity, group_scored=behaviours[name].group_scored
            )
            for name in behaviours
        }
        self.pool = pool or VirtualPool(max_inflight)
        self.journal = MemoryJournal()
        self._record = record
        self.trained: MutableSequence[tuple[int, int, Batch]] = []
        """Step, version that it was trained on, batch."""
        self.starts: MutableSequence[Attempt] = []
        self.cancels: MutableSequence[Attempt] = []
        self.ended = ""
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._count = itertools.count()
        self._life = 0
        self._offered: dict[int, Batch] = {}
        self._training = False
        self._loading = False
        self._to_load: LoadWeights | None = None
        self._drains = ""
        self._room = False
        """Whether a cancelled attempt has given its room back, of which real servers tell the run."""
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
            journal=self._record or self.journal,
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
            self._room = False
            more = self.run.advance(self.now)
            self._perform()
            more = more or self._room
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
                    self._cancel(attempt)
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

    def _cancel(self, attempt: Attempt) -> None:
        self._room = True
        self.envs[attempt.group.env].release(attempt.server, attempt)

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
