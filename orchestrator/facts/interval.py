"""From one batch to the next: what came back meanwhile, and what the time went to.

`close` makes the record of a step of it and begins anew. Counts are differences of the ledger's, which alone counts
rollouts. Bounded whatever environments send: so many latencies and names of metrics of each env. Pure.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from envs.messages import RolloutHeader
from orchestrator.dispatch.ledger import Lane, Ledger, Outcome
from orchestrator.facts.steps import EnvStep, StepRecord, length_histogram, spread, time_step
from orchestrator.facts.turns import Turns
from orchestrator.groups.group import FACTS, Batch

TIMES = ("rollouts", "trainer", "weights", "paused")
"""What a run's time goes to: rollouts run, the trainer has what it needs, engines load weights, people paused it."""

MOST_LATENCIES = 4096
"""Of each env between two steps; beyond that the last ones count."""

MOST_METRICS = 32
"""Names of an environment's own metrics."""


@dataclass(slots=True)
class _Since:
    """One env since the step before."""

    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_LATENCIES))
    metrics: dict[str, list[float]] = field(default_factory=dict)
    """Sum and number of each."""
    times: dict[str, Counter[int]] = field(default_factory=dict)
    """Steps of time (`steps.time_step`), by how attempts ended."""


class Interval:
    """Told what happens between two batches."""

    def __init__(self, targets: Mapping[str, float], ledger: Ledger, turns: Turns, now: float) -> None:
        self._targets = targets
        self._ledger = ledger
        self._turns = turns
        self._since = {name: _Since() for name in targets}
        self._tokens = 0
        self._began = now
        self._looked = now
        self._doing = "rollouts"
        self._times = dict.fromkeys(TIMES, 0.0)
        self._outcomes: dict[str, Counter[str]] = {}
        self._dropped: dict[str, Counter[str]] = {}

    def begin(self, dropped: Mapping[str, Counter[str]], now: float) -> None:
        """Begin anew from what was counted so far."""
        self._outcomes = self._ended()
        self._dropped = {name: Counter(counts) for name, counts in dropped.items()}
        for name in self._since:
            self._since[name] = _Since()
        self._tokens, self._began, self._looked = 0, now, now
        self._times = dict.fromkeys(TIMES, 0.0)

    def returned(self, env: str, rollouts: Sequence[RolloutHeader], tokens: int, seconds: float) -> None:
        """Rollouts are back, after so long."""
        since = self._since[env]
        since.latencies.append(seconds)
        self.took(env, "completed", seconds)
        self._tokens += tokens
        metrics = since.metrics
        for rollout in rollouts:
            for name, value in rollout.metrics.items():
                told = metrics.get(name)
                if told is not None:
                    told[0] += value
                    told[1] += 1
                elif len(metrics) < MOST_METRICS:
                    metrics[name] = [value, 1]

    def took(self, env: str, end: str, seconds: float) -> None:
        """An attempt ended after so long, in one of the ways of `steps.ENDS`."""
        times = self._since[env].times
        if end not in times:
            times[end] = Counter()
        times[end][time_step(seconds)] += 1

    def spends(self, doing: str, now: float) -> None:
        """What the time goes to from now on."""
        self._turns.look(now)
        self._times[self._doing] += now - self._looked
        self._doing, self._looked = doing, now

    def close(
        self,
        batch: Batch,
        ages: Sequence[int],
        *,
        dropped: Mapping[str, Counter[str]],
        sampled: Mapping[str, float | None],
        sampled_reward: float | None,
        quarantined: frozenset[str],
        seconds: float,
        now: float,
    ) -> StepRecord:
        """The record of a step whose batch was formed; `ages` are its groups' in versions."""
        self.spends(self._doing, now)
        took = max(now - self._began, 1e-9)
        sizes = [group.size for group in batch.groups]
        numbers = {name: number for number, name in enumerate(self._targets)}
        of_env = np.repeat([numbers[group.env] for group in batch.groups], sizes)
        lengths = np.fromiter((length for group in batch.groups for length in group.lengths), np.float64)
        rewards = np.concatenate([group.rewards for group in batch.groups])
        # Joined as bytes: numpy takes its time to see that rows of one kind are of one kind.
        facts = np.frombuffer(b"".join([group.facts.tobytes() for group in batch.groups]), FACTS)
        cut = facts["truncated"] != 0
        ended = self._ended()
        outcomes = {name: ended[name] - self._outcomes.get(name, Counter()) for name in self._targets}
        completed = sum(counts[Outcome.COMPLETED] for counts in outcomes.values())
        new_drops = {name: Counter(dropped[name]) - self._dropped.get(name, Counter()) for name in dropped}
        filtered = sum(counts["equal_rewards"] for counts in new_drops.values())
        envs = {}
        for number, (name, target) in enumerate(self._targets.items()):
            mine = of_env == number
            own, since, count = lengths[mine], self._since[name], int(mine.sum())
            envs[name] = EnvStep(
                sequences=count,
                share=count / len(lengths),
                target=target,
                reward=float(rewards[mine].mean()) if count else None,
                tokens=int(own.sum()),
                length=spread(own),
                truncated=float(cut[mine].mean()) if count else 0.0,
                sampled_reward=sampled[name],
                latency_s=spread(np.array(since.latencies)),
                metrics={metric: total / n for metric, (total, n) in since.metrics.items()},
                outcomes=dict(outcomes[name]),
                dropped=dict(new_drops.get(name, {})),
                inflight=self._ledger.inflight[Lane.TRAIN, name],
                quarantined=name in quarantined,
                times={end: dict(counts) for end, counts in since.times.items()},
            )
        record = StepRecord(
            step=batch.step,
            version=batch.version,
            seconds=round(seconds, 3),
            groups=len(batch.groups),
            sequences=len(lengths),
            tokens=int(lengths.sum()),
            reward=float(rewards.mean(dtype=np.float64)),
            sampled_reward=sampled_reward,
            length=spread(lengths),  # type: ignore[arg-type]  # a batch is never empty
            lengths=length_histogram(lengths),
            staleness=np.bincount(np.repeat(np.maximum(ages, 0), sizes)).tolist(),
            truncated=float(cut.mean()),
            filtered=min(1.0, filtered / completed) if completed else 0.0,
            rollouts=completed,
            rollouts_per_s=completed / took,
            tokens_per_s=self._tokens / took,
            time={what: round(self._times[what], 3) for what in TIMES},
            envs=envs,
            trained_s=self._turns.drain_trained(),
            loaded_s=self._turns.drain_loaded(),
        )
        self.begin(dropped, now)
        return record

    def _ended(self) -> dict[str, Counter[str]]:
        ended: dict[str, Counter[str]] = {name: Counter() for name in self._targets}
        for lane, name, outcome, _, n in self._ledger.rows():
            if lane is Lane.TRAIN and name in ended:
                ended[name][outcome.value] += n
        return ended
