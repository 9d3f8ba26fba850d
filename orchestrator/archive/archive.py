"""Keeps a run's rollouts for people, by a thread of its own; never able to slow or stop the run.

Told on the event loop, at the cost of about a microsecond a group. The queue to the thread is bounded: when the disk is slow,
full or broken, what is told is lost, counted, and said once. A file that is damaged or of another run is moved aside, and a
new one begun. What was committed survives kill -9; a resumed run goes on with the same file.
"""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from envs.wire import Failure
from orchestrator.archive.events import (
    AttemptFailed,
    BatchFormed,
    Event,
    GroupEnded,
    GroupEvicted,
    GroupsRecovered,
)
from orchestrator.archive.records import EVALUATED
from orchestrator.archive.schema import FILE, ForeignFileError, move_aside
from orchestrator.archive.store import ArchiveStore
from orchestrator.dispatch.ledger import Lane
from orchestrator.dispatch.work import PendingGroup
from orchestrator.groups.group import Batch, Group

log = structlog.get_logger()

COMMIT_S = 0.5
"""How long what was told waits for more, so that a commit holds many groups."""

COMMIT_BYTES = 8 * 1024 * 1024
"""A commit is made earlier when so much waits."""

QUEUE_BYTES, QUEUE_EVENTS = 64 * 1024 * 1024, 20_000
"""What may wait for the disk; beyond it, what is told is lost."""

EVENT_BYTES = 512
"""What an event counts for beside its conversations."""

CLOSE_S = 5.0
"""How long the end of a run waits for the rest to be written."""

UNSAID = frozenset({"shutdown", "run_complete"})
"""Groups that were given up because the run ended say nothing about rollouts."""

REASONS = {
    "timed_out": "every attempt took longer than rollout_timeout_s",
    "group_deadline": "the group took longer than group_timeout_s",
}
"""What is to be said of failures that no environment tells."""


class RolloutArchive:
    """Told what happens, writes it down. An `orchestrator.sinks.archive.Archive`, and an async context manager."""

    def __init__(
        self,
        run_dir: Path,
        *,
        run_id: str,
        last_step: int,
        groups_per_step: int,
        groups_per_evaluation: int,
        max_bytes: int,
        max_days: float,
        clock: float,
    ) -> None:
        """`clock` is what the run's clock says now; `last_step` the last one that an earlier process formed."""
        self._path = run_dir / FILE
        since = time.time() - clock
        self._open = partial(
            ArchiveStore,
            self._path,
            run_id=run_id,
            last_step=last_step,
            since=since,
            groups_per_step=groups_per_step,
            groups_per_evaluation=groups_per_evaluation,
            max_bytes=max_bytes,
            max_days=max_days,
        )
        self._changed = threading.Condition()
        self._events: list[Event] = []
        self._writing = 0
        self._bytes = 0
        self._first_at = 0.0
        self._closing = False
        self._store: ArchiveStore | None = None
        self.lost = 0
        """Of what was told, what could not be kept."""
        self.trouble = ""
        """Why it cannot be kept at present; empty while it can."""
        self._thread = threading.Thread(target=self._run, name="archive", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Write the rest and end the thread; blocks for a bounded time."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("archive.not_closed", path=str(self._path), note="the disk does not answer")

    @property
    def waiting(self) -> int:
        """What was told and is neither written nor lost yet."""
        return len(self._events) + self._writing

    @property
    def note(self) -> str:
        """For the status: that something is lost, and why; empty while nothing is."""
        if not self.trouble:
            return ""
        return f"rollouts are not kept for reading ({self.lost} records are lost): {self.trouble}"

    # --- what is told, on the event loop -----------------------------------------------------------------------------

    def recovered(self, groups: Sequence[Group], batches: Sequence[Batch], now: float) -> None:
        """What an earlier process left in the journal: it may have died before all of it was told."""
        every = [*(group for batch in batches for group in batch.groups), *groups]
        self._add(GroupsRecovered(every, now), EVENT_BYTES)
        for batch in batches:
            self.batch_formed(batch)

    def scored(self, pending: PendingGroup, outcome: str, now: float) -> None:
        self._add_group(pending, "train", outcome, None, now)

    def dropped(self, pending: PendingGroup, reason: str, now: float) -> None:
        if reason in UNSAID:
            return
        self._add_group(pending, "train", reason, None, now)
        if reason in REASONS:
            task = pending.task
            said = AttemptFailed(task.env, "train", reason, REASONS[reason], "", task.index, now)
            self._add(said, EVENT_BYTES)

    def evicted(self, group: Group, reason: str) -> None:
        self._add(GroupEvicted(group.task, reason), EVENT_BYTES)

    def batch_formed(self, batch: Batch) -> None:
        self._add(BatchFormed(batch.step, [group.task for group in batch.groups]), EVENT_BYTES)

    def evaluated(self, pending: PendingGroup, now: float) -> None:
        self._add_group(pending, "eval", EVALUATED, pending.context.step, now)

    def attempt_failed(self, pending: PendingGroup, failure: Failure, now: float) -> None:
        split = "train" if pending.lane is Lane.TRAIN else "eval"
        text, detail = failure.described, failure.detail
        self._add(
            AttemptFailed(pending.env, split, failure.kind, text, detail, pending.task.index, now),
            EVENT_BYTES + len(text) + len(detail),
        )

    def _add_group(
        self, pending: PendingGroup, split: str, outcome: str, step: int | None, now: float
    ) -> None:
        results = pending.results
        transcripts = [result.transcript for result in results]
        self._add(
            GroupEnded(
                pending.task,
                split,
                pending.version,
                max(pending.version, pending.version_end),
                outcome,
                step,
                pending.opened,
                now,
                [result.rollouts for result in results],
                transcripts,
            ),
            EVENT_BYTES + sum(map(len, transcripts)),
        )

    def _add(self, event: Event, size: int) -> None:
        with self._changed:
            if self._bytes + size > QUEUE_BYTES or len(self._events) >= QUEUE_EVENTS or self._closing:
                self._lose(1, "the disk does not keep up")
                return
            first = not self._events
            self._events.append(event)
            self._bytes += size
            if first:
                self._first_at = time.monotonic()
            if first or self._bytes >= COMMIT_BYTES:
                self._changed.notify()

    def _lose(self, events: int, why: str) -> None:
        """Called with the lock held."""
        self.lost += events
        if not self.trouble and not self._closing:
            log.warning(
                "archive.losing",
                path=str(self._path),
                why=why,
                note="rollouts are not kept for reading while this lasts; the run is not affected",
            )
        self.trouble = why

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        # Who looks at a young run shall find a file that is of this run.
        self._write([])
        closing = False
        while not closing:
            events, closing = self._take()
            if events:
                self._write(events)
        if self._store is not None:
            self._store.close()

    def _take(self) -> tuple[list[Event], bool]:
        """Wait until there is enough to commit, then take all of it."""
        with self._changed:
            while not self._closing:
                if not self._events:
                    self._changed.wait()
                    continue
                left_s = self._first_at + COMMIT_S - time.monotonic()
                if left_s <= 0 or self._bytes >= COMMIT_BYTES:
                    break
                self._changed.wait(left_s)
            taken, self._events, self._bytes = self._events, [], 0
            self._writing = len(taken)
            return taken, self._closing

    def _write(self, events: list[Event]) -> None:
        """Commit, into a new file where the old one cannot be used; what cannot be committed is lost."""
        try:
            try:
                self._commit(events)
            except (ForeignFileError, sqlite3.DatabaseError) as error:
                # Its subclasses are about the disk, locks and the like, not about the file's content.
                if not isinstance(error, ForeignFileError) and type(error) is not sqlite3.DatabaseError:
                    raise
                self._begin_anew(error)
                self._commit(events)
        # A thread has nobody to raise to, and nothing of this may reach the run.
        except Exception as error:  # noqa: BLE001  see above
            with self._changed:
                self._lose(len(events), f"{type(error).__name__}: {error}")
                self._writing = 0
            return
        with self._changed:
            trouble, self.trouble = self.trouble, ""
            self._writing = 0
        if trouble:
            log.warning("archive.goes_on", path=str(self._path), lost=self.lost)

    def _commit(self, events: list[Event]) -> None:
        if self._store is None:
            self._store = self._open()
        self._store.apply(events)
        self._store.tidy()

    def _begin_anew(self, error: Exception) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None
        aside = move_aside(self._path)
        log.warning("archive.moved_aside", path=str(self._path), to=str(aside), why=str(error))
