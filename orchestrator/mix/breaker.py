"""The circuit breaker in front of every strategy, and the numbers of each env.

An env whose recent acceptance falls below `trip` is quarantined: the others' targets are renormalised, its debt
is forgotten, and it only gets probes (at most `probe` of the picks and of the rollouts in flight, never more
than its share). Above `restore` it returns. The breaker is itself an `EnvMixStrategy`, so callers see one.
An env can be put into quarantine by hand (`hold`): then it gets no probes, and returns by hand alone (`release`).

Invariants: an env that the breaker quarantined has at least one probe in flight or is due for one, so it always finds
its way back; every change of state that the breaker makes is reported once by `drain_transitions`; a report about an
env that is not in the mix changes nothing but `unknown`. What to do when every env is quarantined is the caller's
decision, on `all_quarantined_for`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from orchestrator.mix.foreign import Foreign, is_foreign
from orchestrator.mix.strategy import EnvMixStrategy, MixError

TRIP, RESTORE, PROBE, WINDOW = 0.1, 0.25, 0.05, 64
"""What the breaker does unless it is told otherwise."""

# A new env starts as if this many reports had been seen, half of them good: about 30 failures in a row trip it.
PRIOR_REPORTS = 8
PRIOR_ACCEPTANCE = 0.5
# With many envs in quarantine, probes together stay below this multiple of `probe`.
MOST_PROBED = 5


class Change(StrEnum):
    """What happened to an env."""

    QUARANTINED = "quarantined"
    RESTORED = "restored"


@dataclass(frozen=True, slots=True)
class Transition:
    """An env was quarantined or restored, with the acceptance that decided it."""

    env: str
    change: Change
    acceptance: float


@dataclass(frozen=True, slots=True)
class EnvNumbers:
    """One env as the mix sees it, for metrics. Counts are rollouts since the start of the run."""

    target: float
    """The share it is steered to now: 0 in quarantine, the others' are higher meanwhile."""
    configured: float
    inflight: int
    dispatched: int
    finished: int
    accepted: int
    dropped: int
    cancelled: int
    acceptance: float
    """Accepted and not dropped per finished, whole run; 1 before anything finished."""
    recent_acceptance: float
    """What the breaker judges by."""
    mean_latency_s: float
    """Seconds in flight per finished rollout, whole run."""
    owed: float
    quarantined: bool
    held: bool
    """Quarantined by hand."""


class _Account:
    """What one env did."""

    __slots__ = (
        "accepted",
        "all",
        "area",
        "cancelled",
        "credit",
        "dispatched",
        "dropped",
        "finished",
        "good",
        "inflight",
        "touched",
    )

    def __init__(self) -> None:
        self.dispatched = self.finished = self.accepted = self.dropped = self.cancelled = self.inflight = 0
        self.area = self.touched = 0.0  # ∫ inflight dt, and until when it is counted
        self.all = self.good = 0.0  # recent rollouts and accepted ones; each report forgets a little of both
        self.credit = 0.0  # towards the next probe

    @property
    def recent(self) -> float:
        return self.good / self.all if self.all else PRIOR_ACCEPTANCE

    def advance(self, now: float) -> None:
        self.area += self.inflight * (now - self.touched)
        self.touched = now


class CircuitBreaker(EnvMixStrategy):
    """A strategy that leaves out envs that hardly ever deliver, except for probes."""

    def __init__(
        self,
        strategy: EnvMixStrategy,
        *,
        trip: float = TRIP,
        restore: float = RESTORE,
        probe: float = PROBE,
        window: int = WINDOW,
    ) -> None:
        super().__init__(strategy.env_names, strategy.configured, rng=strategy.rng)
        self.configured, self.targets = strategy.configured, strategy.targets  # to the last bit
        if not 0 <= trip <= restore < 1:
            raise MixError(f"breaker: needs 0 <= trip <= restore < 1, not trip {trip} and restore {restore}")
        if not 0 < probe <= 1:
            raise MixError(f"breaker: a probe share of {probe} is not above 0 and at most 1")
        if not window >= 1:
            raise MixError(f"breaker: a window of {window} reports is below 1")
        self.strategy = strategy
        self._asked = Foreign(strategy) if is_foreign(strategy) else strategy
        self.quarantined: frozenset[str] = frozenset()
        """Envs that are left out, by the breaker or by hand."""
        self.held: frozenset[str] = frozenset()
        """Those of them that a person put there."""
        self._tripped: frozenset[str] = frozenset()
        self._trip, self._restore, self._probe = trip, restore, probe
        self._keep = 1.0 - 1.0 / window
        self._accounts = {name: _Account() for name in self.env_names}
        self._healthy = frozenset(self.mixed)
        self._transitions: list[Transition] = []
        self._inflight = 0
        self._peak = 0
        self._all_since: float | None = None

    @property
    def mixed(self) -> list[str]:
        """Envs that have a share."""
        return [name for name, share in zip(self.env_names, self.configured, strict=True) if share > 0]

    @property
    def probed(self) -> frozenset[str]:
        """Envs that are left out by the breaker, and get probes."""
        return self._tripped - self.held

    def hold(self, env: str) -> None:
        """Leave an env out without probes until it is released; one that has a share must be left."""
        self._leave_out(held=self.held | {env})

    def release(self, env: str) -> None:
        """Take an env back, whoever left it out; it is judged anew."""
        account = self._accounts[env]
        account.all = account.good = account.credit = 0.0
        self._leave_out(held=self.held - {env}, tripped=self._tripped - {env})

    def pick(self, eligible: Collection[str] | None = None) -> str:
        """The env of the next task: one of `eligible`, even if nothing is left but envs that the breaker quarantined."""
        if not self.quarantined:
            return self._asked.pick(eligible)
        return self.try_pick(eligible) or self._least_probed(eligible)

    def try_pick(self, eligible: Collection[str] | None = None) -> str | None:
        """Like `pick`, but None if there is nothing to pick now, whatever names `eligible` holds.

        That is: no eligible env has a target, or only quarantined envs are eligible and each has its probes in
        flight. Then asking again after the next report, or when another env is eligible, is enough.
        """
        if not self.quarantined:
            return self._ask(eligible)
        healthy = self._healthy if eligible is None else self._healthy.intersection(eligible)
        probe = self._next_probe(eligible, alone=not healthy)
        if probe is not None:
            return probe
        return self._ask(healthy) if healthy else None

    def _ask(self, eligible: Collection[str] | None) -> str | None:
        for name, target in zip(self.env_names, self.strategy.targets, strict=True):
            if target > 0 and (eligible is None or name in eligible):
                return self._asked.pick(eligible)
        return None

    def on_dispatch(self, env: str, n: int, *, now: float) -> None:
        account = self._accounts.get(env)
        if account is None:
            self.unknown[env] += n
            return
        account.advance(now)
        account.inflight += n
        account.dispatched += n
        self._inflight += n
        self._peak = max(self._peak, self._inflight)
        self._asked.on_dispatch(env, n, now=now)

    def on_finish(self, env: str, n: int, accepted: int, *, now: float) -> None:
        if not 0 <= accepted <= n:
            raise ValueError(f'env "{env}": {accepted} of {n} rollouts cannot have been accepted')
        account = self._accounts.get(env)
        if account is None:
            self.unknown[env] += n
            return
        self._land(account, n, now)
        account.finished += n
        account.accepted += accepted
        if not account.all:
            account.all = float(PRIOR_REPORTS * n)
            account.good = account.all * PRIOR_ACCEPTANCE
        account.all = account.all * self._keep + n
        account.good = account.good * self._keep + accepted
        self._asked.on_finish(env, n, accepted, now=now)
        self._judge(env, account, now)

    def on_cancel(self, env: str, n: int, *, now: float) -> None:
        account = self._accounts.get(env)
        if account is None:
            self.unknown[env] += n
            return
        self._land(account, n, now)
        account.cancelled += n
        self._asked.on_cancel(env, n, now=now)

    def on_drop(self, env: str, n: int, *, now: float, excused: bool = False) -> None:
        """`excused`: nobody waited for them; they show all the same that the env delivers."""
        account = self._accounts.get(env)
        if account is None:
            self.unknown[env] += n
            return
        account.dropped += n
        if not excused:
            account.good = max(0.0, account.good - n)
        self._asked.on_drop(env, n, now=now)
        self._judge(env, account, now)

    def numbers(self, now: float) -> dict[str, EnvNumbers]:
        """Each env's numbers, as of now."""
        found = {}
        for name, target, configured in zip(
            self.env_names, self.strategy.targets, self.configured, strict=True
        ):
            account = self._accounts[name]
            account.advance(now)
            finished = account.finished
            found[name] = EnvNumbers(
                target=0.0 if name in self.quarantined else target,
                configured=configured,
                inflight=account.inflight,
                dispatched=account.dispatched,
                finished=finished,
                accepted=account.accepted,
                dropped=account.dropped,
                cancelled=account.cancelled,
                acceptance=(account.accepted - account.dropped) / finished if finished else 1.0,
                recent_acceptance=account.recent,
                mean_latency_s=account.area / finished if finished else 0.0,
                owed=self._asked.owed(name),
                quarantined=name in self.quarantined,
                held=name in self.held,
            )
        return found

    def drain_transitions(self) -> list[Transition]:
        """What changed since the last call, in order."""
        drained, self._transitions = self._transitions, []
        return drained

    def all_quarantined_for(self, now: float) -> float:
        """Seconds since every env of the mix has been in quarantine; 0 while one is not."""
        if self._healthy:
            return 0.0
        if self._all_since is None:  # restored from a state, whose clock is not ours
            self._all_since = now
        return now - self._all_since

    def owed(self, env: str) -> float:
        return self._asked.owed(env)

    def begin_anew(self, now: float) -> None:
        """Nothing was tried for a while: for how long every env has been in quarantine is counted from now on."""
        self._all_since = now if not self._healthy else None

    def set_active(self, active: Collection[str]) -> None:
        self._asked.set_active(active)
        self.targets = self.strategy.targets

    def set_weights(self, weights: Sequence[float]) -> None:
        self._asked.set_weights(weights)
        self.configured = self.strategy.configured
        self._leave_out()

    def forget_inflight(self) -> None:
        self._inflight = 0
        for account in self._accounts.values():
            account.inflight = 0
        self._asked.forget_inflight()

    def state_dict(self) -> dict[str, Any]:
        return {
            "strategy": self._asked.state_dict(),
            "quarantined": sorted(self._tripped),
            "peak": self._peak,
            "unknown": dict(self.unknown),
            "envs": {
                name: [getattr(account, field) for field in _Account.__slots__]
                for name, account in self._accounts.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        notes = self._asked.load_state_dict(state["strategy"])
        self.targets = self.strategy.targets
        self.unknown.clear()
        self.unknown.update(state["unknown"])
        self._peak = state["peak"]
        for name, values in state["envs"].items():
            if name in self._accounts:
                for field, value in zip(_Account.__slots__, values, strict=True):
                    setattr(self._accounts[name], field, value)
        self._inflight = sum(account.inflight for account in self._accounts.values())
        self._tripped = frozenset(state["quarantined"]).intersection(self.mixed)
        self.quarantined = self._tripped | self.held
        self._healthy = frozenset(self.mixed) - self.quarantined
        self._all_since = None
        active = {n for n, target in zip(self.env_names, self.strategy.targets, strict=True) if target > 0}
        if active != (self._healthy or set(self.mixed)):  # who is left out by hand is not part of the state
            self.set_active(self._healthy)
        return notes

    def _land(self, account: _Account, n: int, now: float) -> None:
        account.advance(now)
        left = min(n, account.inflight)  # never below 0, should a report be made twice
        account.inflight -= left
        self._inflight -= left

    def _judge(self, env: str, account: _Account, now: float) -> None:
        if env in self.held:
            return  # what ends now was begun before
        if env in self._tripped:
            if account.recent > self._restore:
                self._change(env, account, Change.RESTORED, now)
        elif account.recent < self._trip and env in self._healthy:
            self._change(env, account, Change.QUARANTINED, now)

    def _change(self, env: str, account: _Account, change: Change, now: float) -> None:
        account.credit = 0.0
        tripped = self._tripped | {env} if change is Change.QUARANTINED else self._tripped - {env}
        self._leave_out(tripped=tripped)
        self._all_since = now if not self._healthy else None
        self._transitions.append(Transition(env, change, account.recent))

    def _leave_out(
        self, *, held: frozenset[str] | None = None, tripped: frozenset[str] | None = None
    ) -> None:
        """Bring up to date who is left out, and the targets of the others."""
        self.held = self.held if held is None else held
        self._tripped = (self._tripped if tripped is None else tripped).intersection(self.mixed)
        self.quarantined = self._tripped | self.held
        healthy = frozenset(self.mixed) - self.quarantined
        if healthy != self._healthy:
            self._all_since = None
        self._healthy = healthy
        self.set_active(healthy)

    def _next_probe(self, eligible: Collection[str] | None, *, alone: bool) -> str | None:
        """The quarantined env that is due for a probe; alone, every one with room for a probe is due."""
        crowd = max(1.0, len(self._tripped) / MOST_PROBED)
        room = max(1.0, self._probe * self._peak)
        best, best_credit = None, 0.0
        for name, share in zip(self.env_names, self.configured, strict=True):
            if name not in self._tripped or name in self.held:
                continue
            account = self._accounts[name]
            account.credit = min(1.0, account.credit + min(self._probe, share) / crowd)
            if (eligible is not None and name not in eligible) or account.inflight >= room:
                continue
            if (alone or account.credit >= 1.0 - 1e-9) and account.credit > best_credit:
                best, best_credit = name, account.credit
        if best is not None:
            self._accounts[best].credit = 0.0
        return best

    def _least_probed(self, eligible: Collection[str] | None) -> str:
        among = [name for name in self.env_names if name in self._tripped - self.held]
        if eligible is not None:
            among = [name for name in among if name in eligible]
        if not among:
            self._nothing_to_pick(eligible)
        return min(among, key=lambda name: self._accounts[name].inflight)
