"""What is in flight: attempts and groups by lane and env, in the order of their start, with their deadlines. Pure.

One time limit holds for all attempts of an env, and one for its groups, so the first to start is the first to be overdue
and nothing has to be searched for. The next deadline of all is looked for again only when what has it is over.
"""

import itertools
import math
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
        self._due = math.inf
        self._first: Attempt | PendingGroup | None = None
        """What has the next deadline; None where nothing has, or where it is over and the next one is not looked for yet."""

    def open(self, group: PendingGroup) -> None:
        """A group is under way from now on."""
        key = group.lane, group.env
        self._groups[key][group] = None
        self._note(group, group.opened + self._rules[key].group_timeout_s)

    def close(self, group: PendingGroup) -> None:
        """A group is over."""
        del self._groups[group.lane, group.env][group]
        if group is self._first:
            self._first = None

    def start(self, attempt: Attempt) -> None:
        """An attempt is in flight from now on."""
        key = attempt.group.lane, attempt.group.env
        self._attempts[key][attempt] = None
        self._note(attempt, attempt.started + self._rules[key].rollout_timeout_s)

    def end(self, attempt: Attempt) -> None:
        """An attempt is over."""
        del self._attempts[attempt.group.lane, attempt.group.env][attempt]
        if attempt is self._first:
            self._first = None

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
        if not self._any_due(now):
            return
        for key, rules in self._rules.items():
            attempts = self._attempts[key]
            while attempts and (first := next(iter(attempts))).started + rules.rollout_timeout_s <= now:
                yield first

    def overdue_groups(self, now: float) -> Iterator[PendingGroup]:
        """Groups that have had their time; each must be closed before the next is asked for."""
        if not self._any_due(now):
            return
        for key, rules in self._rules.items():
            groups = self._groups[key]
            while groups and (first := next(iter(groups))).opened + rules.group_timeout_s <= now:
                yield first

    def next_deadline(self) -> float | None:
        """When the next attempt or group is overdue."""
        if self._first is None and self._due != math.inf:
            self._due = math.inf
            for key, attempts in self._attempts.items():
                if attempts:
                    first = next(iter(attempts))
                    self._note(first, first.started + self._rules[key].rollout_timeout_s)
            for key, groups in self._groups.items():
                if groups:
                    group = next(iter(groups))
                    self._note(group, group.opened + self._rules[key].group_timeout_s)
        return None if self._first is None else self._due

    def _note(self, one: Attempt | PendingGroup, due: float) -> None:
        # Where the first is over, whatever takes its place may be later than others that are under way.
        if due < self._due:
            self._due, self._first = due, one

    def _any_due(self, now: float) -> bool:
        due = self.next_deadline()
        return due is not None and due <= now
