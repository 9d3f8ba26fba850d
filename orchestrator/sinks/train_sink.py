"""From a complete group to a batch that the trainer can have.

Order of every group: scored, filtered, recorded, queued; of every batch: formed, recorded, and only when the record is
durable, offered. So a batch that a trainer has seen is the same after any crash, and a group is trained on once. A
task is done when its batch is formed, or when its group is filtered out; a group that is given up later is asked again.
The mix and the tasks' statistics are told of every group's end here and nowhere else. Synchronous; time is an argument.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import structlog
from msgspec.structs import replace

from envs.wire import Result
from orchestrator.buffer import BatchBuffer
from orchestrator.curriculum import TaskOutcome
from orchestrator.dispatch.pace import Pace
from orchestrator.dispatch.turns import Turns
from orchestrator.dispatch.versions import Versions
from orchestrator.dispatch.work import PendingGroup
from orchestrator.facts import Facts, StepRecord
from orchestrator.groups.group import Batch, Group
from orchestrator.groups.scoring import (
    AdvantageFunction,
    build_group,
    has_variance,
    seats_of,
)
from orchestrator.sinks.archive import Archive
from orchestrator.sinks.barren import Barren
from orchestrator.sinks.same_tasks import SameTasks
from orchestrator.sinks.yields import Yields
from orchestrator.tasks.task import TrainTask

log = structlog.get_logger()

MOST_REWARD = 1e30
"""Of a group, for its task's statistics: a larger one, like one that is no number, is a mistake of the env."""


class Record(Protocol):
    """What is written down (the journal)."""

    def record_group(self, group: Group, learned: TaskOutcome | None) -> None:
        """A finished group, and what it says about its task: both or nothing."""

    def record_task(
        self, env: str, position: int, outcome: str, learned: TaskOutcome | None = None
    ) -> None: ...
    def record_late(self, env: str, learned: TaskOutcome | None) -> None:
        """A group that came too late, and what it says about its task, which is not done with."""

    def record_batch(
        self,
        batch: Batch,
        on_durable: Callable[[], None],
        *,
        record: StepRecord,
        states: Mapping[str, Any],
    ) -> None:
        """A batch with its record and the run's states, all of it or nothing."""

    def evict_group(self, group: Group, reason: str) -> None: ...
    def prune(self, env: str, low: int) -> None: ...


class TaskBook(Protocol):
    """Where tasks come from and end."""

    def ended(self, task: TrainTask, outcome: TaskOutcome | None) -> None:
        """A group of a task has ended, with rewards or without."""

    def resolve(self, task: TrainTask) -> None: ...
    def retry(self, task: TrainTask) -> bool:
        """Ask a task again; False when it is resolved: a part of its group is in a batch."""

    def low_water(self, env: str) -> int: ...


class MixFeedback(Protocol):
    """What the mix learns from."""

    @property
    def quarantined(self) -> frozenset[str]: ...
    def on_finish(self, env: str, n: int, accepted: int, *, now: float) -> None: ...
    def on_cancel(self, env: str, n: int, *, now: float) -> None: ...
    def on_drop(self, env: str, n: int, *, now: float, excused: bool) -> None: ...


class TrainSink:
    """Scores, filters, queues, and forms batches."""

    def __init__(
        self,
        *,
        buffer: BatchBuffer[Group],
        max_steps: int | None,
        ahead: int,
        group_sizes: Mapping[str, int],
        versions: Versions,
        pace: Pace,
        tasks: TaskBook,
        mix: MixFeedback,
        record: Record,
        facts: Facts,
        archive: Archive,
        barren: Barren,
        advantage: AdvantageFunction,
        keep_equal_rewards: bool,
        keep_transcripts: bool,
        offer: Callable[[Batch], None],
    ) -> None:
        self._buffer = buffer
        self._max_steps = max_steps
        self._group_sizes = group_sizes
        self._count_tokens = buffer.unit == "tokens"
        self._yields = Yields(group_sizes, batch_size=buffer.batch_size, count_tokens=self._count_tokens)
        self._ahead = ahead
        self._versions = versions
        self._pace = pace
        self._tasks = tasks
        self._mix = mix
        self._record = record
        self._facts = facts
        self._archive = archive
        self._barren = barren
        self._advantage = advantage
        self._keep_equal_rewards = keep_equal_rewards
        self._keep_transcripts = keep_transcripts
        self._offer = offer
        self._same_tasks = SameTasks()
        self._turns = Turns(versions, pace)
        self._queued: Counter[str] = Counter()
        self._by_version: Counter[tuple[str, int]] = Counter()
        self.held: tuple[str, int] | None = None
        """Env and version of a group in flight that the next batch waits for."""
        self.awaited: tuple[str, int] | None = None
        """Env whose share of the next batch is waited for, and the oldest version of what is in flight of it."""
        self.stuck = False
        """A batch is wanted and enough is queued, but no exact batch can be made of it."""

    def saw(self, env: str, result: Result) -> None:
        """Rollouts of an env are back, their group perhaps not yet."""
        self._yields.saw(env, [len(rollout.lengths) for rollout in result.rollouts])

    def completed(self, pending: PendingGroup, now: float) -> None:
        """A group has its rollouts: queue it or book why not."""
        if not self._same_tasks.agree(pending):
            self._tasks.ended(pending.task, None)
            self._reject(pending, "task_mismatch", now)
            return
        rewards = [rollout.reward for result in pending.results for rollout in result.rollouts]
        self._facts.scored(pending.env, rewards)
        seats = seats_of(pending)
        equal = pending.valid > 1 and not any(has_variance(seat.rewards) for seat in seats)
        learned = outcome_of(pending, rewards, equal)
        self._tasks.ended(pending.task, learned)
        if equal and not self._keep_equal_rewards:
            self._reject(pending, "equal_rewards", now, learned)
            return
        if pending.version < self._versions.oldest_allowed(self._versions.formed + 1):
            # It did what it should, too late for us: the task is asked again.
            excused = self._is_probe(pending.env)
            self._mix.on_finish(pending.env, pending.size, pending.valid, now=now)
            self._mix.on_drop(pending.env, pending.valid, now=now, excused=excused)
            self._facts.dropped(pending.env, "stale", pending.size)
            self._archive.scored(pending, "stale", now)
            self._record.record_late(pending.env, learned)
            self._tasks.retry(pending.task)
            return
        version_end = max(pending.version_end, self._versions.serving)
        group = build_group(pending, seats, self._advantage, version_end=version_end)
        self._yields.add(group.env, self._size(group))
        if self._size(group) > self._buffer.batch_size:
            self._reject(pending, "oversize", now, learned)
            return
        self._record.record_group(group, learned)
        self._archive.scored(pending, "queued", now)
        self._queue(group)
        self._mix.on_finish(pending.env, pending.size, pending.valid, now=now)
        self._barren.delivered()

    def dropped(self, pending: PendingGroup, reason: str, *, again: bool, now: float) -> None:
        """A group ended without a result: stopped by us, or failed."""
        self._tasks.ended(pending.task, None)
        self._facts.dropped(pending.env, reason, pending.size)
        self._archive.dropped(pending, reason, now)
        if again and reason != "overdue":
            self._mix.on_cancel(pending.env, pending.size, now=now)
        else:
            self._mix.on_finish(pending.env, pending.size, 0, now=now)
        if again:
            self._tasks.retry(pending.task)
            return
        self._record.record_task(pending.env, pending.task.position, f"given_up:{reason}")
        self._tasks.resolve(pending.task)
        self._barren.count(pending.env, reason, pending.size, ignored=self._mix.quarantined)

    @property
    def wanted(self) -> bool:
        """Whether the trainer could use another batch soon."""
        return self._versions.formed - self._versions.trained < self._ahead and not self.finished

    @property
    def starved(self) -> bool:
        """Whether the trainer is done with every batch and wants another one."""
        return self.wanted and self._versions.formed <= self._versions.trained

    @property
    def finished(self) -> bool:
        """Whether every batch of the run is formed."""
        return self._max_steps is not None and self._versions.formed >= self._max_steps

    def form(
        self,
        now: float,
        available: Collection[str],
        *,
        at_once: bool = False,
        states: Callable[[float], Mapping[str, Any]],
    ) -> None:
        """Form every batch that is wanted and can be had.

        `available`: envs that have a server; groups of the others are not waited for. `at_once`: nothing that is
        awaited could help. `states`: what a later process needs, recorded with each batch.
        """
        versions = self._versions
        self.held, self.awaited, self.stuck = None, None, False
        while self.wanted:
            self._evict(now)
            if not self._buffer.splits and self._barren.too_many(self._buffer.sequences):
                self._give_up_if_stuck()
            plan = self._pace.plan_next(
                self._by_version, available, self._buffer.minimums, self._buffer.due_next
            )
            self.held = plan.held_by if plan is not None else None
            if self.held is None:
                self.awaited = self._turns.awaited(
                    self._by_version, self._buffer.shares, available, self._yields.portion
                )
            if self.held is not None or self.awaited is not None:
                return
            step = versions.formed + 1
            groups = self._buffer.take(
                now,
                at_once=at_once,
                spare=self._spare,
                least=plan.least if plan is not None else None,
                most=self._spread(),
                fits=plan.fits if plan is not None else None,
            )
            if groups is None:
                self.stuck = self._buffer.is_stuck(self._spare)
                return
            batch = Batch(step=step, version=versions.version_at(step), groups=tuple(groups))
            self._emit(batch, states, now)

    def wait_no_longer(self) -> None:
        """Form the next batch without the share of the env that it waits for."""
        if self.awaited is not None:
            self._turns.give_up(self.awaited[0])

    def restore(self, groups: Iterable[Group]) -> int:
        """Queue the groups that an earlier process left; returns how many fit today's configuration."""
        kept = 0
        groups = list(groups)
        self.remember(groups)
        for group in groups:
            reason = "env_gone" if group.env not in self._group_sizes else "oversize"
            if group.env in self._group_sizes and self._size(group) <= self._buffer.batch_size:
                self._queue(group)
                self._yields.add(group.env, self._size(group))
                kept += 1
            else:
                self._record.evict_group(group, reason)
                self._archive.evicted(group, reason)
                if group.env in self._group_sizes:
                    self._tasks.retry(group.task)
                log.warning("group.given_up", group=group.id, reason=reason)
        return kept

    def remember(self, groups: Iterable[Group]) -> None:
        """Hold later groups of the same tasks against these of an earlier process."""
        for group in groups:
            self._same_tasks.note(group.task, group.digest)

    # --- what dispatch asks ------------------------------------------------------------------------------------------

    @property
    def revision(self) -> tuple[int, ...]:
        """Differs whenever an answer below does that does not follow from versions and open groups."""
        return self._buffer.revision, self._yields.revision

    @property
    def splits(self) -> bool:
        """Whether a batch may have a part of a group."""
        return self._buffer.splits

    def queued(self) -> Mapping[str, int]:
        """What each env has queued, in the unit of the batch."""
        return self._queued

    def queued_by_version(self) -> Mapping[tuple[str, int], int]:
        """What each env has queued of each version."""
        return self._by_version

    def minimums(self) -> Mapping[str, int]:
        """What every batch will have of each env at least: its minimum, or its quota."""
        return {env: math.floor(share) for env, share in self._buffer.planned.items()}

    def reserved(self, batches: int) -> Mapping[str, int]:
        """What so many batches will have of each env at least, in whole groups."""
        planned, portion = self._buffer.planned, self._yields.portion
        whole = {
            env: math.ceil(batches * least / portion(env)) * portion(env) for env, least in planned.items()
        }
        if self._buffer.has_quotas and sum(whole.values()) > batches * self.capacity:
            return {}  # quotas leave no room for the ends of groups: what is over in one batch is less in the next
        return whole

    def needed(self, coming: Mapping[str, int]) -> Collection[str]:
        """Envs of which the next batch needs more than is queued and coming."""
        return self._buffer.needed(coming, spare=self._spare) if self.wanted else ()

    def behind(
        self, able: Collection[str], coming: Mapping[str, int], batches: int
    ) -> Collection[str] | None:
        """Which of these envs have less queued and coming than so many batches will have of them, by whole groups first.

        None: any env may come next.
        """
        due = self._buffer.due(batches)
        if due is None:
            return None
        lack = {env: due.get(env, 0) - self._queued[env] - coming.get(env, 0) for env in able}
        # Else an env that lacks a little would have the room of a group that another lacks.
        whole = [env for env, amount in lack.items() if amount >= self._yields.portion(env)]
        return whole or [env for env, amount in lack.items() if amount > 0]

    def expected(self, env: str) -> int:
        """What a group of an env will add at most, in all likelihood."""
        return self._yields.expected(env)

    def portion(self, env: str) -> int:
        """The same, but the plain size of a group while nothing is known."""
        return self._yields.portion(env)

    def explain(self) -> str:
        """One sentence: why there is no batch now."""
        if self.finished:
            return "every batch of the run is formed"
        if not self.wanted:
            return "the trainer has batches to work on"
        if self.held is not None:
            env, version = self.held
            return f'waiting for a group of env "{env}" from version {version}, which a further batch would make too old'
        if self.awaited is not None:
            env, _ = self.awaited
            has, share = self._queued[env], self._buffer.shares.get(env, 0)
            return f'env "{env}" has {has} of its share of {share:.0f} sequences, and later batches would be crowded with it'
        return self._buffer.explain()

    @property
    def capacity(self) -> int:
        """What every batch takes for certain, given that it is queued."""
        return max(1, self._buffer.batch_size - self._spare)

    @property
    def _spare(self) -> int:
        """What a batch may lack of its size: by tokens, less than a group; an exact batch lacks nothing."""
        return min(self._yields.largest(), self._buffer.batch_size // 2) if self._count_tokens else 0

    # --- inside ------------------------------------------------------------------------------------------------------

    def _emit(self, batch: Batch, states: Callable[[float], Mapping[str, Any]], now: float) -> None:
        """Everything that follows from a batch's forming."""
        for group in batch.groups:
            self._count(group, -1)
            self._tasks.resolve(group.task)
        self._versions.formed = batch.step
        record = self._facts.batch_formed(batch, quarantined=self._mix.quarantined, now=now)
        # In one commit: a process that dies right after it has counted this batch, its mix and its time.
        self._record.record_batch(batch, lambda: self._offer(batch), record=record, states=states(now))
        self._archive.batch_formed(batch)
        for env in {group.env for group in batch.groups}:
            self._record.prune(env, self._tasks.low_water(env))
        log.info(
            "batch.formed",
            step=batch.step,
            version=batch.version,
            groups=len(batch.groups),
            reward=round(record.reward, 4),
        )

    def _give_up_if_stuck(self) -> None:
        """End a run that could queue for ever; asked only where very much is queued, because looking takes time."""
        if self._buffer.is_stuck(self._spare):
            self._barren.give_up(self._buffer.sequences, self._buffer.explain())

    def _spread(self) -> Mapping[str, int] | None:
        """How much of envs with a minimum a batch had better take, so that the next ones find theirs."""
        later = self._versions.steps_left(self._versions.serving) - 1
        if self._pace.mode == "drop" or later < 1:
            return None
        coming = self._pace.coming
        return {
            env: max(minimum, self._queued[env] + coming.get(env, 0) - later * minimum)
            for env, minimum in self._buffer.minimums.items()
            if minimum
        }

    def _queue(self, group: Group) -> None:
        """Queue a recorded group; its transcript is in the journal, and nothing that trains reads it."""
        if not self._keep_transcripts:
            group = replace(group, transcript=b"")
        self._buffer.add(
            group,
            env=group.env,
            size=group.size,
            version=group.version,
            tokens=len(group.tokens) if self._count_tokens else None,
            rollouts=group.rollouts,
        )
        self._count(group, 1)

    def _count(self, group: Group, sign: int) -> None:
        key, size = (group.env, group.version), self._size(group)
        self._queued[group.env] += sign * size
        self._by_version[key] += sign * size
        if not self._by_version[key]:
            del self._by_version[key]

    def _size(self, group: Group) -> int:
        return len(group.tokens) if self._count_tokens else group.size

    def _is_probe(self, env: str) -> bool:
        """Whether what an env brings is too late because nobody waits for it, as everybody else is waited for under pace."""
        return self._pace.mode == "pace" and env in self._mix.quarantined

    def _evict(self, now: float) -> None:
        oldest = self._versions.oldest_allowed(self._versions.formed + 1)
        evicted: Sequence[Group] = self._buffer.evict_older_than(oldest)
        again = [self._tasks.retry(group.task) for group in evicted]
        # The rest of a group that was split cannot be asked again: the other part of it is trained on.
        whole = sum(self._size(group) for group, asked in zip(evicted, again, strict=True) if asked)
        # Less than a group: what the last one of a batch brought beyond it, and no later batch may use.
        little = self._pace.mode == "pace" and whole <= self._yields.largest()
        for group, asked in zip(evicted, again, strict=True):
            self._count(group, -1)
            reason = "split_rest" if not asked else "surplus" if little else "stale"
            self._record.evict_group(group, reason)
            self._archive.evicted(group, reason)
            self._mix.on_drop(group.env, group.rollouts, now=now, excused=self._is_probe(group.env))
            self._facts.dropped(group.env, reason, group.rollouts)
        if evicted:
            level = log.info if little else log.warning
            level("groups.evicted", groups=len(evicted), older_than=oldest)

    def _reject(
        self, pending: PendingGroup, reason: str, now: float, learned: TaskOutcome | None = None
    ) -> None:
        self._mix.on_finish(pending.env, pending.size, 0, now=now)
        self._facts.dropped(pending.env, reason, pending.size)
        self._archive.scored(pending, reason, now)
        self._record.record_task(pending.env, pending.task.position, reason, learned)
        self._tasks.resolve(pending.task)
        self._barren.count(pending.env, reason, pending.size, ignored=self._mix.quarantined)


def outcome_of(pending: PendingGroup, rewards: Sequence[float], equal: bool) -> TaskOutcome | None:
    """What a group says about its task; None where its rewards are no numbers that could be compared."""
    mean = sum(rewards) / max(1, len(rewards))
    if not abs(mean) < MOST_REWARD:
        return None
    return TaskOutcome(pending.task.index, pending.version, mean, len(rewards), equal)
