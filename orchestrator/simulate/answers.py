"""What a configuration does, in numbers: from the records of a run's steps, imagined or real, and over several seeds.

The same function reads both kinds of records, so that a simulation can be held against the run that it was taken from. The
first batch is where counting begins: what comes before it is the start. Pure.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from orchestrator.facts.steps import StepRecord
from orchestrator.simulate.rehearsal import Rehearsal

FINISHED = ("equal_rewards", "stale", "surplus", "split_rest", "oversize", "task_mismatch")
"""Why groups are dropped whose rollouts all came back."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One run. Shares are between 0 and 1; what is not known of a recorded run is None."""

    steps: int
    seconds: float
    """Until the last batch."""
    steps_per_hour: float
    sequences_per_s: float
    tokens_per_s: float
    trainer: float | None
    """Share of the time in which the trainer had a batch."""
    engines: float | None
    """What they sampled of what they could have, at the best point of their table; without one, share of the slots in use."""
    inflight: float | None
    queue: float | None
    """Sequences that wait for a batch, on average."""
    queue_max: int | None
    thrown_away: float
    """Share of the attempts that came to nothing: they failed or were cut off, or their group is not trained on."""
    staleness: float
    """Mean age in versions."""
    ages: list[float]
    """Share of the sequences of age 0, 1, 2, …"""
    time: dict[str, float]
    """Share of the time by what it went to; see `facts.interval.TIMES`."""
    shares: dict[str, float]
    targets: dict[str, float]
    quarantined: dict[str, float] = field(default_factory=dict)
    """Share of the steps in which an env was quarantined, of those that were."""
    outcomes: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)


def answer_of(records: Sequence[StepRecord], *, sequences_per_rollout: float, **known: Any) -> Answer:
    """What the records of a run say, with what else is `known` (trainer, engines, inflight, queue, queue_max)."""
    first, last = records[0], records[-1]
    later = records[1:] or records
    began = first.seconds if len(records) > 1 else 0.0
    took = max(last.seconds - began, 1e-9)
    ages = _added(record.staleness for record in records)
    times = _counted(record.time for record in later)
    sequences = _counted({name: env.sequences for name, env in record.envs.items()} for record in records)
    outcomes = _counted(env.outcomes for record in records for env in record.envs.values())
    dropped = _counted(env.dropped for record in records for env in record.envs.values())
    wasted = _wasted(outcomes, dropped)
    trained = sum(sequences.values()) / sequences_per_rollout
    total = sum(sequences.values()) or 1
    facts: dict[str, Any] = dict.fromkeys(("trainer", "engines", "inflight", "queue", "queue_max")) | known
    return Answer(
        steps=len(records),
        seconds=last.seconds,
        steps_per_hour=3600 * len(later) / took,
        sequences_per_s=sum(record.sequences for record in later) / took,
        tokens_per_s=sum(record.tokens for record in later) / took,
        thrown_away=wasted / ((wasted + trained) or 1),
        staleness=sum(age * n for age, n in enumerate(ages)) / (sum(ages) or 1),
        ages=[n / (sum(ages) or 1) for n in ages],
        time={name: seconds / (sum(times.values()) or 1) for name, seconds in times.items()},
        shares={name: n / total for name, n in sequences.items()},
        targets={name: env.target for name, env in last.envs.items()},
        quarantined=_quarantined(records),
        outcomes={name: int(n) for name, n in outcomes.items() if n},
        dropped={name: int(n) for name, n in dropped.items() if n},
        **facts,
    )


def answer_of_rehearsal(world: Rehearsal, *, best_tokens_per_s: float, slots: int) -> Answer:
    """What an imagined run says. `best_tokens_per_s`: of all engines together, 0 where they have no table."""
    measured = world.measured
    seconds = measured.seconds or 1e-9
    busy = measured.inflight_area / seconds / slots
    if best_tokens_per_s:
        busy = measured.sampled / seconds / best_tokens_per_s
    return answer_of(
        world.steps,
        sequences_per_rollout=measured.sequences / measured.rollouts if measured.rollouts else 1.0,
        trainer=min(1.0, measured.trainer_s / seconds),
        engines=min(1.0, busy),
        inflight=measured.inflight_area / seconds,
        queue=measured.queue_area / seconds,
        queue_max=measured.queue_max,
    )


def answer_of_recording(records: Sequence[StepRecord], *, sequences_per_rollout: float) -> Answer:
    """What a recorded run says."""
    told = [seconds for record in records for seconds in record.trained_s]
    return answer_of(
        records,
        sequences_per_rollout=sequences_per_rollout,
        trainer=min(1.0, sum(told) / max(records[-1].seconds, 1e-9)) if told else None,
        inflight=statistics.mean(sum(env.inflight for env in record.envs.values()) for record in records),
    )


@dataclass(frozen=True, slots=True)
class Answers:
    """The same configuration over several seeds."""

    each: Sequence[Answer]

    def mean(self, number: Callable[[Answer], float | None]) -> float | None:
        """Of a number over the seeds; None where it is not known."""
        values = [value for answer in self.each if (value := number(answer)) is not None]
        return statistics.mean(values) if values else None

    def deviation(self, number: Callable[[Answer], float | None]) -> float:
        """Its standard deviation over the seeds; 0 of one."""
        values = [value for answer in self.each if (value := number(answer)) is not None]
        return statistics.stdev(values) if len(values) > 1 else 0.0

    def table(self, numbers: Callable[[Answer], Mapping[str, float]]) -> dict[str, float]:
        """Means of several numbers that have names."""
        names = dict.fromkeys(name for answer in self.each for name in numbers(answer))
        return {
            name: statistics.mean(numbers(answer).get(name, 0.0) for answer in self.each) for name in names
        }

    def spreads(self, numbers: Callable[[Answer], Mapping[str, float]]) -> dict[str, float]:
        """Their standard deviations over the seeds; 0 of one."""
        return {
            name: self.deviation(lambda one, name=name: numbers(one).get(name, 0.0))  # type: ignore[misc]
            for name in self.table(numbers)
        }

    def as_json(self) -> dict[str, Any]:
        """Mean and deviation of every number, and each seed's own."""
        plain = [name for name, value in asdict(self.each[0]).items() if not isinstance(value, dict | list)]
        return {
            **{
                name: {
                    "mean": self.mean(lambda one, name=name: getattr(one, name)),  # type: ignore[misc]
                    "sd": self.deviation(lambda one, name=name: getattr(one, name)),  # type: ignore[misc]
                }
                for name in plain
            },
            "time": self._with_spread(lambda one: one.time),
            "shares": self._with_spread(lambda one: one.shares),
            "targets": self.each[0].targets,
            "ages": list(self._with_spread(ages_of).values()),
            "dropped": self._with_spread(lambda one: one.dropped),
            "seeds": [asdict(one) for one in self.each],
        }

    def _with_spread(self, numbers: Callable[[Answer], Mapping[str, float]]) -> dict[str, dict[str, float]]:
        spreads = self.spreads(numbers)
        return {name: {"mean": mean, "sd": spreads[name]} for name, mean in self.table(numbers).items()}


def with_spread(answers: Answers, mean: float, deviation: float, shape: str) -> str:
    """A number for people, with its spread over the seeds where there are several."""
    return f"{mean:{shape}}" + (f" ± {deviation:{shape}}" if len(answers.each) > 1 else "")


def ages_of(answer: Answer) -> dict[str, float]:
    """Shares of the sequences by their age."""
    return {str(age): share for age, share in enumerate(answer.ages)}


def _wasted(outcomes: Mapping[str, float], dropped: Mapping[str, float]) -> float:
    """Attempts that came to nothing. Those of a group that failed are counted with the group, those that were asked again alone."""
    unfinished = sum(n for outcome, n in outcomes.items() if outcome != "completed")
    failed = sum(n for reason, n in dropped.items() if reason not in FINISHED)
    return sum(dropped.values()) + max(0.0, unfinished - failed)


def _quarantined(records: Sequence[StepRecord]) -> dict[str, float]:
    found = Counter(name for record in records for name, env in record.envs.items() if env.quarantined)
    return {name: n / len(records) for name, n in found.items()}


def _added(lists: Any) -> list[int]:
    found: list[int] = []
    for counts in lists:
        found += [0] * (len(counts) - len(found))
        for place, n in enumerate(counts):
            found[place] += n
    return found


def _counted(tables: Any) -> dict[str, float]:
    found: Counter[str] = Counter()
    for table in tables:
        found.update(table)
    return dict(found)
