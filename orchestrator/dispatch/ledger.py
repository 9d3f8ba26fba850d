"""The ledger: every dispatched rollout ends as exactly one outcome, and the books balance at every moment.

    dispatched = in flight + Σ outcomes          for each lane (train, eval) and env

Metrics are read off the ledger; nothing else counts rollouts. Kinds of failures are names that an environment chooses,
so that only so many of them are told apart: they become labels of metrics, rows of the journal and memory.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from enum import StrEnum
from typing import Any


class Lane(StrEnum):
    """What a rollout is for."""

    TRAIN = "train"
    EVAL = "eval"


class Outcome(StrEnum):
    """How a rollout ended."""

    COMPLETED = "completed"
    """It returned a valid rollout."""
    FAILED = "failed"
    """The environment or the model failed; the detail is the kind."""
    TIMED_OUT = "timed_out"
    """It ran longer than it may."""
    CANCELLED = "cancelled"
    """It was not needed any more; the detail is the reason."""
    LOST = "lost"
    """Its server died."""


Key = tuple[Lane, str]

KINDS = 64
"""Kinds of failures that are told apart for each lane and env."""
KIND_LENGTH = 80
"""Characters of a kind that are kept."""
OTHER = "other"
"""What every further kind is called."""


class Ledger:
    """Counts rollouts by lane, env and outcome."""

    def __init__(self) -> None:
        self.dispatched: Counter[Key] = Counter()
        self.inflight: Counter[Key] = Counter()
        self.outcomes: Counter[tuple[Lane, str, Outcome, str]] = Counter()
        self.total_inflight = 0
        self._kinds: defaultdict[Key, set[str]] = defaultdict(set)

    def kind(self, lane: Lane, env: str, kind: str) -> str:
        """The name under which a kind of failure is counted, here and by everybody else."""
        kind = kind[:KIND_LENGTH]
        known = self._kinds[lane, env]
        if kind not in known:
            if len(known) >= KINDS:
                return OTHER
            known.add(kind)
        return kind

    def start(self, lane: Lane, env: str, n: int) -> None:
        """`n` rollouts entered flight."""
        self.dispatched[lane, env] += n
        self.inflight[lane, env] += n
        self.total_inflight += n

    def end(self, lane: Lane, env: str, n: int, outcome: Outcome, detail: str = "") -> None:
        """`n` rollouts left flight with one outcome."""
        if n > self.inflight[lane, env]:
            raise ValueError(
                f'{n} rollouts of {lane} env "{env}" ended, but {self.inflight[lane, env]} are in flight'
            )
        self.inflight[lane, env] -= n
        self.total_inflight -= n
        self.outcomes[lane, env, outcome, detail] += n

    def balances(self) -> bool:
        """Whether dispatched = in flight + Σ outcomes for every lane and env."""
        ended: Counter[Key] = Counter()
        for (lane, env, _, _), n in self.outcomes.items():
            ended[lane, env] += n
        keys = self.dispatched.keys() | self.inflight.keys() | ended.keys()
        flight = sum(self.inflight.values()) == self.total_inflight
        return flight and all(self.dispatched[key] == self.inflight[key] + ended[key] for key in keys)

    def totals(self, lane: Lane | None = None) -> dict[str, int]:
        """Number of rollouts by outcome, all envs together."""
        totals: Counter[str] = Counter({outcome.value: 0 for outcome in Outcome})
        for (of_lane, _, outcome, _), n in self.outcomes.items():
            if lane is None or of_lane == lane:
                totals[outcome.value] += n
        return dict(totals)

    def rows(self) -> Iterator[tuple[Lane, str, Outcome, str, int]]:
        """Each count with its labels."""
        for (lane, env, outcome, detail), n in self.outcomes.items():
            yield lane, env, outcome, detail, n

    def state_dict(self) -> dict[str, Any]:
        """Ended rollouts only: what is in flight at the end of a process ends with it and is asked again."""
        return {"outcomes": [[*key, n] for key, n in self.outcomes.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting from an earlier process' totals."""
        for lane, env, outcome, kind, n in state["outcomes"]:
            detail = self.kind(Lane(lane), env, kind) if outcome == Outcome.FAILED else kind
            self.outcomes[Lane(lane), env, Outcome(outcome), detail] += n
            self.dispatched[Lane(lane), env] += n
