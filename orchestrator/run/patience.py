"""How long a batch is held back for an older group in flight. Pure.

Holding back keeps finished work from becoming too old; holding back for a group that hangs would stop everything. So a
group that holds a batch back has a few times as long as the slowest group of its env took lately, or, while its env
has not finished any, as long as one rollout may take. Then it is given up and its task is asked again.
"""

from collections.abc import Mapping

from orchestrator.dispatch.flight import Flight
from orchestrator.dispatch.ledger import Lane
from orchestrator.dispatch.work import PendingGroup
from orchestrator.run.settings import Limits

LEAST_S = 30.0
TIMES = 4.0
_KEEP = 0.98
"""How much of the slowest time the next group leaves."""


class Patience:
    """Knows how long groups take, and which one has had its time."""

    def __init__(self, flight: Flight, limits: Mapping[str, Limits]) -> None:
        self._flight = flight
        self._limits = limits
        self._slowest: dict[str, float] = {}

    def learn(self, env: str, seconds: float) -> None:
        """A group of an env finished after so long."""
        self._slowest[env] = max(seconds, _KEEP * self._slowest.get(env, 0.0))

    def ends_at(self, held: tuple[str, int] | None) -> float | None:
        """When the group that holds a batch back is given up."""
        group = self._group(held)
        if group is None:
            return None
        slowest = self._slowest.get(group.env)
        if slowest is None:
            return group.opened + self._limits[group.env].rollout_timeout_s
        return group.opened + max(LEAST_S, TIMES * slowest)

    def overdue(self, held: tuple[str, int] | None, now: float) -> PendingGroup | None:
        """The group that has held a batch back for too long."""
        ends_at = self.ends_at(held)
        return self._group(held) if ends_at is not None and ends_at <= now else None

    def _group(self, held: tuple[str, int] | None) -> PendingGroup | None:
        if held is None:
            return None
        env, version = held
        return next(
            (
                group
                for group in self._flight.groups(Lane.TRAIN)
                if group.env == env and group.version == version
            ),
            None,
        )
