"""What is told for people to look at later: how every group ended, and why attempts failed.

Told on the event loop and without any effect on the run: an archive that loses what it is told changes nothing. `NoArchive` is
for runs that keep none, in virtual time for instance.
"""

from typing import Protocol

from envs.wire import Failure
from orchestrator.dispatch.work import PendingGroup
from orchestrator.groups.group import Batch, Group


class Archive(Protocol):
    """Told what became of groups and attempts; every call returns at once."""

    def scored(self, pending: PendingGroup, outcome: str, now: float) -> None:
        """A training group has its rollouts: it is queued, or this is why not."""

    def dropped(self, pending: PendingGroup, reason: str, now: float) -> None:
        """A training group ended without a result."""

    def evicted(self, group: Group, reason: str) -> None:
        """A queued group will not be trained on."""

    def batch_formed(self, batch: Batch) -> None:
        """Queued groups, or parts of them, form a batch."""

    def evaluated(self, pending: PendingGroup, now: float) -> None:
        """The attempts at an evaluation's task ended."""

    def attempt_failed(self, pending: PendingGroup, failure: Failure, now: float) -> None:
        """An attempt at a rollout failed, and this is what it said."""


class NoArchive:
    """Keeps nothing."""

    def scored(self, pending: PendingGroup, outcome: str, now: float) -> None: ...
    def dropped(self, pending: PendingGroup, reason: str, now: float) -> None: ...
    def evicted(self, group: Group, reason: str) -> None: ...
    def batch_formed(self, batch: Batch) -> None: ...
    def evaluated(self, pending: PendingGroup, now: float) -> None: ...
    def attempt_failed(self, pending: PendingGroup, failure: Failure, now: float) -> None: ...
