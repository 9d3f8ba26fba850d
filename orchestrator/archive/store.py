"""What each event does to the archive's tables. Owned by the archive's thread; everything told at once is one transaction.

A group has one row, under its task's name: one that is asked again, or evaluated again after a crash, replaces its row, so that
a resumed run doubles nothing. Of a group that was split over batches the first one counts. Conversations are written as
soon as their group is chosen, and given up when a better example of the same step comes.
"""

import re
import sqlite3
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from envs.wire import RolloutHeader
from orchestrator.archive.events import (
    AttemptFailed,
    BatchFormed,
    Event,
    GroupEnded,
    GroupEvicted,
    GroupsRecovered,
)
from orchestrator.archive.records import EVALUATED, QUEUED, TRAINED, members_of
from orchestrator.archive.sample import Kept, Sample
from orchestrator.archive.schema import open_for_writing
from orchestrator.archive.space import DAY_S, forget_older, make_room
from orchestrator.groups.scoring import join_transcripts

TEXT_BYTES = 64 * 1024 * 1024
"""A group whose conversations are longer keeps its numbers only."""

ZLIB_LEVEL = 3
"""A third of the time of level 6 for about a tenth more bytes of conversation."""

TEXT_CHARS, DETAIL_CHARS, PATTERN_CHARS = 2000, 8000, 300
"""Of what a failure said, of its traceback, and of what tells it from others."""

PATTERNS_PER_KIND, PATTERNS = 100, 5000
"""Different failures of a kind, and of a run, that have rows of their own; further ones are counted together."""

LOOK_AT_AGE_S = 3600.0
"""How often rows are looked at for their age."""

_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")

_INSERT = (
    "INSERT OR REPLACE INTO groups (id, env, split, task_index, epoch, position, step, version, version_end, outcome,"
    " rollouts, rewards, lengths, min_reward, max_reward, mean_reward, tokens, truncated, started_at, finished_at)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_COUNT = (
    "INSERT INTO failures VALUES (?, ?, ?, ?, ?, ?, 1, ?, ?, ?) ON CONFLICT (env, kind, pattern) DO UPDATE SET"
    " count = count + 1, last_at = excluded.last_at, text = excluded.text, detail = excluded.detail,"
    " task_index = excluded.task_index"
)


def _json(values: Sequence[float]) -> str:
    return msgspec.json.encode(values).decode()


class ArchiveStore:
    """The tables of one run's archive. `since` is the wall time at which the run's clock was 0."""

    def __init__(
        self,
        path: Path,
        *,
        run_id: str,
        last_step: int,
        since: float,
        groups_per_step: int,
        groups_per_evaluation: int,
        max_bytes: int,
        max_days: float,
    ) -> None:
        """Raises ForeignFileError where the file must be moved aside, and sqlite3.Error and OSError."""
        self._connection = open_for_writing(path, run_id)
        self._step = last_step
        self._since = since
        self._per_step = groups_per_step
        self._per_evaluation = groups_per_evaluation
        self._max_bytes = max_bytes
        self._max_days = max_days
        self._samples: dict[tuple[str, str, int], Sample] = {}
        self._looked_at_age = 0.0
        try:
            self._known = {
                (env, kind, pattern)
                for env, kind, pattern in self._connection.execute("SELECT env, kind, pattern FROM failures")
            }
        except sqlite3.Error:
            self._connection.close()
            raise

    def apply(self, events: Sequence[Event]) -> None:
        """Everything that was told since the last time, in its order, all or nothing."""
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            for event in events:
                match event:
                    case GroupEnded():
                        self._add_group(event)
                    case GroupsRecovered():
                        self._recover(event)
                    case BatchFormed():
                        self._form(event)
                    case GroupEvicted():
                        self._evict(event)
                    case AttemptFailed():
                        self._count_failure(event)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def tidy(self) -> None:
        """Give up what is too much or too old."""
        connection, now = self._connection, time.time()
        connection.execute("BEGIN IMMEDIATE")
        try:
            if now - self._looked_at_age > LOOK_AT_AGE_S:
                forget_older(connection, before=now - self._max_days * DAY_S)
                self._looked_at_age = now
            make_room(connection, max_bytes=self._max_bytes)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def close(self) -> None:
        self._connection.close()

    # --- events ------------------------------------------------------------------------------------------------------

    def _add_group(self, event: GroupEnded) -> None:
        task, rollouts = event.task, [one for result in event.rollouts for one in result]
        rewards = [rollout.reward for rollout in rollouts]
        lengths = [sum(rollout.lengths) for rollout in rollouts]
        low, high = min(rewards, default=None), max(rewards, default=None)
        evaluation = event.outcome == EVALUATED
        step = event.step if evaluation else None if event.outcome == QUEUED else self._step + 1
        row = (
            f"{task.key}@{event.step}" if evaluation else task.key,
            task.env,
            event.split,
            task.index,
            task.epoch,
            task.position,
            step,
            event.version,
            event.version_end,
            event.outcome,
            len(rewards),
            _json(rewards),
            _json(lengths),
            low,
            high,
            sum(rewards) / len(rewards) if rewards else None,
            sum(lengths),
            sum(rollout.truncated for rollout in rollouts),
            self._since + event.opened,
            self._since + event.ended,
        )
        seq = self._connection.execute(_INSERT, row).lastrowid
        if seq is not None and low is not None and high is not None:
            self._offer(event, Kept(seq, low, high))

    def _recover(self, event: GroupsRecovered) -> None:
        """Groups that have no row get one: as queued, until their batch is told."""
        for group in event.groups:
            known = "SELECT 1 FROM groups WHERE id = ?"
            if group.part or self._connection.execute(known, (group.task.key,)).fetchone():
                continue
            headers = [
                RolloutHeader(reward, [length] if length else [], truncated=cut)
                for reward, length, cut in zip(*members_of(group), strict=True)
            ]
            self._add_group(
                GroupEnded(
                    task=group.task,
                    split="train",
                    version=group.version,
                    version_end=group.version_end,
                    outcome=QUEUED,
                    step=None,
                    opened=event.at,
                    ended=event.at,
                    rollouts=[headers],
                    transcripts=[group.transcript],
                )
            )

    def _offer(self, event: GroupEnded, group: Kept) -> None:
        """Keep the group's conversations if they are among those to be kept."""
        if not event.transcripts or sum(map(len, event.transcripts)) > TEXT_BYTES:
            return
        evaluation = event.outcome == EVALUATED
        step = (event.step or 0) if evaluation else self._step + 1
        key = (event.task.env, event.split, step)
        if key not in self._samples:
            if evaluation:
                self._forget_samples("eval", event.task.env)
            self._samples[key] = Sample(self._per_evaluation if evaluation else self._per_step)
        keep, gives_way = self._samples[key].offer(group)
        if gives_way is not None:
            self._connection.execute("DELETE FROM texts WHERE seq = ?", (gives_way.seq,))
        if keep:
            text = zlib.compress(join_transcripts(event.transcripts), ZLIB_LEVEL)
            self._connection.execute(
                "INSERT OR REPLACE INTO texts VALUES (?, ?, ?, ?)", (group.seq, step, len(text), text)
            )

    def _form(self, event: BatchFormed) -> None:
        self._connection.executemany(
            "UPDATE groups SET outcome = ?, step = ? WHERE id = ? AND outcome = ?",
            [(TRAINED, event.step, task.key, QUEUED) for task in event.tasks],
        )
        self._step = max(self._step, event.step)
        self._forget_samples("train")

    def _evict(self, event: GroupEvicted) -> None:
        self._connection.execute(
            "UPDATE groups SET outcome = ?, step = ? WHERE id = ? AND outcome = ?",
            (event.reason, self._step + 1, event.task.key, QUEUED),
        )

    def _forget_samples(self, split: str, env: str | None = None) -> None:
        """Samples of this kind are complete: what they have is kept."""
        self._samples = {
            key: sample
            for key, sample in self._samples.items()
            if key[1] != split or (env is not None and key[0] != env)
        }

    def _count_failure(self, event: AttemptFailed) -> None:
        at = self._since + event.at
        key = self._key(event.env, event.kind, _NUMBERS.sub("#", event.text)[:PATTERN_CHARS])
        self._known.add(key)
        said = (event.split, event.text[:TEXT_CHARS], event.detail[-DETAIL_CHARS:])
        self._connection.execute(_COUNT, (*key, *said, at, at, event.task_index))

    def _key(self, env: str, kind: str, pattern: str) -> tuple[str, str, str]:
        """Under what a failure is counted: its own pattern, or with others of its kind where there are very many."""
        key = (env, kind, pattern)
        if key in self._known:
            return key
        if len(self._known) >= PATTERNS:
            return (env, "other", "")
        if sum(one[:2] == (env, kind) for one in self._known) >= PATTERNS_PER_KIND:
            return (env, kind, "")
        return key
