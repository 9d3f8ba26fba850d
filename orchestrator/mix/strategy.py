"""Which environment next: the interface of every mix strategy.

Owns the contract: names and normalised targets, what callers report (dispatched, finished, dropped), and the
rules that hold for all strategies: an env of zero weight is never picked, `eligible` restricts one pick without
touching what the others are owed, a report about an env that is not part of the mix is counted in `unknown`.
Counts are rollouts. Time comes in as an argument; a strategy has no clock, no I/O and no other randomness than
the generator it was given. Which example of an env comes next is not its business (see `orchestrator.tasks.source`).
"""

import math
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from orchestrator.errors import ConfigError

SMALLEST_SHARE = 1e-12
"""Smaller ones are lost in rounding, and would never be picked in any run."""


class MixError(ConfigError, ValueError):
    """Names, weights, shares or options that no mix can be made of."""


def normalised(env_names: Sequence[str], weights: Sequence[float]) -> tuple[float, ...]:
    """The weights as shares that sum to 1; MixError where they make no mix."""
    if not env_names:
        raise MixError("a mix needs at least one env")
    if len(env_names) != len(weights):
        raise MixError(f"{len(env_names)} envs but {len(weights)} weights")
    for name, count in Counter(env_names).items():
        if count > 1:
            raise MixError(f'env "{name}" is in the mix {count} times; names are unique')
    for name, weight in zip(env_names, weights, strict=True):
        if not math.isfinite(weight) or weight < 0:
            raise MixError(f'env "{name}": weight {weight} is not a finite number of at least 0')
    # Dividing by the largest first keeps the sum finite and exact for very large and very small weights.
    largest = max(weights)
    if largest == 0:
        raise MixError("every weight is 0; at least one env needs a positive one")
    scaled = [weight / largest for weight in weights]
    total = math.fsum(scaled)
    return tuple(weight / total for weight in scaled)


def mixable(env_names: Sequence[str], weights: Sequence[float]) -> tuple[float, ...]:
    """The same, with every share large enough to be picked in some run."""
    shares = normalised(env_names, weights)
    for name, share in zip(env_names, shares, strict=True):
        if 0 < share < SMALLEST_SHARE:
            raise MixError(
                f'env "{name}": a share of {share:g} of the mix is too small; raise its weight or set it to 0'
            )
    return shares


class EnvMixStrategy(ABC):
    """Picks the env of the next task. Subclasses implement `pick` and listen to what they need.

    `group_sizes` tells strategies that choose by share of picks how many rollouts a pick of each env stands for,
    so that an env with groups of 16 is picked half as often as its equal with groups of 8.
    """

    def __init__(
        self,
        env_names: Sequence[str],
        weights: Sequence[float],
        *,
        rng: random.Random,
        group_sizes: Mapping[str, int] | None = None,
    ) -> None:
        self.env_names: tuple[str, ...] = tuple(env_names)
        self.configured: tuple[float, ...] = mixable(self.env_names, weights)
        self.targets: tuple[float, ...] = self.configured
        self.rng = rng
        self.unknown: Counter[str] = Counter()
        self._index = {name: index for index, name in enumerate(self.env_names)}
        self._sizes = tuple((group_sizes or {}).get(name, 1) for name in self.env_names)
        for name, size in zip(self.env_names, self._sizes, strict=True):
            if size < 1:
                raise MixError(f'env "{name}": a group size of {size} is below 1')

    @abstractmethod
    def pick(self, eligible: Collection[str] | None = None) -> str:
        """The env of the next task, among `eligible` where given; ValueError if none of those may be picked."""

    def on_dispatch(self, env: str, n: int, *, now: float) -> None:
        """`n` rollouts of the env entered flight; a retried rollout enters again."""
        if env not in self._index:
            self.unknown[env] += n

    def on_finish(self, env: str, n: int, accepted: int, *, now: float) -> None:
        """`n` rollouts left flight and `accepted` of them reached the buffer."""
        if env not in self._index:
            self.unknown[env] += n

    def on_drop(self, env: str, n: int, *, now: float) -> None:
        """`n` rollouts that had been accepted were thrown away later."""
        if env not in self._index:
            self.unknown[env] += n

    def on_cancel(self, env: str, n: int, *, now: float) -> None:
        """`n` rollouts were stopped by us and left flight; it says nothing about the env.

        A strategy that does not tell this apart sees them as finished without result.
        """
        self.on_finish(env, n, 0, now=now)

    def set_active(self, active: Collection[str]) -> None:
        """From now on the mix is made of these envs alone; what the others owe or are owed is forgotten.

        Their targets become 0 and the rest is renormalised. With none left, all are active: a mix of nothing
        cannot be kept. Strategies that remember debts extend this.
        """
        weights = [
            share if name in active else 0.0
            for name, share in zip(self.env_names, self.configured, strict=True)
        ]
        whole = not any(weights) or tuple(weights) == self.configured
        self.targets = self.configured if whole else normalised(self.env_names, weights)

    def set_weights(self, weights: Sequence[float]) -> None:
        """From now on these are the weights, in the order of the envs, and all of them are active.

        MixError where they make no mix; then nothing has changed. Debts made under the old ones are carried over as
        `set_active` does it. A strategy that cannot change its weights while it runs raises MixError here.
        """
        self.configured = mixable(self.env_names, weights)
        self.set_active(self.env_names)

    def owed(self, env: str) -> float:
        """By how much the env is behind its share, in the strategy's own unit; 0 where it keeps no account."""
        return 0.0

    def forget_inflight(self) -> None:  # noqa: B027, only strategies that count what is in flight have something to do
        """Nothing is in flight any more: called when a new process takes over the state of an old one."""

    def state_dict(self) -> dict[str, Any]:
        """All that `load_state_dict` needs to go on exactly as this one would; plain JSON values."""
        return {
            "weights": dict(zip(self.env_names, self.configured, strict=True)),
            "targets": dict(zip(self.env_names, self.targets, strict=True)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Go on from a saved state, whose envs and weights may differ; returns what was adapted, in sentences."""
        targets: Mapping[str, float] = state["targets"]
        weights: Mapping[str, float] = state["weights"]
        # Left out before is who had a weight and no target; an env that had no weight then may have one now.
        left_out = {name for name, target in targets.items() if target <= 0 and weights.get(name, 1.0) > 0}
        self.set_active([name for name in self.env_names if name not in left_out])
        return changed_weights(weights, self.env_names, self.configured)

    def _nothing_to_pick(self, eligible: Collection[str] | None) -> NoReturn:
        among = "none is eligible" if not eligible else f"eligible: {', '.join(sorted(eligible))}"
        raise ValueError(f"no env with a positive weight can be picked ({among})")


def changed_weights(before: Mapping[str, float], names: Sequence[str], shares: Sequence[float]) -> list[str]:
    """One sentence for each env that was added, removed or re-weighted since the state was saved."""
    notes = [f'env "{name}" left the mix' for name in before if name not in names]
    for name, share in zip(names, shares, strict=True):
        if name not in before:
            notes.append(f'env "{name}" joined the mix with a share of {share:.3f}')
        elif not math.isclose(before[name], share, rel_tol=1e-9):
            notes.append(f'env "{name}" has a share of {share:.3f} now, {before[name]:.3f} before')
    return notes


def settle(accounts: list[float], shares: Sequence[float]) -> None:
    """Forget the accounts of envs without a share and spread the difference, so that all sum to 0 again."""
    for index, share in enumerate(shares):
        if share <= 0:
            accounts[index] = 0.0
    surplus = math.fsum(accounts)
    for index, share in enumerate(shares):
        accounts[index] -= surplus * share


def rng_state(rng: random.Random) -> list[Any]:
    """The generator's state as JSON values."""
    version, internal, gauss = rng.getstate()
    return [version, list(internal), gauss]


def restore_rng(rng: random.Random, state: Sequence[Any]) -> None:
    """Put a generator into a state that `rng_state` returned."""
    version, internal, gauss = state
    rng.setstate((version, tuple(internal), gauss))
