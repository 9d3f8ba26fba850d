"""What the event loop tells the archive's thread. Made in less than a microsecond: nothing is decoded or summed up here."""

from collections.abc import Sequence

import msgspec

from envs.wire import RolloutHeader
from orchestrator.groups.group import Group
from orchestrator.tasks.task import TrainTask


class GroupEnded(msgspec.Struct, gc=False):
    """A group has ended. `rollouts` and `transcripts` have an entry for each result; times are those of the run's clock."""

    task: TrainTask
    split: str
    version: int
    version_end: int
    outcome: str
    step: int | None
    opened: float
    ended: float
    rollouts: Sequence[Sequence[RolloutHeader]] = ()
    transcripts: Sequence[bytes] = ()


class GroupsRecovered(msgspec.Struct, gc=False):
    """Groups that an earlier process left in the journal; it may have died before they were told."""

    groups: Sequence[Group]
    at: float


class GroupEvicted(msgspec.Struct, gc=False):
    """A queued group will not be trained on."""

    task: TrainTask
    reason: str


class BatchFormed(msgspec.Struct, gc=False):
    """Groups of these tasks, or parts of them, are in the batch of a step."""

    step: int
    tasks: Sequence[TrainTask]


class AttemptFailed(msgspec.Struct, gc=False):
    """An attempt failed."""

    env: str
    split: str
    kind: str
    text: str
    detail: str
    task_index: int
    at: float


Event = GroupEnded | GroupsRecovered | GroupEvicted | BatchFormed | AttemptFailed
