"""Batches that follow the targets as nearly as what is queued allows: of each env its oldest groups, as many as it is due.

What a batch had too much or too little of an env is made up for by the next ones, so errors do not add up; but of no more
than two batches' shares, one of them in a batch, so an env that was away does not fill the batches after it is back. Minimums
hold as without targets, and there is a batch whenever there is one without them: targets choose among batches and never
refuse one.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from orchestrator.buffer.queue import Entry, EnvQueue
from orchestrator.buffer.quotas import Quotas, within
from orchestrator.buffer.rules import NOTHING, Amounts, ExactRule, ExactSelection, smallest
from orchestrator.buffer.subset_sum import meets, reachable, window

_RECENT = 64
"""Groups of an env by which it is known how many sequences its rollouts yield."""

_FINEST = 100
"""To which part of a sequence that is known: fractions stay short."""

_FINEST_CARRIED = 10**9

_REMEMBERED = 2
"""Batches. It hardly matters: one, two or three are 0.1 percentage points apart, with slow envs, with losses and without."""


@dataclass(slots=True)
class EvenSelection(ExactSelection):
    rule: "EvenRule"

    def commit(self) -> list[Entry]:
        entries = ExactSelection.commit(self)
        self.rule.settle(entries, self.envs)
        return entries


class EvenRule(ExactRule):
    """Exactly `size` sequences with every minimum, and as near to what each env is due as whole groups come."""

    def __init__(self, size: int, quotas: Quotas) -> None:
        super().__init__(size)
        self.quotas = quotas
        self._configured = quotas.targets
        self._several: dict[str, deque[tuple[int, int]]] = {}
        self._weights: dict[str, Fraction] = {}
        """Sequences that a rollout of an env yields, where it is not one."""

    def saw(self, env: str, sequences: int, rollouts: int) -> bool:
        """A group of an env has so many sequences: targets are of rollouts, and one may yield several. Whether they changed by it."""
        if env not in self._several and sequences == rollouts:
            return False
        groups = self._several.setdefault(env, deque(maxlen=_RECENT))
        groups.append((sequences, rollouts))
        all_sequences, all_rollouts = (sum(counts) for counts in zip(*groups, strict=True))
        weight = Fraction(all_sequences, all_rollouts).limit_denominator(_FINEST)
        if weight == self._weights.get(env, 1):
            return False
        self._weights[env] = weight
        self._weigh()
        return True

    def retarget(self, targets: Mapping[str, float]) -> None:
        """Other targets from now on."""
        self.quotas.set_targets(targets)
        self._configured = self.quotas.targets
        self._weigh()

    def _weigh(self) -> None:
        weighted = dict(self._configured)
        for env, weight in self._weights.items():
            weighted[env] *= weight
        total = sum(weighted.values())
        self.quotas.targets = {env: share / total for env, share in weighted.items()}

    def choose(
        self, envs: Sequence[EnvQueue], least: Amounts = NOTHING, most: Amounts = NOTHING
    ) -> ExactSelection | None:
        """Near: the largest deviation of any env is as small as can be."""
        self.bound(envs, least, most)
        wanted = self.quotas.plan(self.size, {env.name: env.sequences for env in envs}).counts
        for env in envs:
            for lane in env.lanes.values():
                lane.reset()
        sums = [reachable(env.stock, min(self.size, env.sequences)) for env in envs]
        bounds = [(wanted[env.name], env.low, env.high) for env in envs]

        def within(deviation: int) -> list[tuple[int, int]]:
            return [
                (max(low, min(want - deviation, high)), min(high, max(want + deviation, low)))
                for want, low, high in bounds
            ]

        deviation = smallest(
            lambda size: meets(
                self.size, [window(s, *bound) for s, bound in zip(sums, within(size), strict=True)]
            ),
            self.size,
        )
        if deviation is None:
            return None
        for env, (low, high) in zip(envs, within(deviation), strict=True):
            env.low, env.high = low, high
        return self.select(envs)

    def select(self, envs: Sequence[EnvQueue]) -> ExactSelection | None:
        """The oldest groups within these bounds."""
        found = super().select(envs)
        return None if found is None else EvenSelection(found.entries, found.envs, self)

    def settle(self, entries: Sequence[Entry], envs: Sequence[EnvQueue]) -> None:
        """A batch was taken."""
        carried, targets = self.quotas.carried, self.quotas.targets
        for name, share in targets.items():
            carried[name] += share * self.size
        for _, _, size, _, _, queue in entries:
            carried[queue.name] -= size
        for env in envs:
            most = _REMEMBERED * targets[env.name] * self.size if env.available else Fraction(0)
            carried[env.name] = within(carried[env.name], most)
        # What is forgotten of one env's account is borne by all, so that all together are due a batch.
        over = sum(carried.values())
        for name, share in targets.items():
            # Short after any number of batches; what that leaves out is in the next sum.
            carried[name] = (carried[name] - share * over).limit_denominator(_FINEST_CARRIED)

    def shares(self, envs: Sequence[EnvQueue]) -> dict[str, float]:
        """What a batch has of each available env, if it is owed nothing."""
        targets = {env.name: self.quotas.targets[env.name] for env in envs if env.available}
        total = sum(targets.values())
        return {name: float(target / total * self.size) for name, target in targets.items() if total}

    def due(self, envs: Sequence[EnvQueue], batches: int) -> dict[str, float]:
        """What so many batches will have of each available env."""
        carried = self.quotas.carried
        return {name: float(carried[name]) + batches * share for name, share in self.shares(envs).items()}
