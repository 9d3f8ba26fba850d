"""The journal of a run in virtual time: the same record, kept in memory, durable at once."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from orchestrator.curriculum import OUTCOMES, Outcomes, TaskOutcome
from orchestrator.facts import StepRecord
from orchestrator.groups.group import Batch, Group


@dataclass(frozen=True, slots=True)
class MemoryRecovery:
    """What an earlier process left."""

    groups: Sequence[Group]
    batches: Sequence[Batch]
    resolved: Mapping[str, tuple[int, Sequence[int]]]
    state: Mapping[str, Any]
    last_step: int
    last_acknowledged: int
    evals: Sequence[dict[str, Any]]
    steps: Sequence[StepRecord]
    chosen: Mapping[str, Mapping[int, int]]
    learned: Mapping[str, Outcomes]
    damaged: Sequence[str] = ()

    @property
    def empty(self) -> bool:
        return not (self.groups or self.last_step or self.resolved or self.state or self.chosen)


class StepJournal:
    """Of a run that is only looked at: keeps the records of its steps and nothing else."""

    full = False
    backlog_bytes = 0
    kept = (0, 0)

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def record_batch(
        self,
        batch: Batch,
        on_durable: Callable[[], None],
        *,
        record: StepRecord,
        states: Mapping[str, Any],
    ) -> None:
        self.steps.append(record)
        on_durable()

    def split_group(self, group: Group, n: int) -> tuple[Group, Group]:
        return group.split(n)

    def record_group(self, group: Group, learned: TaskOutcome | None = None) -> None: ...
    def record_task(
        self, env: str, position: int, outcome: str, learned: TaskOutcome | None = None
    ) -> None: ...
    def record_choice(self, env: str, position: int, index: int) -> None: ...
    def record_late(self, env: str, learned: TaskOutcome | None) -> None: ...
    def evict_group(self, group: Group, reason: str) -> None: ...
    def prune(self, env: str, low: int) -> None: ...
    def record_acknowledged(self, step: int) -> None: ...
    def record_states(self, states: Mapping[str, Any]) -> None: ...
    def record_version(self, version: int, step: int, path: str | None) -> None: ...
    def forget_version(self, version: int) -> None: ...
    def record_report(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def record_eval(self, data: dict[str, Any]) -> None: ...
    def record_control(self, at: float, origin: str, command: Mapping[str, Any]) -> None: ...


@dataclass(slots=True)
class MemoryJournal:
    """Records like `orchestrator.journal.Journal`. With `at_once` false a batch waits for its callback in `waiting`."""

    full: bool = False
    backlog_bytes: int = 0
    kept: tuple[int, int] = (0, 0)
    at_once: bool = True
    waiting: list[Callable[[], None]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    tasks: list[tuple[str, int, str]] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    evicted: list[tuple[Group, str]] = field(default_factory=list)
    evals: list[dict[str, Any]] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    versions: dict[int, tuple[int, str | None]] = field(default_factory=dict)
    reports: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    controls: list[tuple[float, str, Mapping[str, Any]]] = field(default_factory=list)
    acknowledged: int = 0
    learned: dict[str, list[TaskOutcome]] = field(default_factory=dict)
    chosen: dict[str, dict[int, int]] = field(default_factory=dict)
    """Every choice of a curriculum, by env and position; those that are done with are given up by `prune`."""
    _queued: dict[str, Group] = field(default_factory=dict)
    _resolved: dict[str, set[int]] = field(default_factory=dict)
    _low: dict[str, int] = field(default_factory=dict)
    _states: dict[str, str] = field(default_factory=dict)

    def record_group(self, group: Group, learned: TaskOutcome | None = None) -> None:
        self._learn(group.env, learned)
        self.events.append(f"group {group.id}")
        self.groups.append(group)
        self._queued[group.id] = group

    def record_late(self, env: str, learned: TaskOutcome | None) -> None:
        self._learn(env, learned)

    def record_choice(self, env: str, position: int, index: int) -> None:
        self.chosen.setdefault(env, {})[position] = index

    def record_task(self, env: str, position: int, outcome: str, learned: TaskOutcome | None = None) -> None:
        self._learn(env, learned)
        self.tasks.append((env, position, outcome))
        self._resolved.setdefault(env, set()).add(position)

    def record_batch(
        self,
        batch: Batch,
        on_durable: Callable[[], None],
        *,
        record: StepRecord,
        states: Mapping[str, Any],
    ) -> None:
        self.steps.append(record)
        self.record_states(states)
        self.events.append(f"batch {batch.step}")
        self.batches.append(batch)
        for group in batch.groups:
            del self._queued[group.id]
            self._resolved.setdefault(group.env, set()).add(group.task.position)
        if self.at_once:
            on_durable()
        else:
            self.waiting.append(on_durable)

    def evict_group(self, group: Group, reason: str) -> None:
        self.evicted.append((group, reason))
        del self._queued[group.id]

    def split_group(self, group: Group, n: int) -> tuple[Group, Group]:
        first, rest = group.split(n)
        del self._queued[group.id]
        self._queued[first.id], self._queued[rest.id] = first, rest
        return first, rest

    def prune(self, env: str, low: int) -> None:
        self._low[env] = low
        self._resolved[env] = {position for position in self._resolved.get(env, ()) if position >= low}
        kept = {position: index for position, index in self.chosen.get(env, {}).items() if position >= low}
        self.chosen[env] = kept

    def record_acknowledged(self, step: int) -> None:
        self.acknowledged = max(self.acknowledged, step)

    def record_states(self, states: Mapping[str, Any]) -> None:
        self._states.update({key: json.dumps(value) for key, value in states.items()})

    def record_version(self, version: int, step: int, path: str | None) -> None:
        self.versions[version] = (step, path)

    def forget_version(self, version: int) -> None:
        self.versions.pop(version, None)

    def record_report(self, step: int, metrics: Mapping[str, float]) -> None:
        self.reports.append((step, dict(metrics)))

    def record_eval(self, data: dict[str, Any]) -> None:
        self.evals.append(data)

    def record_control(self, at: float, origin: str, command: Mapping[str, Any]) -> None:
        self.controls.append((at, origin, command))

    def recover(self) -> MemoryRecovery:
        """What a restart would find."""
        envs = self._low.keys() | self._resolved.keys()
        return MemoryRecovery(
            groups=list(self._queued.values()),
            batches=[batch for batch in self.batches if batch.step > self.acknowledged],
            resolved={env: (self._low.get(env, 0), sorted(self._resolved.get(env, ()))) for env in envs},
            state={key: json.loads(value) for key, value in self._states.items()},
            last_step=max((batch.step for batch in self.batches), default=0),
            last_acknowledged=self.acknowledged,
            evals=self.evals,
            steps=self.steps,
            chosen=self.chosen,
            learned={env: np.array(learned, OUTCOMES) for env, learned in self.learned.items()},
        )

    def _learn(self, env: str, learned: TaskOutcome | None) -> None:
        if learned is not None:
            self.learned.setdefault(env, []).append(learned)
