"""What is asked again after a server died under it: few at a time, so that the task that kills servers is found.

Which of the requests on a dead server killed it is not known. So all are asked again without being charged for an
attempt, but only an eighth of them at once; those under which a server dies a second time come first then, one by one.
The one that was alone is charged: alone on its server, or the only suspect there. So a task that kills its server is
given up after a few deaths, and those that were there by accident lose nothing. Pure bookkeeping of one env.
"""

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from orchestrator.dispatch.work import Attempt

SHARE = 8


@dataclass(slots=True)
class _Death:
    """A server's death, of whose requests `untold` have not been reported yet; `suspects` were on it."""

    untold: int
    suspects: int


class Suspects:
    """The suspects of one env that wait to be asked again, and how many may be in flight."""

    def __init__(self) -> None:
        self._once: deque[Attempt] = deque()
        self._again: deque[Attempt] = deque()
        self._on: Counter[Any] = Counter()
        self._deaths: dict[Any, _Death] = {}
        self._limit = 1
        self._alone = False  # one under which a server died twice is in flight: no other suspect beside it

    @property
    def waiting(self) -> int:
        """Suspects that wait to be asked again."""
        return len(self._once) + len(self._again)

    def add(self, attempt: Attempt) -> None:
        """An attempt that takes the place of one whose server died."""
        (self._again if attempt.suspect > 1 else self._once).append(attempt)

    def next(self) -> Attempt | None:
        """The suspect that may be asked again now, still waiting."""
        for queue in (self._again, self._once):
            while queue and queue[0].group.closed:
                queue.popleft()
        inflight = self._on.total()
        if self._alone:
            return None
        if self._again:
            return self._again[0] if not inflight else None
        return self._once[0] if self._once and inflight < self._limit else None

    def started(self, attempt: Attempt) -> None:
        """The suspect that `next` named is in flight on its server."""
        self._alone = attempt.suspect > 1
        (self._again if self._alone else self._once).popleft()
        self._on[attempt.server] += 1

    def ended(self, attempt: Attempt) -> None:
        """A suspect is over."""
        self._alone = False
        self._on[attempt.server] -= 1
        if not self._on[attempt.server]:
            del self._on[attempt.server]

    def lost(self, attempt: Attempt, together: int) -> bool:
        """The server under an attempt died, with `together` requests on it; whether the attempt is to be charged.

        Called once for every request that was on it, before the attempt's end is booked.
        """
        death = self._deaths.get(attempt.server)
        if death is None:
            death = self._deaths[attempt.server] = _Death(together, self._on[attempt.server])
            self._limit = max(1, together // SHARE)
        death.untold -= 1
        if death.untold <= 0:
            del self._deaths[attempt.server]
        return together <= 1 or (bool(attempt.suspect) and death.suspects <= 1)
