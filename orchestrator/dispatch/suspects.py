"""What is asked again after a server died under it: few at a time, so that the task that kills servers is found.

Which of the requests on a dead server killed it is not known. So all are asked again without being charged for an
attempt, but only an eighth of them at once; when a server dies under one of those again, an eighth of that, down to
one. The one that was alone is charged. So a task that kills its server is given up after a few deaths, and those that
were there by accident lose nothing. Pure bookkeeping of one env.
"""

from collections import deque

from orchestrator.dispatch.work import Attempt

SHARE = 8


class Suspects:
    """The suspects of one env that wait to be asked again, and how many may be in flight."""

    def __init__(self) -> None:
        self.waiting: deque[Attempt] = deque()
        self.inflight = 0
        self._limit = 0

    def add(self, attempt: Attempt) -> None:
        """An attempt that takes the place of one whose server died."""
        self.waiting.append(attempt)

    def lost(self, together: int) -> None:
        """A server died with this many requests on it."""
        narrower = max(1, together // SHARE)
        self._limit = min(self._limit, narrower) if self.inflight or self.waiting else narrower

    def guilty(self, attempt: Attempt, together: int) -> bool:
        """Whether the attempt, whose server just died, is to be charged: it was alone, or the only suspect."""
        return together <= 1 or (attempt.suspect and self.inflight <= 1)

    def next(self) -> Attempt | None:
        """The suspect that may be asked again now, still waiting."""
        while self.waiting and self.waiting[0].group.closed:
            self.waiting.popleft()
        return self.waiting[0] if self.waiting and self.inflight < self._limit else None
