"""Strategies that keep the share of *picks* on target: at random, or in turn.

They do not look at what becomes of the rollouts, so envs that are slow or lose rollouts are under-represented in
what is delivered; `flow` is for that. Invariants: `WeightedRandom` takes exactly one number from its generator
per pick; `WeightedRoundRobin` takes none, and without `eligible` every env is within one pick of its share after
any number of picks.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from orchestrator.mix.strategy import EnvMixStrategy, normalised, restore_rng, rng_state, settle


class PickShares(EnvMixStrategy):
    """Turns shares of rollouts into shares of picks."""

    def __init__(
        self,
        env_names: Sequence[str],
        weights: Sequence[float],
        *,
        rng: random.Random,
        group_sizes: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(env_names, weights, rng=rng, group_sizes=group_sizes)
        self._shares = self._pick_shares()

    def set_active(self, active: Collection[str]) -> None:
        super().set_active(active)
        self._shares = self._pick_shares()

    def _pick_shares(self) -> list[float]:
        per_pick = [target / size for target, size in zip(self.targets, self._sizes, strict=True)]
        return list(normalised(self.env_names, per_pick))


def draw(rng: random.Random, names: Sequence[str], weights: Sequence[float]) -> str | None:
    """One weighted draw that takes exactly one number from the generator; None if every weight is 0."""
    point = rng.random() * sum(weights)
    last = None
    for name, weight in zip(names, weights, strict=True):
        if weight > 0:
            if point < weight:
                return name
            point -= weight
            last = name  # rounding may leave the point at the very end
    return last


class WeightedRandom(PickShares):
    """One weighted draw per pick: the same seed gives the same sequence."""

    def pick(self, eligible: Collection[str] | None = None) -> str:
        weights: Sequence[float] = self._shares
        if eligible is not None:
            weights = [
                share if name in eligible else 0.0
                for name, share in zip(self.env_names, self._shares, strict=True)
            ]
        return draw(self.rng, self.env_names, weights) or self._nothing_to_pick(eligible)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rng": rng_state(self.rng)}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        notes = super().load_state_dict(state)
        restore_rng(self.rng, state["rng"])
        return notes


class WeightedRoundRobin(PickShares):
    """Smooth and deterministic: the env that must be picked soonest to stay within one pick of its share.

    Each pick credits every env with its share and charges one to the picked env. Taking the largest credit, as
    usual, drifts by more than one pick with many envs; taking the earliest deadline among those that have earned
    a pick (R. Tijdeman, "The chairman assignment problem", 1980) never does.
    An env that is not eligible keeps its credit and comes first when it is eligible again.
    """

    def __init__(
        self,
        env_names: Sequence[str],
        weights: Sequence[float],
        *,
        rng: random.Random,
        group_sizes: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(env_names, weights, rng=rng, group_sizes=group_sizes)
        self._credit = [0.0] * len(self.env_names)

    def pick(self, eligible: Collection[str] | None = None) -> str:
        if eligible is not None and not any(
            share > 0 and name in eligible for name, share in zip(self.env_names, self._shares, strict=True)
        ):
            self._nothing_to_pick(eligible)
        shares, credit = self._shares, self._credit
        slack = 1.0 / max(1, 2 * sum(share > 0 for share in shares) - 2)
        chosen, chosen_key = -1, (False, 0.0)
        for index, share in enumerate(shares):
            if share <= 0:
                continue
            credit[index] += share
            if eligible is not None and self.env_names[index] not in eligible:
                continue
            # Those that have earned a pick come first, the earliest deadline among them; if none has (the ones
            # that did are not eligible), the one that is closest to having earned it.
            earned = credit[index] >= slack - 1e-9
            key = (earned, (credit[index] - 1.0 + slack) / share if earned else credit[index])
            if chosen < 0 or key > chosen_key:
                chosen, chosen_key = index, key
        credit[chosen] -= 1.0
        return self.env_names[chosen]

    def set_active(self, active: Collection[str]) -> None:
        super().set_active(active)
        settle(self._credit, self._shares)

    def owed(self, env: str) -> float:
        return self._credit[self._index[env]]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "credit": dict(zip(self.env_names, self._credit, strict=True))}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        notes = super().load_state_dict(state)
        self._credit[:] = [state["credit"].get(name, 0.0) for name in self.env_names]
        if notes:
            settle(self._credit, self._shares)
        return notes
