"""The default strategy: keeps the *delivered* mix on target whatever the latencies and losses are.

By Little's law an env that delivers its share t of everything occupies slots in proportion to t·L/ŝ, where L is
how long its rollouts are in flight and ŝ the fraction of them that is accepted. Both are measured with slow
forgetting. So each env has a quota of the slots, and beyond it what it is behind in deliveries:

    L = ∫ inflight dt / (done + 1)    quota = M · (t·L/ŝ) / Σ(t·L/ŝ),  M = rollouts in flight + 1
    owed = t · delivered by all − delivered by the env
    pick the largest  quota − inflight + gain · owed / ŝ

Invariants: what the envs are owed sums to 0; an env that is not eligible keeps what it is owed, while the
eligible ones share among themselves as if they were alone. A report costs O(1), a pick O(envs). It does not
protect itself from an env that never delivers; the circuit breaker in front of it does.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from orchestrator.mix.strategy import EnvMixStrategy, MixError, settle

# Seconds of flight that every env starts with, so that before anything is measured all latencies are equal.
# Far below any real latency: the first rollouts replace it.
FIRST_GUESS_S = 1e-6
# Acceptance starts at 1 with the weight of this many rollouts.
PRIOR_ROLLOUTS = 2.0


class Flow(EnvMixStrategy):
    """Quota by Little's law plus a correction for what each env is owed.

    `gain` is how much of a debt is ordered at once: 1 orders all of it, more overshoots when latencies are fixed.
    `window` is the number of an env's rollouts after which a measurement has lost two thirds of its weight:
    shorter follows a change sooner, longer is steadier.
    """

    def __init__(
        self,
        env_names: Sequence[str],
        weights: Sequence[float],
        *,
        rng: random.Random,
        gain: float = 1.0,
        window: int = 300,
        group_sizes: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(env_names, weights, rng=rng, group_sizes=group_sizes)
        if not 0 < gain <= 2:
            raise MixError(f"flow: a gain of {gain} is not above 0 and at most 2")
        if not window >= 1:
            raise MixError(f"flow: a window of {window} rollouts is below 1")
        count = len(self.env_names)
        self._gain = gain
        self._keep = 1.0 - 1.0 / window
        self._now = 0.0
        self._delivered = 0.0
        self._account = [0.0] * count  # delivered by the env; owed = target × delivered − account
        self._inflight = [0] * count
        self._touched = [0.0] * count  # until when the area is counted
        self._area = [FIRST_GUESS_S] * count  # ∫ inflight dt
        self._done = [0.0] * count
        self._good = [0.0] * count
        self._cost = [1.0] * count  # 1/ŝ, rollouts needed for a delivered one

    def pick(self, eligible: Collection[str] | None = None) -> str:
        now, delivered = self._now, self._delivered
        candidates = []
        slots, total, surplus, share = 1, 0.0, 0.0, 0.0
        for name, target, running, area, touched, done, cost, account in zip(
            self.env_names,
            self.targets,
            self._inflight,
            self._area,
            self._touched,
            self._done,
            self._cost,
            self._account,
            strict=True,
        ):
            if target > 0 and (eligible is None or name in eligible):
                need = target * cost * (area + running * (now - touched)) / (done + 1)
                owed = target * delivered - account
                candidates.append((name, target, running, need, owed, cost))
                slots += running
                total += need
                surplus += owed
                share += target
        if not candidates:
            self._nothing_to_pick(eligible)
        # With every env eligible the surplus is 0. Otherwise it is what the eligible ones owe to the others
        # together, and each bears its share of that: it must not change the mix among them.
        surplus /= share
        per_need = slots / total if total else 0.0  # with a short memory all measurements can be forgotten
        gain = self._gain
        best, best_score = "", float("-inf")
        for name, target, running, need, owed, cost in candidates:
            score = per_need * need - running + gain * cost * (owed - surplus * target)
            if score > best_score:
                best, best_score = name, score
        return best

    def on_dispatch(self, env: str, n: int, *, now: float) -> None:
        index = self._index.get(env)
        if index is None:
            self.unknown[env] += n
            return
        self._advance(index, now)
        self._inflight[index] += n

    def on_finish(self, env: str, n: int, accepted: int, *, now: float) -> None:
        index = self._index.get(env)
        if index is None:
            self.unknown[env] += n
            return
        self._advance(index, now)
        self._inflight[index] = max(0, self._inflight[index] - n)
        keep = self._keep**n
        self._area[index] *= keep
        self._done[index] = self._done[index] * keep + n
        self._good[index] = self._good[index] * keep + accepted
        self._deliver(index, accepted)

    def on_cancel(self, env: str, n: int, *, now: float) -> None:
        index = self._index.get(env)
        if index is None:
            self.unknown[env] += n
            return
        self._advance(index, now)
        self._inflight[index] = max(0, self._inflight[index] - n)

    def on_drop(self, env: str, n: int, *, now: float) -> None:
        index = self._index.get(env)
        if index is None:
            self.unknown[env] += n
            return
        self._good[index] = max(0.0, self._good[index] - n)
        self._deliver(index, -n)

    def set_active(self, active: Collection[str]) -> None:
        owed = [
            target * self._delivered - got for target, got in zip(self.targets, self._account, strict=True)
        ]
        super().set_active(active)
        self._open_accounts(owed)

    def owed(self, env: str) -> float:
        index = self._index[env]
        return self.targets[index] * self._delivered - self._account[index]

    def forget_inflight(self) -> None:
        self._inflight = [0] * len(self.env_names)

    def state_dict(self) -> dict[str, Any]:
        columns = zip(
            self.env_names,
            self._account,
            self._inflight,
            self._touched,
            self._area,
            self._done,
            self._good,
            strict=True,
        )
        return {
            **super().state_dict(),
            "now": self._now,
            "delivered": self._delivered,
            "envs": {name: list(values) for name, *values in columns},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        notes = super().load_state_dict(state)
        self._now = state["now"]
        self._delivered = state["delivered"]
        for index, name in enumerate(self.env_names):
            fresh = [0.0, 0, self._now, FIRST_GUESS_S, 0.0, 0.0]
            (
                self._account[index],
                self._inflight[index],
                self._touched[index],
                self._area[index],
                self._done[index],
                self._good[index],
            ) = state["envs"].get(name, fresh)
            self._deliver(index, 0)
        if notes:  # debts were made under the old targets and are carried over as they were
            before = state["targets"]
            owed = [
                before[name] * self._delivered - got if name in before else 0.0
                for name, got in zip(self.env_names, self._account, strict=True)
            ]
            self._open_accounts(owed)
        return notes

    def _deliver(self, index: int, n: int) -> None:
        """Count a delivery (or take one back) and refresh what a delivered rollout costs."""
        self._cost[index] = (self._done[index] + PRIOR_ROLLOUTS) / (self._good[index] + PRIOR_ROLLOUTS)
        if self.targets[index] > 0:
            self._delivered += n
            self._account[index] += n

    def _advance(self, index: int, now: float) -> None:
        self._area[index] += self._inflight[index] * (now - self._touched[index])
        self._touched[index] = self._now = now

    def _open_accounts(self, owed: list[float]) -> None:
        settle(owed, self.targets)
        self._delivered = 0.0
        self._account = [-debt for debt in owed]
