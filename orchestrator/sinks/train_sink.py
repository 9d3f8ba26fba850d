"""From a complete group to a batch that the trainer can have.

Order of every group: scored, filtered, recorded, queued; of every batch: formed, recorded, and only when the record is
durable, offered. So a batch that a trainer has seen is the same after any crash, and a group is trained on once. Every
group that does not make it is booked with a reason, tells the mix, and ends its task. Synchronous; time is an argument.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import structlog

from orchestrator.buffer import BatchBuffer
from orchestrator.dispatch.staleness import Staleness
from orchestrator.dispatch.work import PendingGroup
from orchestrator.errors import StalledError
from orchestrator.facts import Facts
from orchestrator.groups.group import Batch, Group
from orchestrator.groups.scoring import AdvantageFunction, build_group, group_rewards, has_variance
from orchestrator.tasks.task import TrainTask

log = structlog.get_logger()

AHEAD = 2
"""Batches formed and not yet trained on: the one in the trainer's hands and the next one, so that it never waits for us."""


class Record(Protocol):
    """What is written down (the journal)."""

    def record_group(self, group: Group) -> None: ...
    def record_task(self, env: str, position: int, outcome: str) -> None: ...
    def record_batch(self, batch: Batch, on_durable: Callable[[], None]) -> None: ...
    def evict_group(self, group: Group, reason: str) -> None: ...
    def prune(self, env: str, low: int) -> None: ...


class Tasks(Protocol):
    """Where tasks come from and end."""

    def resolve(self, task: TrainTask) -> None: ...
    def retry(self, task: TrainTask) -> None: ...
    def low_water(self, env: str) -> int: ...


class MixFeedback(Protocol):
    """What the mix learns from."""

    def on_finish(self, env: str, n: int, accepted: int, *, now: float) -> None: ...
    def on_drop(self, env: str, n: int, *, now: float) -> None: ...


class TrainSink:
    """Scores, filters, queues, and forms batches."""

    def __init__(
        self,
        *,
        buffer: BatchBuffer[Group],
        batch_size: int,
        max_steps: int | None,
        group_sizes: Mapping[str, int],
        count_tokens: bool,
        keep_transcripts: bool,
        staleness: Staleness,
        tasks: Tasks,
        mix: MixFeedback,
        record: Record,
        facts: Facts,
        advantage: AdvantageFunction,
        keep_equal_rewards: bool,
        max_barren_batches: int,
        available: Callable[[], frozenset[str]],
        offer: Callable[[Batch], None],
    ) -> None:
        self._buffer = buffer
        self._batch_size = batch_size
        self._max_steps = max_steps
        self._group_sizes = group_sizes
        self._count_tokens = count_tokens
        self._keep_transcripts = keep_transcripts
        self._mean_tokens: dict[str, float] = {}
        self._staleness = staleness
        self._tasks = tasks
        self._mix = mix
        self._record = record
        self._facts = facts
        self._advantage = advantage
        self._keep_equal_rewards = keep_equal_rewards
        self._max_barren = max_barren_batches * batch_size
        self._available = available
        self._offer = offer
        self._by_version: Counter[int] = Counter()
        self._barren = 0
        self._barren_reasons: Counter[str] = Counter()
        self.held: tuple[str, int] | None = None
        """Env and version of a group in flight that the next batch waits for."""
        self.stuck = False
        """A batch is wanted, and the queue cannot make one."""

    def completed(self, pending: PendingGroup, now: float) -> None:
        """A group has its rollouts: queue it or book why not."""
        rewards = group_rewards(pending)
        self._facts.scored(pending.env, rewards.tolist())
        if not self._keep_equal_rewards and len(rewards) > 1 and not has_variance(rewards):
            self._reject(pending, "equal_rewards", now)
            return
        if pending.version < self._staleness.oldest_allowed(self._staleness.formed + 1):
            self._reject(pending, "stale", now)
            return
        version_end = max(pending.version_end, self._staleness.serving)
        group = build_group(pending, rewards, self._advantage(rewards), version_end=version_end)
        if self._size(group) > self._batch_size:
            self._reject(pending, "oversize", now)
            return
        self._record.record_group(group)
        self._queue(group)
        self._mix.on_finish(pending.env, pending.size, pending.valid, now=now)
        self._barren = 0
        self._barren_reasons.clear()
        self.form(now)

    def dropped(self, pending: PendingGroup, reason: str, *, again: bool, now: float) -> None:
        """A group ended without a result. The mix was told by the dispatcher."""
        self._facts.dropped(pending.env, reason, pending.size)
        if again:
            self._tasks.retry(pending.task)
            return
        self._record.record_task(pending.env, pending.task.position, f"given_up:{reason}")
        self._tasks.resolve(pending.task)
        self._count_barren(pending, reason)
        self.form(now)

    def form(self, now: float) -> None:
        """Form every batch that is wanted and can be had."""
        staleness = self._staleness
        self.held, self.stuck = None, False
        while staleness.formed - staleness.trained < AHEAD and not self.finished:
            self._evict(now)
            self.held = staleness.held_back_by(self._by_version, self._available())
            if self.held is not None:
                return
            groups = self._buffer.take(now=now)
            if groups is None:
                self.stuck = True
                return
            self._unqueue(groups)
            step = staleness.formed + 1
            batch = Batch(step=step, version=staleness.version_at(step), groups=tuple(groups))
            staleness.formed = step
            self._record.record_batch(batch, lambda batch=batch: self._offer(batch))  # type: ignore[misc]  # mypy cannot type a default argument of a lambda
            for group in groups:
                self._tasks.resolve(group.task)
            for env in {group.env for group in groups}:
                self._record.prune(env, self._tasks.low_water(env))
            self._facts.batch_formed(batch)
            log.info(
                "batch.formed",
                step=step,
                version=batch.version,
                groups=len(groups),
                reward=_rounded(self._facts.reward),
            )

    @property
    def finished(self) -> bool:
        """Whether every batch of the run is formed."""
        return self._max_steps is not None and self._staleness.formed >= self._max_steps

    def restore(self, groups: Iterable[Group]) -> int:
        """Queue the groups that an earlier process left; returns how many fit today's configuration."""
        kept = 0
        for group in groups:
            reason = "env_gone" if group.env not in self._group_sizes else "oversize"
            if group.env in self._group_sizes and self._size(group) <= self._batch_size:
                self._queue(group)
                kept += 1
            else:
                self._record.evict_group(group, reason)
                if group.env in self._group_sizes:
                    self._tasks.retry(group.task)
                log.warning("group.given_up", group=group.id, reason=reason)
        return kept

    def queued(self) -> int:
        """What waits for a batch, in the unit of the batch."""
        return self._buffer.tokens if self._count_tokens else self._buffer.sequences

    def starved(self) -> list[str]:
        """Envs of which the next batch must have more than is queued and in flight: they are started first."""
        wanted, queued = self._buffer.minimums, self._buffer.queued_by_env
        return [
            env
            for env in self._buffer.starved
            if queued[env] + self._staleness.open_size(env) < wanted.get(env, 1)
        ]

    def expected_size(self, env: str) -> int:
        """What a group of an env will probably add to the queue, in the unit of the batch."""
        if self._count_tokens:
            return int(self._mean_tokens.get(env, 1.0)) or 1
        return self._group_sizes[env]

    def explain(self) -> str:
        """One sentence: why there is no batch now."""
        if self.finished:
            return "every batch of the run is formed"
        if self._staleness.formed - self._staleness.trained >= AHEAD:
            return "the trainer has batches to work on"
        if self.held is not None:
            env, version = self.held
            return f'waiting for a group of env "{env}" from version {version}, which a further batch would make too old'
        return self._buffer.explain()

    def _queue(self, group: Group) -> None:
        """Queue a recorded group; its transcript is in the journal, and nothing that trains reads it."""
        if not self._keep_transcripts:
            group = replace(group, transcript=b"")
        tokens = len(group.tokens)
        self._buffer.add(
            group,
            env=group.env,
            size=group.size,
            version=group.version,
            tokens=tokens if self._count_tokens else None,
        )
        if self._count_tokens:
            mean = self._mean_tokens.setdefault(group.env, float(tokens))
            self._mean_tokens[group.env] = mean + (tokens - mean) / 16
        self._by_version[group.version] += self._size(group)

    def _unqueue(self, groups: Iterable[Group]) -> None:
        for group in groups:
            self._by_version[group.version] -= self._size(group)
            if not self._by_version[group.version]:
                del self._by_version[group.version]

    def _size(self, group: Group) -> int:
        return len(group.tokens) if self._count_tokens else group.size

    def _evict(self, now: float) -> None:
        oldest = self._staleness.oldest_allowed(self._staleness.formed + 1)
        evicted: Sequence[Group] = self._buffer.evict_older_than(oldest)
        self._unqueue(evicted)
        for group in evicted:
            self._record.evict_group(group, "stale")
            self._tasks.retry(group.task)
            self._mix.on_drop(group.env, group.rollouts, now=now)
            self._facts.dropped(group.env, "stale", group.rollouts)
        if evicted:
            log.warning("groups.evicted", groups=len(evicted), older_than=oldest)

    def _reject(self, pending: PendingGroup, reason: str, now: float) -> None:
        self._mix.on_finish(pending.env, pending.size, 0, now=now)
        self._facts.dropped(pending.env, reason, pending.size)
        self._record.record_task(pending.env, pending.task.position, reason)
        self._tasks.resolve(pending.task)
        self._count_barren(pending, reason)
        self.form(now)

    def _count_barren(self, pending: PendingGroup, reason: str) -> None:
        self._barren += pending.size
        self._barren_reasons[f'env "{pending.env}": {reason}'] += pending.size
        if self._barren >= self._max_barren:
            reasons = "; ".join(f"{what} ({n} rollouts)" for what, n in self._barren_reasons.most_common(4))
            raise StalledError(
                f"none of the last {self._barren} rollouts could be trained on: {reasons}; "
                "mend the environment, or raise dispatch.max_barren_batches"
            )


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value
