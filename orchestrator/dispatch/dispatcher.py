"""Dispatch decisions: what to start next, what an ended attempt means, what is overdue.

Events go in as method calls with the time, instructions come out of `drain()`; the caller performs them.
Invariants: every started attempt ends exactly once in the ledger; every group ends as exactly one of
GroupCompleted or GroupDropped; room on a server and on an endpoint is taken when a start is decided; a deadline is
enforced here and nowhere else; no work per event grows with what is in flight. No asyncio, no clock, no I/O.
"""

import heapq
import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from envs.backoff import backoff_s
from envs.wire import Result
from orchestrator.dispatch.admission import Admission
from orchestrator.dispatch.charges import ENDPOINT_LOST, next_attempt
from orchestrator.dispatch.flight import Flight, Key
from orchestrator.dispatch.ledger import Lane, Ledger, Outcome
from orchestrator.dispatch.limits import Ramp
from orchestrator.dispatch.pace import Pace
from orchestrator.dispatch.ports import (
    CancelAttempt,
    EnvRules,
    EvalSource,
    GroupCompleted,
    GroupDropped,
    Instruction,
    OnDispatch,
    Placement,
    Queue,
    Rules,
    Source,
    StartAttempt,
)
from orchestrator.dispatch.versions import Versions
from orchestrator.dispatch.waiting import Waiting
from orchestrator.dispatch.waits import Wait, WaitKind
from orchestrator.dispatch.work import Attempt, PendingGroup, Verdict

EVAL_SHARE = 0.5
"""Most of the slots that evaluations have while training could use them: ones that hang must not stop training."""

RAMP_STEP_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What training groups need of others."""

    rules: Mapping[str, EnvRules]
    source: Source
    mix: OnDispatch
    admission: Admission
    pace: Pace
    queue: Queue


class Dispatcher:
    """Decides; see the module's docstring."""

    def __init__(
        self,
        *,
        training: Training | None,
        evals: Mapping[str, EnvRules],
        rules: Rules,
        eval_source: EvalSource,
        placement: Placement,
        versions: Versions,
        ledger: Ledger,
        now: float,
    ) -> None:
        """`training`: what training groups need; None where there are only evaluations."""
        train = training.rules if training is not None else {}
        self._env_rules: dict[Key, EnvRules] = {
            **{(Lane.EVAL, name): env for name, env in evals.items()},
            **{(Lane.TRAIN, name): env for name, env in train.items()},
        }
        self._training = training
        self._evals = evals
        self._rules = rules
        self._eval_source = eval_source
        self._placement = placement
        self._versions = versions
        self.ledger = ledger
        self._ramp = Ramp(ramp_s=rules.ramp_s, now=now)
        self._out: list[Instruction] = []
        self._waiting = Waiting(self._env_rules)
        self._backoff: list[tuple[float, int, Attempt]] = []
        self._sequence = itertools.count()
        self.flight = Flight(self._env_rules)

    # --- what comes in ---------------------------------------------------------------------------------------------

    def finish(self, attempt: Attempt, result: Result, now: float) -> None:
        """An attempt brought rollouts back."""
        if attempt.ended:
            return
        self._end(attempt, Outcome.COMPLETED)
        group = attempt.group
        group.results.append(result)
        group.spans.append((attempt.version, attempt.endpoint.version_newest))
        group.valid += len(result.rollouts)
        self._settle(group)

    def fail(self, attempt: Attempt, kind: str, *, retryable: bool, now: float) -> None:
        """An attempt failed; it is tried again when that may help and attempts are left."""
        if not attempt.ended:
            again = self._again(attempt, kind) if retryable else None
            kind = self.ledger.kind(attempt.group.lane, attempt.group.env, kind)
            self._end(attempt, Outcome.FAILED, kind)
            self._again_or_failed(attempt, again, kind, now)

    def lose(self, attempt: Attempt, together: int, now: float) -> None:
        """The server under an attempt died, with `together` requests on it; see `suspects` for what follows."""
        if attempt.ended:
            return
        group = attempt.group
        key = group.lane, group.env
        charged = self._waiting.suspects[key].lost(attempt, together)
        self._end(attempt, Outcome.LOST)
        if group.closed or (charged and attempt.number >= self._rules_of(group).max_attempts):
            group.failed += attempt.count
            group.failure = "server_lost"
            self._settle(group)
            return
        again = Attempt(
            group=group,
            count=attempt.count,
            number=attempt.number + charged,
            free=attempt.free,
            suspect=attempt.suspect + 1,
        )
        self._waiting.add_suspect(key, again)
        group.waiting += 1

    def lose_endpoint(self, endpoint: Any, now: float) -> None:
        """Rollouts on this endpoint will not come back; each is tried again elsewhere. Rare, so a scan is fine."""
        for attempt in [attempt for attempt in self.flight.attempts() if attempt.endpoint is endpoint]:
            self._out.append(CancelAttempt(attempt))
            self.fail(attempt, ENDPOINT_LOST, retryable=True, now=now)

    def drop_stale(self) -> None:
        """Give up open training groups that could not be trained in time any more; their tasks are asked again."""
        oldest = self._versions.oldest_allowed(self._versions.formed + 1)
        for group in [group for group in self.flight.groups(Lane.TRAIN) if group.version < oldest]:
            self.drop(group, "stale", again=True)

    def abandon(self, reason: str, *, lanes: Collection[Lane] = tuple(Lane)) -> None:
        """Give up everything of these lanes that is under way; the tasks are asked again."""
        for lane in lanes:
            for group in list(self.flight.groups(lane)):
                self.drop(group, reason, again=True)

    def drop_idle(self, now: float) -> None:
        """Give up training groups that only wait, where their waiting is all that keeps other envs from starting.

        Nothing of training runs, an env could open a group but for the pace, and these have no server with room: what
        would end the wait may never come. Their tasks are asked again.
        """
        training = self._training
        if training is None or not training.pace.reserved:
            return
        if any(self.ledger.inflight[Lane.TRAIN, name] for name in training.rules):
            return
        if not training.admission.held_up(now):
            return
        for group in list(self.flight.groups(Lane.TRAIN)):
            port = self._env_rules[group.lane, group.env].port
            if not port.available or not port.has_room(group.size if group.group_scored else 1):
                self.drop(group, "no_room", again=True)

    def drop(self, group: PendingGroup, reason: str, *, again: bool) -> None:
        """Give up a group."""
        self._close(group, reason)
        self._out.append(GroupDropped(group, reason, again))

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
                self._waiting.add_first((attempt.group.lane, attempt.group.env), attempt)
        limit = self._limit(now)
        return all(self._start_one(limit, now) for _ in range(at_most))

    def next_event_at(self, now: float) -> float | None:
        """When `advance` has something to do even if nothing happens."""
        times = [self.flight.next_deadline()]
        if self._backoff:
            times.append(self._backoff[0][0])
        if not self._ramp.settled(self._placement.limit):
            times.append(now + RAMP_STEP_S)
        if self._training is not None:
            times.append(self._training.admission.next_event_at(now))
        return min((time for time in times if time is not None), default=None)

    def waits(self, now: float) -> list[Wait]:
        """Why nothing more is started."""
        limit = self._limit(now)
        if not self._placement.limit:
            return [Wait(WaitKind.ENDPOINT, "a healthy inference endpoint")]
        if self.ledger.total_inflight >= limit:
            return [Wait(WaitKind.SLOT, f"a free slot ({self.ledger.total_inflight} rollouts in flight)")]
        found = self._training.admission.waits(now) if self._training is not None else []
        if self._backoff:
            found.append(
                Wait(
                    WaitKind.BACKOFF, "the pause before failed rollouts are asked again", self._backoff[0][0]
                )
            )
        return found + self._held_waits(limit)

    def _held_waits(self, limit: int) -> list[Wait]:
        """What waits on purpose, though there is room: suspects, and evaluations that have their share of the slots."""
        found = []
        held = self._waiting.suspected()
        if held:
            text = "rollouts that were on a server when it died, asked again a few at a time"
            found.append(Wait(WaitKind.SUSPECTS, text).of(held, all_of=False))
        waiting = self._eval_source.waiting
        if waiting and not self._eval_room(1, limit):
            text = "a slot for evaluations, which have half of them while training goes on"
            found.append(Wait(WaitKind.EVALUATION_SLOT, text).of(waiting, all_of=False))
        return found

    # --- starting --------------------------------------------------------------------------------------------------

    def _limit(self, now: float) -> int:
        return self._ramp.limit(self._placement.limit, now)

    def _start_one(self, limit: int, now: float) -> bool:
        room = limit - self.ledger.total_inflight
        if room <= 0:
            return False
        attempt = self._next_ready(limit)
        if attempt is None:
            if not self._open_eval(limit, now) and not self._open_next(now):
                return False
            attempt = self._next_ready(limit)
            if attempt is None:
                return False
        if attempt.count > room and self.ledger.total_inflight:
            return False
        return self._start(attempt, now)

    def _start(self, attempt: Attempt, now: float) -> bool:
        """Take a slot, an endpoint and room on a server for an attempt, all or nothing."""
        group = attempt.group
        key = group.lane, group.env
        endpoint = self._placement.acquire(attempt.count, group.endpoint)
        if endpoint is None:
            return False
        attempt.server = self._env_rules[key].port.reserve(attempt.count)
        if attempt.server is None:
            self._placement.release(endpoint, attempt.count)
            return False
        self._waiting.started(key, attempt)
        group.endpoint = attempt.endpoint = endpoint
        group.waiting -= 1
        group.running[attempt] = None
        attempt.started = now
        attempt.version = endpoint.version
        self.flight.start(attempt)
        self.ledger.start(group.lane, group.env, attempt.count)
        self._out.append(StartAttempt(attempt))
        return True

    def _next_ready(self, limit: int) -> Attempt | None:
        """The first waiting attempt whose env would take it: evaluations first, then groups already open."""
        for (lane, env), attempt in self._waiting.firsts():
            if not self._env_rules[lane, env].port.has_room(attempt.count):
                continue
            if lane is Lane.EVAL:
                if self._eval_room(attempt.count, limit):
                    return attempt
            elif self._training is not None and self._training.admission.under_cap(env, attempt.count):
                return attempt
        return None

    def _eval_room(self, count: int, limit: int) -> bool:
        inflight = sum(self.ledger.inflight[Lane.EVAL, name] for name in self._evals)
        return not inflight or self._training is None or inflight + count <= max(1, int(EVAL_SHARE * limit))

    def _open_eval(self, limit: int, now: float) -> bool:
        """Open the next evaluation task, if there is one. Failed attempts at it do not fail the others."""
        if not self._evals or not self._eval_room(1, limit):
            return False
        with_room = [
            name
            for name in self._waiting.without(Lane.EVAL, self._evals)
            if self._evals[name].port.has_room(1)
        ]
        found = self._eval_source.next_eval(with_room)
        if found is None:
            return False
        group = PendingGroup(
            task=found.task,
            lane=Lane.EVAL,
            size=found.size,
            needed=0,
            group_scored=self._evals[found.task.env].port.group_scored,
            version=self._versions.serving,
            opened=now,
            context=found.context,
        )
        self._open(group)
        return True

    def _open_next(self, now: float) -> bool:
        """Open the next training group, if one may be opened."""
        training = self._training
        if training is None:
            return False
        for tier in training.admission.eligible(now):
            eligible = self._waiting.without(Lane.TRAIN, tier)
            task = training.source.try_next_task(eligible) if eligible else None
            if task is not None:
                break
        else:
            return False
        rules = training.rules[task.env]
        group = PendingGroup(
            task=task,
            lane=Lane.TRAIN,
            size=rules.group_size,
            needed=rules.group_size if self._rules.min_valid is None else self._rules.min_valid,
            group_scored=rules.port.group_scored,
            version=self._versions.serving,
            opened=now,
            extra=0 if rules.port.group_scored else self._rules.extra_rollouts,
            expected=training.queue.expected(task.env),
        )
        training.admission.opened(task.env, now)
        training.pace.opened(task.env, group.version, group.expected)
        training.mix.on_dispatch(task.env, group.size, now=now)
        self._open(group)
        return True

    def _open(self, group: PendingGroup) -> None:
        counts: Iterable[int] = [group.size] if group.group_scored else [1] * (group.size + group.extra)
        attempts = [Attempt(group=group, count=count) for count in counts]
        self._waiting.add((group.lane, group.env), attempts)
        group.waiting += len(attempts)
        self.flight.open(group)

    # --- ending ----------------------------------------------------------------------------------------------------

    def _rules_of(self, group: PendingGroup) -> EnvRules:
        return self._env_rules[group.lane, group.env]

    def _again(self, attempt: Attempt, kind: str) -> Attempt | None:
        return next_attempt(attempt, kind, max_attempts=self._rules_of(attempt.group).max_attempts)

    def _again_or_failed(self, attempt: Attempt, again: Attempt | None, kind: str, now: float) -> None:
        """An attempt ended badly and is booked: ask again after a pause, or count the line as failed."""
        group = attempt.group
        if again is not None and not group.closed:
            failures = attempt.number + attempt.free
            pause = backoff_s(failures, first_s=self._rules.backoff_s, max_s=self._rules.max_backoff_s)
            heapq.heappush(self._backoff, (now + pause, next(self._sequence), again))
            group.waiting += 1
            return
        group.failed += attempt.count
        group.failure = kind
        self._settle(group)

    def _end(self, attempt: Attempt, outcome: Outcome, detail: str = "") -> None:
        """Book an attempt's end, once."""
        group = attempt.group
        attempt.ended = True
        self.flight.end(attempt)
        del group.running[attempt]
        if attempt.suspect:
            self._waiting.suspects[group.lane, group.env].ended(attempt)
        self._placement.release(attempt.endpoint, attempt.count)
        self.ledger.end(group.lane, group.env, attempt.count, outcome, detail)

    def _settle(self, group: PendingGroup) -> None:
        if group.closed:
            return
        verdict = group.verdict()
        if verdict is Verdict.FAILED:
            self.drop(group, group.failure, again=False)
        elif verdict is Verdict.COMPLETE:
            self._close(group, "surplus")
            self._out.append(GroupCompleted(group))

    def _close(self, group: PendingGroup, reason: str) -> None:
        """Stop what is left of a group. Waiting attempts are skipped when their queue reaches them."""
        group.closed = True
        for attempt in list(group.running):
            self._end(attempt, Outcome.CANCELLED, reason)
            self._out.append(CancelAttempt(attempt))
        group.waiting = 0
        self.flight.close(group)
        if self._training is not None and group.lane is Lane.TRAIN:
            self._training.pace.closed(group.env, group.version, group.expected)

    def _expire(self, now: float) -> None:
        for attempt in self.flight.overdue_attempts(now):
            self._out.append(CancelAttempt(attempt))
            self._placement.note_failure(attempt.endpoint, "timed_out")
            self._end(attempt, Outcome.TIMED_OUT)
            self._again_or_failed(attempt, self._again(attempt, "timed_out"), "timed_out", now)
        for group in self.flight.overdue_groups(now):
            self._overdue(group)

    def _overdue(self, group: PendingGroup) -> None:
        """A group has had its time: keep what it has, if that is enough."""
        if group.valid >= max(1, group.needed) or group.lane is Lane.EVAL:
            self._close(group, "group_deadline")
            self._out.append(GroupCompleted(group))
        else:
            self.drop(group, "group_deadline", again=False)
