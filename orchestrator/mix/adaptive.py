"""The target-over-actual rule: draws at random, envs that are behind more often.

Weight of an env = its share of picks × clamp(target / actual, 0.1, 10), where actual is its share of what was
accepted and not dropped since, once `warmup` rollouts were accepted. It is here for comparison with published
results: it settles at about target × √acceptance, not at the target. `flow` does not have that bias.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from orchestrator.mix.strategy import MixError, restore_rng, rng_state
from orchestrator.mix.weighted import PickShares, draw

LOWEST, HIGHEST = 0.1, 10.0


class Adaptive(PickShares):
    """Weighted draws whose weights follow target / actual of the accepted rollouts."""

    def __init__(
        self,
        env_names: Sequence[str],
        weights: Sequence[float],
        *,
        rng: random.Random,
        warmup: int = 50,
        group_sizes: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(env_names, weights, rng=rng, group_sizes=group_sizes)
        if warmup < 0:
            raise MixError(f"a warm-up of {warmup} rollouts is below 0")
        self._warmup = warmup
        self._accepted = [0.0] * len(self.env_names)
        self._seen = 0
        self._weights: list[float] | None = None

    def pick(self, eligible: Collection[str] | None = None) -> str:
        weights = self._weights
        if weights is None:
            weights = self._weights = self._corrected()
        if eligible is not None:
            weights = [
                weight if name in eligible else 0.0
                for name, weight in zip(self.env_names, weights, strict=True)
            ]
        return draw(self.rng, self.env_names, weights) or self._nothing_to_pick(eligible)

    def on_finish(self, env: str, n: int, accepted: int, *, now: float) -> None:
        super().on_finish(env, n, accepted, now=now)
        if accepted and env in self._index:
            self._accepted[self._index[env]] += accepted
            self._seen += accepted
            self._weights = None

    def on_drop(self, env: str, n: int, *, now: float) -> None:
        super().on_drop(env, n, now=now)
        if env in self._index:
            index = self._index[env]
            self._accepted[index] = max(0.0, self._accepted[index] - n)
            self._weights = None

    def set_active(self, active: Collection[str]) -> None:
        before = self.targets
        super().set_active(active)
        kept = [index for index, target in enumerate(self.targets) if target > 0 and before[index] > 0]
        delivered = sum(self._accepted[index] for index in kept)
        share = sum(self.targets[index] for index in kept)
        for index, target in enumerate(self.targets):
            if target > 0 and before[index] == 0:  # it comes back exactly on target
                self._accepted[index] = delivered * target / share if share else 0.0
        self._weights = None

    def set_weights(self, weights: Sequence[float]) -> None:
        super().set_weights(weights)
        self._forget_accepted()

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "rng": rng_state(self.rng),
            "accepted": dict(zip(self.env_names, self._accepted, strict=True)),
            "seen": self._seen,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        notes = super().load_state_dict(state)
        restore_rng(self.rng, state["rng"])
        self._accepted = [state["accepted"].get(name, 0.0) for name in self.env_names]
        self._seen = state["seen"]
        if notes:
            self._forget_accepted()
            notes.append("the counts of accepted rollouts start again")
        self._weights = None
        return notes

    def _forget_accepted(self) -> None:
        """Counts under other targets say nothing about these."""
        self._accepted = [0.0] * len(self.env_names)
        self._seen = 0
        self._weights = None

    def _corrected(self) -> list[float]:
        counts = [
            count if target > 0 else 0.0 for count, target in zip(self._accepted, self.targets, strict=True)
        ]
        total = sum(counts)
        if self._seen < self._warmup or total <= 0:
            return list(self._shares)
        return [
            share * min(HIGHEST, max(LOWEST, target * total / count if count > 0 else HIGHEST))
            for share, target, count in zip(self._shares, self.targets, counts, strict=True)
        ]
