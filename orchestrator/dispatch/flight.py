"""What is in flight: attempts and groups by lane and env, in the order of their start, with their deadlines. Pure.

One time limit holds for all attempts of an env, and one for its groups, so the first to start is the first to be overdue
and nothing has to be searched for.
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping

from orchestrator.dispatch.ledger import Lane
from orchestrator.dispatch.ports import EnvRules
from orchestrator.dispatch.work import Attempt, PendingGroup

Key = tuple[Lane, str]


class Flight:
    """Attempts and groups under way."""

    def __init__(self, rules: Mapping[Key, EnvRules]) -> None:
        self._rules = rules
        self._attempts: dict[Key, OrderedDict[Attempt, None]] = {key: OrderedDict() for key in rules}
        self._groups: dict[Key, OrderedDict[PendingGroup, None]] = {key: OrderedDict() for key in rules}

    def open(self, group: PendingGroup) -> None:
        """A group is under way from now on."""
        self._groups[group.lane, group.env][group] = None

    def close(self, group: PendingGroup) -> None:
        """A group is over."""
        del self._groups[group.lane, group.env][group]

    def start(self, attempt: Attempt) -> None:
        """An attempt is in flight from now on."""
        self._attempts[attempt.group.lane, attempt.group.env][attempt] = None

    def end(self, attempt: Attempt) -> None:
        """An attempt is over."""
        del self._attempts[attempt.group.lane, attempt.group.env][attempt]

    def attempts(self) -> Iterator[Attempt]:
        """Every attempt in flight."""
        return itertools.chain.from_iterable(self._attempts.values())

    def groups(self, lane: Lane) -> Iterator[PendingGroup]:
        """Groups under way, oldest first within an env."""
        for (of_lane, _), groups in self._groups.items():
            if of_lane is lane:
                yield from groups

    @property
    def busy(self) -> bool:
        """Whether any group is under way."""
        return any(self._groups.values())

    def oldest_attempt(self) -> Attempt | None:
        """The attempt that has been in flight for longest."""
        firsts = [next(iter(attempts)) for attempts in self._attempts.values() if attempts]
        return min(firsts, key=lambda attempt: attempt.started, default=None)

    def overdue_attempts(self, now: float) -> Iterator[Attempt]:
        """Attempts that have had their time; each must be ended before the next is asked for."""
        for key, rules in self._rules.items():
            attempts = self._attempts[key]
            while attempts and (first := next(iter(attempts))).started + rules.rollout_timeout_s <= now:
                yield first

    def overdue_groups(self, now: float) -> Iterator[PendingGroup]:
        """Groups that have had their time; each must be closed before the next is asked for."""
        for key, rules in self._rules.items():
            groups = self._groups[key]
            while groups and (first := next(iter(groups))).opened + rules.group_timeout_s <= now:
                yield first

    def next_deadline(self) -> float | None:
        """When the next attempt or group is overdue."""
        times = [
            next(iter(attempts)).started + self._rules[key].rollout_timeout_s
            for key, attempts in self._attempts.items()
            if attempts
        ]
        times += [
            next(iter(groups)).opened + self._rules[key].group_timeout_s
            for key, groups in self._groups.items()
            if groups
        ]
        return min(times, default=None)
