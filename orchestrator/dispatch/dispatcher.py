"""Dispatch decisions: what to start next, what an ended attempt means, what is overdue.

Events go in as method calls with the time, instructions come out of `drain()`; the caller performs them.
Invariants: every started attempt ends exactly once in the ledger; every group ends as exactly one of
GroupCompleted or GroupDropped; no work per event grows with what is in flight. No asyncio, no clock, no I/O.
"""

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from envs.wire import Result
from orchestrator.dispatch.ledger import Lane, Ledger, Outcome
from orchestrator.dispatch.limits import Ramp, TokenBucket
from orchestrator.dispatch.ports import (
    Cancel,
    EnvPort,
    EvalSource,
    GroupCompleted,
    GroupDropped,
    Instruction,
    Mix,
    Placement,
    Rules,
    Source,
    Start,
    TrainRules,
)
from orchestrator.dispatch.staleness import Staleness
from orchestrator.dispatch.work import Attempt, PendingGroup, Verdict


class Dispatcher:
    """Decides; see the module's docstring."""

    def __init__(
        self,
        *,
        train: Mapping[str, TrainRules],
        evals: Mapping[str, EnvPort],
        rules: Rules,
        source: Source,
        eval_source: EvalSource,
        mix: Mix,
        placement: Placement,
        staleness: Staleness,
        ledger: Ledger,
        queued: Callable[[], int],
        starved: Callable[[], Collection[str]],
        expected_size: Callable[[str], int],
        now: float,
    ) -> None:
        self._train = train
        self._evals = evals
        self._rules = rules
        self._source = source
        self._eval_source = eval_source
        self._mix = mix
        self._placement = placement
        self._queued = queued
        self._starved = starved
        self._expected_size = expected_size
        self.staleness = staleness
        self.ledger = ledger
        self.paused = False
        """Set by the caller: no new training group is opened while it is true."""
        self.stuck = False
        """Set by the caller: the queue cannot make a batch although one is wanted."""
        self.waiting_for = "start"
        """Why nothing more is started, in words."""
        self._ramp = Ramp(ramp_s=rules.ramp_s, now=now)
        self._buckets = {
            name: TokenBucket(env.rollouts_per_minute, burst=env.group_size, now=now)
            for name, env in train.items()
            if env.rollouts_per_minute is not None
        }
        self._out: list[Instruction] = []
        self._ready: dict[tuple[Lane, str], deque[Attempt]] = {
            **{(Lane.EVAL, name): deque() for name in evals},
            **{(Lane.TRAIN, name): deque() for name in train},
        }
        self._backoff: list[tuple[float, int, Attempt]] = []
        self._sequence = itertools.count()
        # Ordered by start, so that the first is the first to be overdue: one time limit holds for all.
        self._running: OrderedDict[Attempt, None] = OrderedDict()
        self._groups: OrderedDict[PendingGroup, int] = OrderedDict()

    # --- what comes in ---------------------------------------------------------------------------------------------

    def finish(self, attempt: Attempt, result: Result, now: float) -> None:
        """An attempt brought rollouts back."""
        if attempt.ended:
            return
        self._end(attempt, Outcome.COMPLETED)
        group = attempt.group
        group.results.append(result)
        group.valid += len(result.rollouts)
        self._settle(group, now)

    def fail(self, attempt: Attempt, kind: str, *, retryable: bool, lost: bool, now: float) -> None:
        """An attempt failed; it is tried again when that may help and attempts are left."""
        if attempt.ended:
            return
        self._end(attempt, Outcome.LOST if lost else Outcome.FAILED, "" if lost else kind)
        group = attempt.group
        if retryable and attempt.number < self._rules.max_attempts and not group.closed:
            again = Attempt(group=group, count=attempt.count, number=attempt.number + 1)
            pause = min(self._rules.max_backoff_s, self._rules.backoff_s * 2 ** (attempt.number - 1))
            heapq.heappush(self._backoff, (now + pause, next(self._sequence), again))
            group.waiting += 1
            return
        group.failed += attempt.count
        group.failure = "server_lost" if lost else kind
        self._settle(group, now)

    def lose_endpoint(self, endpoint: Any, now: float) -> None:
        """Rollouts on this endpoint will not come back; each is tried again elsewhere. Rare, so a scan is fine."""
        for attempt in [attempt for attempt in self._running if attempt.endpoint is endpoint]:
            self._out.append(Cancel(attempt))
            self.fail(attempt, "endpoint_lost", retryable=True, lost=False, now=now)

    def drop_stale(self, now: float) -> None:
        """Give up open training groups that could not be trained in time any more; their tasks are asked again."""
        oldest = self.staleness.oldest_allowed(self.staleness.formed + 1)
        for group in [group for group in self._groups if group.lane is Lane.TRAIN and group.version < oldest]:
            self._drop(group, "stale", again=True, now=now)

    def abandon(self, reason: str, now: float, *, lanes: Collection[Lane] = tuple(Lane)) -> None:
        """Give up everything of these lanes that is under way; the tasks are asked again by a later process."""
        for group in [group for group in self._groups if group.lane in lanes]:
            self._drop(group, reason, again=True, now=now)

    # --- what goes out ---------------------------------------------------------------------------------------------

    def drain(self) -> list[Instruction]:
        """Instructions since the last call, in order."""
        out, self._out = self._out, []
        return out

    def advance(self, now: float, *, at_most: int = 256) -> bool:
        """Expire what is overdue and start what can be; whether more could start at once."""
        self._expire(now)
        while self._backoff and self._backoff[0][0] <= now:
            _, _, attempt = heapq.heappop(self._backoff)
            if not attempt.group.closed:
                self._ready[attempt.group.lane, attempt.group.env].appendleft(attempt)
        limit = self._ramp.limit(self._placement.limit, now)
        return all(self._start_one(limit, now) for _ in range(at_most))

    def next_event_at(self, now: float) -> float | None:
        """When `advance` has something to do even if nothing happens."""
        times = []
        if self._running:
            times.append(next(iter(self._running)).started + self._rules.rollout_timeout_s)
        if self._groups:
            times.append(next(iter(self._groups)).opened + self._rules.group_timeout_s)
        if self._backoff:
            times.append(self._backoff[0][0])
        if not self._ramp.settled(self._placement.limit):
            times.append(now + 0.02)
        for name, bucket in self._buckets.items():
            ready = bucket.ready_at(self._train[name].group_size, now)
            if ready > now:
                times.append(ready)
        return min(times, default=None)

    def resume_smoothly(self, now: float) -> None:
        """After a pause: fill up again over the ramp's time instead of all at once."""
        self._ramp.restart(self.ledger.total_inflight, now)

    @property
    def open_groups(self) -> int:
        return len(self._groups)

    def oldest_running(self) -> Attempt | None:
        """The attempt that has been under way for longest."""
        return next(iter(self._running), None)

    # --- starting --------------------------------------------------------------------------------------------------

    def _start_one(self, limit: int, now: float) -> bool:
        room = limit - self.ledger.total_inflight
        if room <= 0:
            self.waiting_for = f"a free slot ({limit} rollouts in flight)"
            return False
        attempt = self._next_ready(now)
        if attempt is None:
            if not self._open_eval(now) and not self._open_next(now):
                return False
            attempt = self._next_ready(now)
            if attempt is None:
                return False
        group = attempt.group
        queue = self._ready[group.lane, group.env]
        if attempt.count > room and self.ledger.total_inflight:
            self.waiting_for = f'{attempt.count} free slots for a group of env "{group.env}"'
            return False
        endpoint = self._placement.acquire(attempt.count, group.endpoint)
        if endpoint is None:
            self.waiting_for = "a healthy inference endpoint"
            return False
        queue.popleft()
        group.endpoint = attempt.endpoint = endpoint
        group.waiting -= 1
        group.running[attempt] = None
        attempt.started = now
        self._running[attempt] = None
        self.ledger.start(group.lane, group.env, attempt.count)
        self._out.append(Start(attempt))
        return True

    def _next_ready(self, now: float) -> Attempt | None:
        """The first waiting attempt whose env would take it: evaluations first, then groups already open."""
        for (lane, env), queue in self._ready.items():
            while queue and queue[0].group.closed:
                queue.popleft()
            if not queue:
                continue
            port = self._train[env].port if lane is Lane.TRAIN else self._evals[env]
            if port.has_room(queue[0].count) and (lane is Lane.EVAL or self._under_cap(env, queue[0].count)):
                return queue[0]
        return None

    def _under_cap(self, env: str, count: int) -> bool:
        cap = self._train[env].max_inflight
        inflight = self.ledger.inflight[Lane.TRAIN, env]
        return cap is None or inflight + count <= cap or inflight == 0

    def _open_eval(self, now: float) -> bool:
        """Open the next evaluation task, if there is one. Failed attempts at it do not fail the others."""
        work = self._eval_source.next_eval([name for name, port in self._evals.items() if port.has_room(1)])
        if work is None:
            return False
        group = PendingGroup(
            task=work.task,
            lane=Lane.EVAL,
            size=work.size,
            needed=0,
            group_scored=self._evals[work.task.env].group_scored,
            version=self.staleness.serving,
            opened=now,
            context=work.context,
        )
        self._open(group, 0)
        return True

    def _open_next(self, now: float) -> bool:
        """Open the next training group, if one may be opened."""
        if self.paused:
            self.waiting_for = "dispatch to be resumed"
            return False
        eligible = [name for name, rules in self._train.items() if self._eligible(name, rules, now)]
        if not eligible:
            self.waiting_for = "an env that can take work (all at their limits or without a ready server)"
            return False
        starved = self._starved()
        eligible = [name for name in eligible if name in starved] or eligible
        largest = max(self._expected_size(name) for name in eligible)
        if not self.staleness.admits(largest, self._queued(), stuck=self.stuck):
            self.waiting_for = self.staleness.explain()
            return False
        task = self._source.try_next_task(eligible)
        if task is None:
            self.waiting_for = "the probes of quarantined envs"
            return False
        rules = self._train[task.env]
        if task.env in self._buckets:
            self._buckets[task.env].take(rules.group_size, now)
        group = PendingGroup(
            task=task,
            lane=Lane.TRAIN,
            size=rules.group_size,
            needed=rules.group_size if self._rules.min_valid is None else self._rules.min_valid,
            group_scored=rules.port.group_scored,
            version=self.staleness.serving,
            opened=now,
            extra=0 if rules.port.group_scored else self._rules.extra_rollouts,
        )
        expected = self._expected_size(task.env)
        self.staleness.opened(task.env, group.version, expected)
        self._mix.on_dispatch(task.env, group.size, now=now)
        self._open(group, expected)
        return True

    def _eligible(self, name: str, rules: TrainRules, now: float) -> bool:
        count = rules.group_size if rules.port.group_scored else 1
        if (
            not rules.port.has_room(count)
            or self._ready[Lane.TRAIN, name]
            or not self._under_cap(name, count)
        ):
            return False
        bucket = self._buckets.get(name)
        return bucket is None or bucket.ready_at(rules.group_size, now) <= now

    def _open(self, group: PendingGroup, expected: int) -> None:
        queue = self._ready[group.lane, group.env]
        counts: Iterable[int] = [group.size] if group.group_scored else [1] * (group.size + group.extra)
        for count in counts:
            queue.append(Attempt(group=group, count=count))
            group.waiting += 1
        self._groups[group] = expected

    # --- ending ----------------------------------------------------------------------------------------------------

    def _end(self, attempt: Attempt, outcome: Outcome, detail: str = "") -> None:
        """Book an attempt's end, once."""
        group = attempt.group
        attempt.ended = True
        del self._running[attempt]
        del group.running[attempt]
        self._placement.release(attempt.endpoint, attempt.count)
        self.ledger.end(group.lane, group.env, attempt.count, outcome, detail)

    def _settle(self, group: PendingGroup, now: float) -> None:
        verdict = group.verdict()
        if verdict is Verdict.FAILED:
            self._drop(group, group.failure, again=False, now=now)
        elif verdict is Verdict.COMPLETE:
            self._close(group, "surplus")
            self._out.append(GroupCompleted(group))

    def _drop(self, group: PendingGroup, reason: str, *, again: bool, now: float) -> None:
        self._close(group, reason)
        group.results.clear()
        if group.lane is Lane.TRAIN and again:
            self._mix.on_cancel(group.env, group.size, now=now)
        elif group.lane is Lane.TRAIN:
            self._mix.on_finish(group.env, group.size, 0, now=now)
        self._out.append(GroupDropped(group, reason, again))

    def _close(self, group: PendingGroup, reason: str) -> None:
        """Stop what is left of a group. Waiting attempts are skipped when their queue reaches them."""
        group.closed = True
        group.waiting = 0
        expected = self._groups.pop(group)
        if group.lane is Lane.TRAIN:
            self.staleness.closed(group.env, group.version, expected)
        for attempt in list(group.running):
            self._end(attempt, Outcome.CANCELLED, reason)
            self._out.append(Cancel(attempt))

    def _expire(self, now: float) -> None:
        while self._running:
            attempt = next(iter(self._running))
            if attempt.started + self._rules.rollout_timeout_s > now:
                break
            self._end(attempt, Outcome.TIMED_OUT)
            self._out.append(Cancel(attempt))
            attempt.group.failed += attempt.count
            attempt.group.failure = "timed_out"
            self._settle(attempt.group, now)
        while self._groups:
            group = next(iter(self._groups))
            if group.opened + self._rules.group_timeout_s > now:
                break
            if group.valid >= max(1, group.needed) or group.lane is Lane.EVAL:
                self._close(group, "group_deadline")
                self._out.append(GroupCompleted(group))
            else:
                self._drop(group, "group_deadline", again=False, now=now)
