"""A whole run in virtual time, for what can be known before it is paid for: a `World` with stated or recorded surroundings.

The rules are those of `orchestrator.run`; what is added is how long things take, and what is measured beside the records of the
steps: how busy trainer and engines are, and how much is queued and in flight. A run that will form no batch any more is an
error that says what it waits for, in the words of the live run.
"""

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from envs.wire import Failure, Result, RolloutHeader
from orchestrator.dispatch.ledger import Lane
from orchestrator.dispatch.work import Attempt, PendingGroup
from orchestrator.errors import StalledError
from orchestrator.facts.steps import StepRecord
from orchestrator.run.settings import RunSettings
from orchestrator.run.waits import end_by_failing, failing_for, find_waits
from orchestrator.simulate.behaviour import EnvBehaviour, Member, Surroundings
from orchestrator.simulate.engines import Engine, Speeds
from orchestrator.simulate.journal import StepJournal
from orchestrator.simulate.neighbours import VirtualEndpoint, VirtualEnv, VirtualPool
from orchestrator.simulate.world import World

PATIENCE = 200
"""A run without a batch for this many times a batch and all slots will not see one any more."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where rollouts may be: in flight in all, on so many engines, and on the servers of each env (how many, room on each)."""

    max_inflight: int
    engines: int
    servers: Mapping[str, tuple[int, int]]
    stall_timeout_s: float
    """After this long with every env in quarantine the run ends."""


@dataclass(slots=True)
class Measured:
    """What the records of the steps do not say; areas are over time."""

    seconds: float = 0.0
    inflight_area: float = 0.0
    queue_area: float = 0.0
    queue_max: int = 0
    trainer_s: float = 0.0
    sampled: float = 0.0
    rollouts: int = 0
    sequences: int = 0


@dataclass(slots=True)
class _Content:
    """What a group's rollouts will be: their common place among all times, and those that no attempt has been given yet."""

    place: float
    left: list[Member]

    def take(self, attempt: Attempt, env: EnvBehaviour, fate: random.Random) -> list[Member]:
        """What an attempt will bring; rollouts of a group are drawn together."""
        count, group = attempt.count, attempt.group
        if len(self.left) < count:
            self.left = env.group(fate, max(count, group.size + group.extra))
        taken, self.left = self.left[:count], self.left[count:]
        return taken


class Rehearsal(World):
    """Drives a run to a number of steps, or to a time."""

    def __init__(self, settings: RunSettings, around: Surroundings, places: Places, *, seed: int) -> None:
        self._steps = StepJournal()
        self._around = around
        self._places = places
        # A stream of its own for each: configurations that are compared meet the same fates.
        self._fates = {name: random.Random(f"{seed}:fate:{name}") for name in around.envs}
        self._trainer_fate = random.Random(f"{seed}:trainer")
        self._tokens, self._mask = np.zeros(0, np.int32), np.ones(0, np.uint8)
        self._logprobs = np.zeros(0, np.float32)
        super().__init__(
            settings,
            {},
            seed=seed,
            publish_every=around.publish_every,
            train_s=self._draw_step,
            load_s=lambda rng: around.update_s.draw(self._trainer_fate),
            envs={
                name: VirtualEnv(
                    name, servers=servers, capacity=capacity, group_scored=around.envs[name].group_scored
                )
                for name, (servers, capacity) in places.servers.items()
            },
            pool=VirtualPool(places.max_inflight, places.engines),
            record=self._steps,
        )
        # Nobody looks at them here, and a million rollouts are many.
        self.starts, self.cancels, self.trained = deque(maxlen=0), deque(maxlen=0), deque(maxlen=0)
        self.measured = Measured()
        self._speeds = Speeds(around.tokens_per_s) if around.tokens_per_s else None
        self._engines = (
            {one: Engine(self._speeds, 0.0) for one in self.pool.endpoints} if self._speeds else {}
        )
        self._contents: dict[PendingGroup, _Content] = {}
        self._most_contents = 1_000
        self._sampling: dict[Attempt, int] = {}
        self._due: dict[VirtualEndpoint, float] = {}
        self._state = (0, 0)
        self._turns = 0
        self._formed_at_turn = 0

    @property
    def steps(self) -> list[StepRecord]:
        """The records so far."""
        return self._steps.steps

    def rehearse(self, *, steps: int, seconds: float) -> None:
        """Go on until so many batches are formed, or so much time has passed; StalledError where no batch comes."""
        patience = PATIENCE * (self.settings.batch.size + self._places.max_inflight) + 10_000
        formed = 0

        def over() -> bool:
            nonlocal formed
            if len(self.steps) > formed:
                formed, self._formed_at_turn = len(self.steps), self._turns
            stalled = self._turns - self._formed_at_turn > patience or bool(self._failing())
            return formed >= steps or self.now >= seconds or bool(self.ended) or stalled

        self.play(until=over, max_events=1 << 62)
        late = self.now >= seconds
        enough = formed >= steps or self.ended or (late and formed)
        if not enough:
            raise StalledError(self._failing() or self._explain(seconds if late else None))
        for engine in self._engines.values():
            engine.advance(self.now)
        self.measured.sampled = sum(engine.sampled for engine in self._engines.values())

    def _failing(self) -> str:
        """Why the watchdog of a live run would end it."""
        failing_s = failing_for(self.run, self.now)
        return end_by_failing(failing_s, self._places.stall_timeout_s, self.run.parts.facts.failures_told)

    def _explain(self, seconds: float | None) -> str:
        """Why there is no batch: none comes, or (with `seconds`) none so soon."""
        waits = "; ".join(dict.fromkeys(wait.text for wait in find_waits(self.run, self.now)))
        if seconds is not None:
            return (
                f"no batch is formed in the first {seconds:g} s of virtual time, after which it waits for {waits}; "
                "simulate for longer (--minutes), or until there is one (--steps 1)"
            )
        done = f"after step {len(self.steps)}" if self.steps else "at all"
        return f"the run forms no batch {done}: at {self.now:.0f} s of virtual time it waits for {waits}"

    # --- what passes -------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        measured, (inflight, queued) = self.measured, self._state
        passed = self.now - measured.seconds
        measured.seconds = self.now
        measured.inflight_area += passed * inflight
        measured.queue_area += passed * queued
        self._turns += 1
        versions = self.run.parts.versions
        before = versions.revision
        super().turn()
        if versions.revision != before:
            # What the time goes to is told by the next look, and the next event may be far.
            self.run.advance(self.now)
            self._perform()
        queued = self.run.parts.buffer.sequences
        self._state = self.run.parts.ledger.total_inflight, queued
        measured.queue_max = max(measured.queue_max, queued)
        for endpoint, engine in self._engines.items():
            self._look_at(endpoint, engine)

    def _start(self, attempt: Attempt) -> None:
        attempt.server.requests[attempt] = None
        group, env = attempt.group, self._around.envs[attempt.group.env]
        fate = self._fates[env.name]
        content = self._contents.get(group)
        if content is None:
            content = self._contents[group] = _Content(fate.random(), [])
            if len(self._contents) > self._most_contents:
                self._contents = {one: its for one, its in self._contents.items() if not one.closed}
                self._most_contents = 2 * len(self._contents) + 1_000
        seconds, end = env.attempt(fate, content.place)
        if end == "completed":
            attempt.request = content.take(attempt, env, fate)
            if self._speeds is not None:
                own, tokens = self._demand(env, attempt, seconds)
                self.at(own, partial(self._samples, attempt, tokens))
                return
        self.at(seconds, partial(self._ends, attempt, end))

    def _cancel(self, attempt: Attempt) -> None:
        super()._cancel(attempt)
        number = self._sampling.pop(attempt, None)
        if number is not None:
            self._engines[attempt.endpoint].remove(number, attempt.count, self.now)

    def _demand(self, env: EnvBehaviour, attempt: Attempt, seconds: float) -> tuple[float, float]:
        """What an attempt takes beside its sampling, and the tokens that each of its rollouts samples."""
        if env.engine_share is not None and self._speeds is not None:
            each = self._speeds.each(max(1.0, self._around.recorded_concurrency))
            return seconds * (1 - env.engine_share), seconds * env.engine_share * each
        return seconds, float(max(sum(lengths) for _, lengths in attempt.request))

    def _samples(self, attempt: Attempt, tokens: float) -> None:
        """An attempt comes to its engine."""
        if not attempt.ended:
            done = partial(self._ends, attempt, "completed")
            engine = self._engines[attempt.endpoint]
            self._sampling[attempt] = engine.add(tokens, attempt.count, done, self.now)

    def _look_at(self, endpoint: VirtualEndpoint, engine: Engine) -> None:
        """See to it that an engine's next end is an event; one that was expected earlier finds nothing."""
        stands_still = self._loading and self._around.pauses
        if stands_still != engine.stopped:
            engine.advance(self.now)
            engine.stopped = stands_still
        due = engine.next_at()
        if due is not None and self._due.get(endpoint) != due:
            self._due[endpoint] = due
            self.at(due - self.now, partial(self._engine_due, endpoint, due))

    def _engine_due(self, endpoint: VirtualEndpoint, due: float) -> None:
        if self._due.get(endpoint) == due:
            del self._due[endpoint]
            if not self._engines[endpoint].stopped:
                self._engines[endpoint].finish(self.now)

    def _ends(self, attempt: Attempt, end: str) -> None:
        """An attempt ends by itself."""
        self._sampling.pop(attempt, None)
        if attempt.ended or attempt not in attempt.server.requests:
            return
        self.envs[attempt.group.env].release(attempt.server, attempt)
        if end == "completed":
            self.run.on_result(attempt, self._result(attempt), self.now)
        else:
            failure = Failure(0, "failed", "it failed", retryable=end == "retryable")
            self.run.on_failure(attempt, failure, self.now)
        self._perform()

    def _result(self, attempt: Attempt) -> Result:
        """What a server would answer; tokens are all alike, so that all answers share them."""
        members: list[Member] = attempt.request
        headers = [RolloutHeader(reward, lengths, "stop", False, {}, {}) for reward, lengths in members]
        total = sum(sum(lengths) for _, lengths in members)
        if total > len(self._tokens):
            self._tokens = np.zeros(2 * total, np.int32)
            self._mask, self._logprobs = np.ones(2 * total, np.uint8), np.zeros(2 * total, np.float32)
        if attempt.group.lane is Lane.TRAIN:
            self.measured.rollouts += len(members)
            self.measured.sequences += sum(len(lengths) for _, lengths in members)
        return Result(0, headers, self._tokens[:total], self._mask[:total], self._logprobs[:total], b"\x90")

    def _draw_step(self, rng: random.Random) -> float:
        seconds = self._around.step_s.draw(self._trainer_fate)
        self.measured.trainer_s += seconds
        return seconds
