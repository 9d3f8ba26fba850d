"""How many sequences of a batch belong to which environment: minimums and quotas, in exact arithmetic.

A share is the decimal number that the user wrote (0.29 of 100 is 29, not what the nearest binary fraction
makes of it). Minimums that cannot all be kept at once are scaled down until they can. Quotas follow targets by
largest remainder; what whole groups could not give in one batch is carried over to the next, so that what was
delivered stays within a group or two of the targets over any number of batches. What a starved environment
could not give is not owed to it later.

Pure arithmetic: what is queued comes in as numbers.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

_LONGEST_DENOMINATOR = 10**12
_ZERO = Fraction(0)


def exact(what: str, share: object) -> Fraction:
    """The number as its shortest decimal form reads."""
    try:
        return Fraction(str(share))
    except ValueError:
        raise ValueError(f"{what} must be a finite number, not {share!r}") from None


def within(amount: Fraction, most: Fraction) -> Fraction:
    """The amount, or as near to it as is not further from zero than `most`."""
    return max(-most, min(most, amount))


def minimum_counts(shares: Mapping[str, float | Fraction], batch_size: int) -> dict[str, int]:
    """Sequences of each env that every batch must have: `ceil(share × batch_size)`.

    Shares that exceed 100 % in sum are divided by it. Where rounding up would still ask for more than a batch,
    only the largest remainders are rounded up.
    """
    fractions = {}
    for env, share in shares.items():
        value = exact(f'the minimum of env "{env}"', share)
        if not 0 <= value <= 1:
            raise ValueError(f'the minimum of env "{env}" must be a share from 0 to 1, not {share!r}')
        fractions[env] = value
    parts, unit = _over_one_denominator(fractions)
    return _rounded(parts, max(unit, sum(parts.values())), batch_size)


def apportion(wanted: Mapping[str, Fraction], total: int) -> dict[str, int]:
    """Whole numbers that sum to `total`, in proportion, by largest remainder; below zero counts as zero."""
    parts, _ = _over_one_denominator({env: max(value, _ZERO) for env, value in wanted.items()})
    asked = sum(parts.values())
    return _rounded(parts, asked, total) if asked else dict.fromkeys(wanted, 0)


def _over_one_denominator(values: Mapping[str, Fraction]) -> tuple[dict[str, int], int]:
    """Numerators, and the denominator: sums and comparisons of whole numbers cost a tenth of those of fractions."""
    unit = lcm(*[value.denominator for value in values.values()])
    return {name: value.numerator * (unit // value.denominator) for name, value in values.items()}, unit


def _rounded(parts: Mapping[str, int], unit: int, total: int) -> dict[str, int]:
    """`part / unit` of `total` each, rounded up while the sum stays within it, largest remainder first (ties in order), the others down."""
    divided = {env: divmod(part * total, unit) for env, part in parts.items()}
    counts = {env: whole for env, (whole, _) in divided.items()}
    spare = total - sum(counts.values())
    for env in sorted(divided, key=lambda env: -divided[env][1])[:spare]:
        counts[env] += divided[env][1] > 0
    return counts


@dataclass(frozen=True, slots=True)
class QuotaPlan:
    """The next batch: whole `counts` that sum to its size, and the exact amounts behind them.

    `starved` names who has less queued than its quota, with that quota.
    """

    counts: dict[str, int]
    due: dict[str, Fraction]
    starved: dict[str, int]


class Quotas:
    """What each env is due in the next batch, given its target and what earlier batches left over."""

    def __init__(self, targets: Mapping[str, float], *, at_once: int | None = None) -> None:
        """`at_once`: of what an env is owed or has had too much, a batch makes up for so many batches' shares at most."""
        self._at_once = at_once
        self.set_targets(targets)

    def set_targets(self, targets: Mapping[str, float]) -> None:
        """From now on these; what was carried over under others is forgotten. ValueError, and no change, if they are none."""
        shares = {}
        for env, target in targets.items():
            value = exact(f'the target of env "{env}"', target)
            if value < 0:
                raise ValueError(f'the target of env "{env}" must not be negative, not {target!r}')
            shares[env] = value
        total = sum(shares.values())
        if not total:
            raise ValueError("quotas need at least one env with a target above 0")
        self.targets = {env: value / total for env, value in shares.items()}
        self.carried = dict.fromkeys(self.targets, Fraction(0))
        """What each env is owed by earlier batches; below zero, what it had too much."""

    def plan(self, batch_size: int, queued: Mapping[str, int], given_up: Collection[str] = ()) -> QuotaPlan:
        """What each env gets of the next batch; an env that has less queued than that gives what it has.

        What a starved env cannot give goes to the others by their targets. Envs in `given_up` are not counted
        as starved. The queue must hold a full batch of the envs together.
        """
        due = self._due(batch_size)
        counts = asked = apportion(due, batch_size)
        capped: list[str] = []
        while short := [env for env in due if env not in capped and counts[env] > queued.get(env, 0)]:
            capped += short
            for env in short:
                due[env] = Fraction(queued.get(env, 0))
            self._share_out(due, batch_size, [env for env in due if env not in capped])
            counts = apportion(due, batch_size)
        if len(capped) == len(due):  # nobody is left to owe the difference to
            due = {env: Fraction(count) for env, count in counts.items()}
        # Whoever is short only of what others could not give is not waited for.
        starved = {
            env: asked[env] for env in capped if env not in given_up and asked[env] > queued.get(env, 0)
        }
        return QuotaPlan(counts, _simplified(due), starved)

    def counts(self, batch_size: int) -> dict[str, int]:
        """What each env gets of the next batch if it has as much."""
        return apportion(self._due(batch_size), batch_size)

    def _due(self, batch_size: int) -> dict[str, Fraction]:
        shares = {env: share * batch_size for env, share in self.targets.items()}
        if self._at_once is None:
            return {env: share + self.carried[env] for env, share in shares.items()}
        return {
            env: share + within(self.carried[env], self._at_once * share) for env, share in shares.items()
        }

    def _share_out(self, due: dict[str, Fraction], total: int, others: list[str]) -> None:
        """Let all be due `total` in sum by adding to each of `others` its part of the difference."""
        spill = total - sum(due.values())
        weight = sum(self.targets[env] for env in others)
        for env in others:
            due[env] += spill * (self.targets[env] / weight if weight else Fraction(1, len(others)))

    def settle(self, plan: QuotaPlan, delivered: Mapping[str, int]) -> None:
        """A batch was taken: carry over what each env got too little or too much."""
        for env, due in plan.due.items():
            self.carried[env] = due - delivered.get(env, 0)


def _simplified(due: dict[str, Fraction]) -> dict[str, Fraction]:
    """Keep the fractions short after many redistributions, with the same sum."""
    if all(value.denominator <= _LONGEST_DENOMINATOR for value in due.values()):
        return due
    short = {env: value.limit_denominator(10**6) for env, value in due.items()}
    last = next(reversed(short))
    short[last] += sum(due.values()) - sum(short.values())
    return short
