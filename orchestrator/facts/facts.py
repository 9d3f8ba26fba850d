"""The one stream of facts about a run: what the progress display, the metrics, the status page and the summary read.

`Facts` is told what happened (groups scored, dropped, batches formed) and remembers it; `run.status` puts it together
with what the ledger, the book of versions, the buffer and the mix know at that moment. Nothing else keeps counts of its own.
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from envs.wire import Result
from orchestrator.dispatch.ledger import Lane, Ledger
from orchestrator.dispatch.versions import Versions
from orchestrator.facts.interval import Interval
from orchestrator.facts.reports import Reports
from orchestrator.facts.steps import StepRecord
from orchestrator.facts.turns import Turns
from orchestrator.groups.group import Batch
from orchestrator.mix import DeliveredMix

REASON_CHARS = 400
"""Of the text of a failure that is remembered."""

LOST = "server_lost"
"""The kind of failure of rollouts whose server died; the ledger has an outcome of its own for them."""

TOLD = 4
"""Kinds of failures that one message tells."""

HISTORY = 60
"""Steps that are remembered, for trends."""

PACE_STEPS = 16
"""Steps by which the time that is left is judged."""

WINDOW = 16
"""Batches over which the recent mix is taken: some hundred groups, so that rounding does not show."""


@dataclass(slots=True)
class EnvFacts:
    """What happened to one env's groups so far."""

    dropped: Counter[str] = field(default_factory=Counter)
    reward_sum: float = 0.0
    reward_count: int = 0
    reward: float | None = None
    first_reward: float | None = None
    failure: str = ""
    """What the last failed rollout said."""


class Facts:
    """Told what happens; asked for the status."""

    def __init__(
        self, targets: Mapping[str, float], *, ledger: Ledger, versions: Versions, now: float
    ) -> None:
        self.targets = dict(targets)
        self.envs = {name: EnvFacts() for name in targets}
        self.ledger = ledger
        self._versions = versions
        self.reward: float | None = None
        self.first_reward: float | None = None
        self.stale_sum = 0
        self.stale_max = 0
        self._reasons: dict[tuple[str, str], str] = {}
        self._started = now
        self._earlier_s = 0.0
        self.delivered = DeliveredMix(list(targets), window=WINDOW)
        self.reports = Reports()
        self.history: deque[StepRecord] = deque(maxlen=HISTORY)
        """The last steps."""
        self._turns = Turns(versions, now)
        self._interval = Interval(self.targets, ledger, self._turns, now)
        self.tokens = 0
        """Tokens in all batches."""
        self._tokens = 0
        self._rate: deque[tuple[float, int, int]] = deque([(now, 0, 0)])

    def returned(self, env: str, result: Result, seconds: float) -> None:
        """Rollouts for training are back, after so long."""
        tokens = len(result.tokens)
        self._tokens += tokens
        self._interval.returned(env, result.rollouts, tokens, seconds)

    def spends(self, doing: str, now: float) -> None:
        """What the run's time goes to from now on."""
        self._interval.spends(doing, now)

    def scored(self, env: str, rewards: list[float]) -> None:
        """A group's rollouts have their rewards, whether or not the group is trained on."""
        facts = self.envs[env]
        facts.reward_sum += sum(rewards)
        facts.reward_count += len(rewards)

    def dropped(self, env: str, reason: str, rollouts: int) -> None:
        """Rollouts that will not be trained on."""
        self.envs[env].dropped[reason] += rollouts

    def took(self, env: str, end: str, seconds: float) -> None:
        """An attempt at a rollout for training ended without one, or a group with them, after so long; see `steps.ENDS`."""
        self._interval.took(env, end, seconds)

    def failed(self, lane: Lane, env: str, kind: str, said: str) -> None:
        """A rollout failed, and this is what it said; the last of each kind is remembered."""
        said = " ".join(said.split())
        if len(said) > REASON_CHARS:
            # What was raised stands at the beginning, where it was raised at the end.
            said = f"{said[: REASON_CHARS // 2]} … {said[-REASON_CHARS // 2 :]}"
        self._reasons[env, self.ledger.kind(lane, env, kind)] = said
        if lane is Lane.TRAIN:
            self.envs[env].failure = said

    def explain(self, env: str, kind: str) -> str:
        """A kind of failure, with what the last one of it said."""
        said = self._reasons.get((env, kind))
        return f"{kind}: {said}" if said else kind

    def batch_formed(self, batch: Batch, *, quarantined: frozenset[str], now: float) -> StepRecord:
        """A batch is complete; closes the interval over which rewards are averaged, and makes the step's record."""
        sizes: Counter[str] = Counter()
        ages = []
        for group in batch.groups:
            sizes[group.env] += group.size
            age = self._versions.age(group.version, batch.step)
            ages.append(age)
            self.stale_sum += age * group.size
            self.stale_max = max(self.stale_max, age)
        self.delivered.add(sizes)
        sampled = {
            name: facts.reward_sum / facts.reward_count if facts.reward_count else None
            for name, facts in self.envs.items()
        }
        for facts in self.envs.values():
            if facts.reward_count:
                facts.reward = facts.reward_sum / facts.reward_count
                facts.first_reward = facts.reward if facts.first_reward is None else facts.first_reward
                facts.reward_sum, facts.reward_count = 0.0, 0
        self.reward = self._mean_reward()
        self.first_reward = self.reward if self.first_reward is None else self.first_reward
        record = self._interval.close(
            batch,
            ages,
            dropped={name: facts.dropped for name, facts in self.envs.items()},
            sampled=sampled,
            sampled_reward=self.reward,
            quarantined=quarantined,
            seconds=self.seconds(now),
            now=now,
        )
        self.history.append(record)
        self.tokens += record.tokens
        return record

    def _mean_reward(self) -> float | None:
        """Latest rewards of the envs, weighted by their targets: an env that had nothing new does not drop out."""
        known = [
            (self.targets[name], facts.reward)
            for name, facts in self.envs.items()
            if facts.reward is not None
        ]
        total = sum(target for target, _ in known)
        return sum(target * reward for target, reward in known) / total if total else None

    def seconds(self, now: float) -> float:
        """Time that the run has been running, earlier processes included."""
        return self._earlier_s + now - self._started

    def rate(self, now: float) -> tuple[float, float]:
        """Rollouts completed and their tokens per second, over the last few seconds."""
        done = self._completed()
        if now - self._rate[-1][0] > 0.2:
            self._rate.append((now, done, self._tokens))
        while len(self._rate) > 2 and self._rate[0][0] < now - 5:
            self._rate.popleft()
        since, before, tokens = self._rate[0]
        took = now - since
        return ((done - before) / took, (self._tokens - tokens) / took) if took > 0 else (0.0, 0.0)

    def _completed(self) -> int:
        """Rollouts for training that completed, in earlier processes too."""
        return sum(
            n
            for (lane, _, outcome, _), n in self.ledger.outcomes.items()
            if lane is Lane.TRAIN and outcome == "completed"
        )

    def seconds_left(self, steps: int) -> float | None:
        """What so many further steps will take, judged by the last ones; None while nothing is known."""
        recent = list(self.history)[-PACE_STEPS:]
        if len(recent) < 2:
            return None
        return steps * (recent[-1].seconds - recent[0].seconds) / (len(recent) - 1)

    @property
    def sequences(self) -> int:
        """Sequences in all batches."""
        return self.delivered.counts.total()

    def failures(self) -> dict[str, int]:
        """Rollouts that did not complete, by env and kind."""
        rows = self.ledger.rows()
        return {
            f"{env}: {detail or outcome}": n
            for _, env, outcome, detail, n in rows
            if outcome in ("failed", "timed_out", "lost")
        }

    def failure_reasons(self) -> dict[str, str]:
        """What the last failure of each of these said, as far as this process saw one."""
        return {
            f"{env}: {'lost' if kind == LOST else kind}": said for (env, kind), said in self._reasons.items()
        }

    def failures_told(self) -> str:
        """The same in one line, the most frequent first."""
        reasons = self.failure_reasons()
        counted = sorted(self.failures().items(), key=lambda item: -item[1])
        return "; ".join(
            f"{what} ({n} rollouts){f', the last: {reasons[what]}' if what in reasons else ''}"
            for what, n in counted[:TOLD]
        )

    def staleness_numbers(self) -> dict[str, float]:
        """Mean and largest age in versions of what was trained on."""
        return {
            "mean": self.stale_sum / self.sequences if self.sequences else 0.0,
            "max": float(self.stale_max),
        }

    def state_dict(self, now: float) -> dict[str, Any]:
        """For a later process of the same run."""
        return {
            "seconds": self.seconds(now),
            "tokens": self.tokens,
            "stale": [self.stale_sum, self.stale_max],
            "rewards": [self.first_reward, self.reward],
            "envs": {
                name: {
                    "dropped": dict(facts.dropped),
                    "rewards": [facts.first_reward, facts.reward],
                }
                for name, facts in self.envs.items()
            },
            "delivered": self.delivered.state_dict(),
            "reports": self.reports.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from an earlier process; envs that are gone are left out."""
        self._earlier_s = state["seconds"]
        self.delivered.load_state_dict(state["delivered"])
        self.reports.load_state_dict(state.get("reports", {}))  # earlier revisions know none
        self.tokens = state.get("tokens", 0)  # same
        self.stale_sum, self.stale_max = state["stale"]
        self.first_reward, self.reward = state["rewards"]
        for name, facts in state["envs"].items():
            if name in self.envs:
                mine = self.envs[name]
                mine.dropped = Counter(facts["dropped"])
                mine.first_reward, mine.reward = facts["rewards"]

    def begin(self, now: float) -> None:
        """The run starts: what is restored is restored, and the first step's time begins."""
        self._rate = deque([(now, self._completed(), self._tokens)])
        self._turns.begin(now)
        self._interval.begin({name: facts.dropped for name, facts in self.envs.items()}, now)
