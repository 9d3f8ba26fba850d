"""A run as it was recorded: its columns, its evaluations, and the status that they add up to.

`RecordedRun` reads on where it stopped, through a callable that looks into the journal; it is used by one thread at a time.
A run that is over, or crashed, has a status too: what the records say, without what only a living process knows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from orchestrator.facts import EnvStatus, Status, TaskStatus, by_domain, status_without_run
from orchestrator.facts.steps import StepRecord
from orchestrator.views.series import Series

OVERLAP = 16
"""Steps that are read again: what the trainer reports about a step comes after the step."""
MAX_EVALS = 2000


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a journal says about the steps after one, and the evaluations behind so many."""

    run_id: str
    records: Sequence[StepRecord]
    evals: Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class RecordedRun:
    """The recorded part of a run; `refresh` reads what is new."""

    read: Callable[[int, int], Recorded]
    """Told the last known step, and how many evaluations are known."""
    run_id: str = ""
    series: Series = field(default_factory=Series)
    evals: list[Mapping[str, Any]] = field(default_factory=list)
    ends: tuple[StepRecord, StepRecord] | None = None
    """The first and the last step."""
    generation: int = 0
    """Grows when everything begins anew."""
    _known_evals: int = 0

    def refresh(self) -> None:
        """Read on; a run that was started over or set back begins anew."""
        recorded = self.read(max(0, self.series.last - OVERLAP), self._known_evals)
        known = bool(self.run_id)
        if recorded.run_id != self.run_id or self._was_set_back(recorded.records):
            self.run_id, self.series, self.ends = recorded.run_id, Series(), None
            self.evals, self._known_evals = [], 0
            self.generation += 1
            recorded = self.read(0, 0) if known else recorded
        self._known_evals += len(recorded.evals)
        self.evals = [*self.evals, *recorded.evals][-MAX_EVALS:]
        self.series.put(recorded.records)
        if recorded.records:
            first = recorded.records[0] if self.ends is None else self.ends[0]
            self.ends = (first, recorded.records[-1])

    def _was_set_back(self, records: Sequence[StepRecord]) -> bool:
        """Whether the last known step is there no more, or another batch was formed in its place."""
        last = self.series.last
        return last > 0 and self.series.formed_at(last) not in [
            record.at for record in records if record.step == last
        ]

    def parts(self, since: int = 1) -> dict[str, Any]:
        """What the page draws, from a step on."""
        return {
            "series": self.series.buckets(since),
            "evals": self.evals,
            "totals": self.series.totals(),
            "histograms": self.series.histograms(),
        }


def recorded_status(run: RecordedRun, *, state: str, words: str, summary: Mapping[str, Any]) -> Status:
    """The status of a run at its last recorded step; `words` say what else is known of its life."""
    status = status_without_run(state, [], endpoints=[], max_steps=None, batch_size=0, notes=[], seconds=0.0)
    status.waiting_for = words
    if run.ends is None:
        return status
    first, last = run.ends
    totals = run.series.totals()
    outcomes: dict[str, int] = {}
    for told in totals.values():
        for outcome, n in told["outcomes"].items():
            outcomes[outcome] = outcomes.get(outcome, 0) + n
    envs = {name: _env_status(name, run, summary) for name in last.envs}
    return msgspec.structs.replace(
        status,
        step=last.step,
        trained=int(summary.get("steps", last.step)),
        version=int(summary.get("version", last.version)),
        published=int(summary.get("version", last.version)),
        reward=last.reward,
        first_reward=first.reward,
        rollouts_per_s=last.rollouts_per_s,
        tokens_per_s=last.tokens_per_s,
        batch_size=last.sequences,
        outcomes=dict(summary.get("outcomes") or outcomes),
        failures=dict(summary.get("failures") or {}),
        failure_reasons=dict(summary.get("failure_reasons") or {}),
        envs=envs,
        domains=by_domain(envs),
        seconds=float(summary.get("wall_time_s", last.seconds)),
    )


def _env_status(name: str, run: RecordedRun, summary: Mapping[str, Any]) -> EnvStatus:
    assert run.ends is not None
    first, last = (record.envs.get(name) for record in run.ends)
    assert last is not None
    told = summary.get("envs", {}).get(name, {})
    outcomes, dropped = (run.series.totals()[name][what] for what in ("outcomes", "dropped"))
    completed, ended = outcomes.get("completed", 0), sum(outcomes.values())
    return EnvStatus(
        domain=str(told.get("domain") or name),
        target=last.target,
        actual=_mean(run.series.of_env(name, "share")) or 0.0,
        recent=last.share,
        dispatched=ended,
        inflight=0,
        completed=completed,
        emitted=int(told.get("sequences") or run.series.of_env(name, "sequences").sum()),
        acceptance=float(told.get("acceptance") or (completed / ended if ended else 0.0)),
        mean_latency_s=_mean(run.series.of_env(name, "latency_mean")),
        reward=last.reward,
        first_reward=None if first is None else first.reward,
        quarantined=last.quarantined,
        servers_ready=0,
        servers=0,
        restarts=0,
        queued=0,
        minimum=0,
        minimum_waived="",
        dropped=dict(dropped),
        failed=ended - completed - outcomes.get("cancelled", 0),
        last=last,
        tasks=_task_status(told.get("tasks")),
    )


def _task_status(told: Any) -> TaskStatus | None:
    """What the summary says; one of an earlier version says nothing."""
    try:
        return None if told is None else msgspec.convert(told, TaskStatus)
    except msgspec.ValidationError:
        return None


def _mean(values: NDArray[np.float64]) -> float | None:
    return float(values.mean()) if len(values) else None
