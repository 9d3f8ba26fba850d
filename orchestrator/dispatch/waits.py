"""What is waited for: a kind, a sentence for people, and until when, where a time ends it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class WaitKind(StrEnum):
    """Every reason why nothing more is started, or why no batch is formed. docs/architecture.md has the table."""

    START = "start"
    DRAIN = "drain"
    DONE = "done"
    JOURNAL = "journal"
    SLOT = "slot"
    ENDPOINT = "endpoint"
    WEIGHTS = "weights"
    SERVER = "server"
    ROOM = "room"
    CAP = "cap"
    RATE = "rate"
    TRAINER = "trainer"
    QUEUE = "queue"
    PROBES = "probes"
    BACKOFF = "backoff"
    OLDER_GROUP = "older_group"
    GROUPS = "groups"
    MINIMUM = "minimum"
    QUOTA = "quota"
    SPLIT = "split"
    MISFIT = "misfit"
    ACKNOWLEDGEMENT = "acknowledgement"
    RANKS = "ranks"
    EVALUATION = "evaluation"


@dataclass(frozen=True, slots=True)
class Wait:
    """One thing that is waited for; `until` is when time ends the wait, None where an event must."""

    kind: WaitKind
    text: str
    until: float | None = None

    def of(self, envs: Sequence[str], *, all_of: bool) -> "Wait":
        """The same wait, of these envs."""
        if all_of and self.kind in (WaitKind.TRAINER, WaitKind.QUEUE):
            return self
        names = ", ".join(f'"{name}"' for name in envs)
        return replace(self, text=f"{self.text} (env {names})")
