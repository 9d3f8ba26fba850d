"""What makes a batch: an exact number of sequences with minimums, or with quotas, or a token budget.

A rule says what is short, which groups come next, and what follows from a batch having been taken. Rules are
told the queue on every call and keep nothing of it; only quotas remember what they carry over.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from orchestrator.buffer.oldest_first import choose_exact
from orchestrator.buffer.queue import Entry, EnvQueue
from orchestrator.buffer.quotas import QuotaPlan, Quotas
from orchestrator.buffer.subset_sum import meets, reachable, window
from orchestrator.buffer.token_budget import Picks, choose_within, remove_picks

Amounts = Mapping[str, int]
NOTHING: Amounts = MappingProxyType({})


class Selection(Protocol):
    """The groups of the next batch, still in the queue."""

    def commit(self) -> list[Entry]:
        """Take them out of their lanes, in queue order."""
        ...


class Rule(Protocol):
    """When there is a batch and which."""

    def shortage(self, envs: Sequence[EnvQueue]) -> str:
        """What is missing in plain numbers, as a sentence; empty if nothing is."""
        ...

    def choose(self, envs: Sequence[EnvQueue], least: Amounts = NOTHING) -> Selection | None:
        """The next batch, given that there is no shortage; with `least` of each env. Sets every env's low and high."""
        ...

    def needed(self, envs: Sequence[EnvQueue], coming: Mapping[str, int], spare: int) -> list[str]:
        """Envs of which the next batch, which may lack `spare` of its size, needs more than is queued and coming."""
        ...


def describe_misfit(size: int, envs: Sequence[EnvQueue]) -> str:
    """Why enough is queued and still no batch: which sizes cannot make which sum."""
    counts: dict[int, int] = {}
    for env in envs:
        for lane in env.lanes.values():
            counts[lane.size] = counts.get(lane.size, 0) + len(lane)
    sizes = [f"{size}" if count == 1 else f"{size} (×{count})" for size, count in sorted(counts.items())]
    more = f" and {len(sizes) - 8} more" if len(sizes) > 8 else ""
    lows = [f'{env.low} of env "{env.name}"' for env in envs if env.low]
    bounds = f" with at least {', '.join(lows)}" if lows else ""
    return f"groups of sizes {', '.join(sizes[:8])}{more} cannot make exactly {size}{bounds}"


@dataclass(slots=True)
class ExactSelection:
    entries: list[Entry]
    envs: Sequence[EnvQueue]

    def amounts(self) -> dict[tuple[str, int], int]:
        """Sequences by env and version."""
        found: dict[tuple[str, int], int] = {}
        for _, version, size, _, _, env in self.entries:
            found[env.name, version] = found.get((env.name, version), 0) + size
        return found

    def commit(self) -> list[Entry]:
        for env in self.envs:
            for lane in env.lanes.values():
                if lane.taken:
                    lane.drop_front(lane.taken)
        return self.entries


class ExactRule:
    """Exactly `size` sequences, with at least its minimum of every available env."""

    def __init__(self, size: int) -> None:
        self.size = size

    def shortage(self, envs: Sequence[EnvQueue]) -> str:
        queued = sum(env.sequences for env in envs)
        if queued < self.size:
            return f"{queued} of {self.size} sequences are queued"
        for env in envs:
            if env.sequences < env.required:
                return f'env "{env.name}" has {env.sequences} of its minimum of {env.required} sequences'
        return ""

    def choose(
        self, envs: Sequence[EnvQueue], least: Amounts = NOTHING, most: Amounts = NOTHING
    ) -> ExactSelection | None:
        """`most`: no more than this of an env."""
        self.bound(envs, least, most)
        return self.select(envs)

    def bound(self, envs: Sequence[EnvQueue], least: Amounts, most: Amounts = NOTHING) -> None:
        """Set what a batch must and may have of each env."""
        for env in envs:
            env.low = max(env.required, least.get(env.name, 0))
            env.high = max(env.low, min(self.size, most.get(env.name, self.size)))

    def select(self, envs: Sequence[EnvQueue]) -> ExactSelection | None:
        """The oldest groups within these bounds."""
        entries = choose_exact(self.size, envs)
        return None if entries is None else ExactSelection(entries, envs)

    def needed(self, envs: Sequence[EnvQueue], coming: Mapping[str, int], spare: int) -> list[str]:
        return _needed(self.size, envs, {env.name: env.sequences for env in envs}, coming)


@dataclass(slots=True)
class QuotaSelection:
    exact: ExactSelection
    plan: QuotaPlan
    quotas: Quotas

    def amounts(self) -> dict[tuple[str, int], int]:
        """Sequences by env and version."""
        return self.exact.amounts()

    def commit(self) -> list[Entry]:
        delivered = {
            env.name: sum(lane.taken * lane.size for lane in env.lanes.values()) for env in self.exact.envs
        }
        entries = self.exact.commit()
        self.quotas.settle(self.plan, delivered)
        return entries


class QuotaRule:
    """Exactly `size` sequences, of each env its quota, or as near to it as whole groups come.

    Near: the largest deviation of any env is as small as can be. With `wait`, a batch waits for an env that has
    less than its quota, and deviates by less than the largest queued group.
    """

    def __init__(self, size: int, quotas: Quotas, *, wait: bool) -> None:
        self.size = size
        self.quotas = quotas
        self.wait = wait

    def _plan(self, envs: Sequence[EnvQueue]) -> QuotaPlan:
        queued = {env.name: env.sequences for env in envs}
        return self.quotas.plan(self.size, queued, [env.name for env in envs if not env.available])

    def shortage(self, envs: Sequence[EnvQueue]) -> str:
        queued = sum(env.sequences for env in envs)
        if queued < self.size:
            return f"{queued} of {self.size} sequences are queued"
        for env, quota in self._plan(envs).starved.items() if self.wait else ():
            have = sum(queue.sequences for queue in envs if queue.name == env)
            return f'env "{env}" has {have} of its quota of {quota} sequences'
        return ""

    def needed(self, envs: Sequence[EnvQueue], coming: Mapping[str, int], spare: int) -> list[str]:
        under_way = {env.name: env.sequences + coming.get(env.name, 0) for env in envs}
        if self.wait:
            # More of an env that has its quota would not make a batch, and be left over from it.
            counts = self.quotas.counts(self.size)
            short = [env.name for env in envs if env.available and under_way[env.name] < counts[env.name]]
            if short or sum(under_way.values()) >= self.size:
                return short
        if sum(under_way.values()) < self.size:
            return [env.name for env in envs if self.quotas.targets[env.name]]
        return []

    def choose(self, envs: Sequence[EnvQueue], least: Amounts = NOTHING) -> QuotaSelection | None:
        plan = self._plan(envs)
        for env in envs:
            for lane in env.lanes.values():
                lane.reset()
        sums = [reachable(env.stock, min(self.size, env.sequences)) for env in envs]
        wanted = [plan.counts[env.name] for env in envs]
        must = [least.get(env.name, 0) for env in envs]
        most = self.size
        if self.wait:
            most = max((lane.size for env in envs for lane in env.lanes.values()), default=1) - 1

        def within(deviation: int) -> bool:
            return meets(
                self.size,
                [
                    window(s, max(m, w - deviation), w + deviation)
                    for s, w, m in zip(sums, wanted, must, strict=True)
                ],
            )

        deviation = smallest(within, most)
        for env, count, at_least in zip(envs, wanted, must, strict=True):
            env.low = max(at_least, count - (deviation or 0))
            env.high = min(self.size, count + (deviation or 0))
        return None if deviation is None else self.select(envs)

    def bound(self, envs: Sequence[EnvQueue], least: Amounts) -> None:
        """Set what a batch has of each env: its quota exactly, or more where more must be in it."""
        counts = self._plan(envs).counts
        must = {env.name: least.get(env.name, 0) for env in envs}
        has = {env.name: max(counts[env.name], must[env.name]) for env in envs}
        too_much = sum(has.values()) - self.size
        for name in sorted(has, key=lambda name: must[name] - has[name]):
            less = min(too_much, has[name] - must[name])
            has[name] -= less
            too_much -= less
        for env in envs:
            env.low = env.high = has[env.name]

    def select(self, envs: Sequence[EnvQueue]) -> QuotaSelection | None:
        """The oldest groups within these bounds."""
        entries = choose_exact(self.size, envs)
        if entries is None:
            return None
        return QuotaSelection(ExactSelection(entries, envs), self._plan(envs), self.quotas)


def smallest(holds: Callable[[int], bool], most: int) -> int | None:
    """The smallest number from 0 to `most` for which a monotone condition holds, by galloping."""
    low, high = -1, 0
    while not holds(high):
        if high == most:
            return None
        low, high = high, min(most, high * 2 or 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


@dataclass(slots=True)
class TokenSelection:
    picks: Picks

    def commit(self) -> list[Entry]:
        return remove_picks(self.picks)


class TokenRule:
    """At most `budget` tokens, given that as many are queued; a minimum is a share of the budget."""

    def __init__(self, budget: int) -> None:
        self.budget = budget

    def shortage(self, envs: Sequence[EnvQueue], spare: int = 0) -> str:
        queued = sum(env.tokens for env in envs)
        if queued < self.budget - spare:
            return f"{queued} of {self.budget} tokens are queued"
        for env in envs:
            if env.tokens < env.required:
                return f'env "{env.name}" has {env.tokens} of its minimum of {env.required} tokens'
        return ""

    def choose(self, envs: Sequence[EnvQueue], least: Amounts = NOTHING) -> TokenSelection:
        for env in envs:
            env.low = max(env.required, least.get(env.name, 0))
        return TokenSelection(choose_within(self.budget, envs))

    def needed(self, envs: Sequence[EnvQueue], coming: Mapping[str, int], spare: int) -> list[str]:
        return _needed(self.budget - spare, envs, {env.name: env.tokens for env in envs}, coming)


def _needed(
    size: int, envs: Sequence[EnvQueue], queued: Mapping[str, int], coming: Mapping[str, int]
) -> list[str]:
    """Envs below their minimum; where there is none, all of them while a batch is not full."""
    under_way = {env.name: queued[env.name] + coming.get(env.name, 0) for env in envs}
    short = [env.name for env in envs if under_way[env.name] < env.required]
    if short:
        return short
    return list(under_way) if sum(under_way.values()) < size else []
