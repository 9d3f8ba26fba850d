"""What is waited for: a kind, a sentence for people, and until when, where a time ends it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class WaitKind(StrEnum):
    """Every reason why nothing more is started, or why no batch is formed. docs/architecture.md has the table."""

    START = "start"
    DRAIN = "drain"
    PAUSED = "paused"
    DONE = "done"
    JOURNAL = "journal"
    SLOT = "slot"
    ENDPOINT = "endpoint"
    WEIGHTS = "weights"
    SERVER = "server"
    ROOM = "room"
    CAP = "cap"
    RATE = "rate"
    QUARANTINE = "quarantine"
    TRAINER = "trainer"
    QUEUE = "queue"
    PROBES = "probes"
    BACKOFF = "backoff"
    SUSPECTS = "suspects"
    EVALUATION_SLOT = "evaluation_slot"
    OLDER_GROUP = "older_group"
    SHARE = "share"
    GROUPS = "groups"
    MINIMUM = "minimum"
    QUOTA = "quota"
    SPLIT = "split"
    MISFIT = "misfit"
    ACKNOWLEDGEMENT = "acknowledgement"
    RANKS = "ranks"
    EVALUATION = "evaluation"


REMEDIES = {
    WaitKind.PAUSED: "orchestrator ctl RUN_DIR resume",
    WaitKind.QUARANTINE: "orchestrator ctl RUN_DIR restore ENV",
    WaitKind.JOURNAL: "give run_dir a faster disk, or raise journal.max_backlog_bytes",
    WaitKind.SLOT: "raise dispatch.max_inflight if the inference servers have room",
    WaitKind.ENDPOINT: "start the inference server, or correct inference.base_urls",
    WaitKind.WEIGHTS: "publish a version that can be loaded, or look into the inference server's log",
    WaitKind.SERVER: "look into the env's log in the run directory",
    WaitKind.ROOM: "raise workers or capacity of the env",
    WaitKind.CAP: "raise max_inflight of the env",
    WaitKind.RATE: "raise rollouts_per_minute of the env",
    WaitKind.TRAINER: "raise staleness.max_versions, or make the trainer faster",
    WaitKind.QUEUE: "raise batch.max_buffered, or make the trainer faster",
    WaitKind.PROBES: "look at why the env fails: status and its log say it",
    WaitKind.SUSPECTS: "look into the env's log in the run directory for why its server died",
    WaitKind.EVALUATION_SLOT: "raise dispatch.max_inflight, or evaluate fewer examples",
    WaitKind.OLDER_GROUP: "lower rollout_timeout_s of the env, or raise staleness.max_versions",
    WaitKind.SHARE: 'lower rollout_timeout_s of the env, or set batch.mix = "oldest"',
    WaitKind.MINIMUM: 'lower min_batch_allocation, or set on_unmet_minimum = "waive"',
    WaitKind.QUOTA: 'set batch.on_starved = "redistribute"',
    WaitKind.MISFIT: 'set batch.on_stuck = "split", or change batch.size or group_size',
    WaitKind.ACKNOWLEDGEMENT: "look at the trainer: it has batches to work on",
    WaitKind.RANKS: "start the missing ranks, or set trainer.world_size",
}
"""What would end a wait sooner, for those who wonder."""


@dataclass(frozen=True, slots=True)
class Wait:
    """One thing that is waited for; `until` is when time ends the wait, None where an event must."""

    kind: WaitKind
    text: str
    until: float | None = None

    @property
    def remedy(self) -> str:
        """What to change if it lasts; empty where it ends by itself."""
        return REMEDIES.get(self.kind, "")

    def of(self, envs: Sequence[str], *, all_of: bool) -> "Wait":
        """The same wait, of these envs."""
        if all_of and self.kind in (WaitKind.TRAINER, WaitKind.QUEUE):
            return self
        names = ", ".join(f'"{name}"' for name in envs)
        return replace(self, text=f"{self.text} (env {names})")
