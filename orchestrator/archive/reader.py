"""Reading a run's rollouts, while it runs, after a crash, or when it is done.

Owns connections that can change nothing. Groups come from the archive; conversations that it did not keep come from the
journal, as long as that holds the group. A run without an archive (it was switched off, or the run is older) is read
from its journal alone. A reader belongs to the thread that made it, and is cheap to make. Every query is read to its end at once, so
that a reader never holds a running orchestrator up.
"""

import json
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from orchestrator.archive.filters import Bounds, Filters
from orchestrator.archive.records import (
    QUEUED,
    TRAINED,
    ArchivedFailure,
    ArchivedGroup,
    OutcomeCount,
    members_of,
    plain_rollouts,
)
from orchestrator.archive.schema import APPLICATION_ID, FILE, SCHEMA_VERSION, identity_of
from orchestrator.errors import ConfigError, JournalError
from orchestrator.groups.group import Group
from orchestrator.journal import GroupRow, JournalReader
from orchestrator.journal.directory import DATABASE, DIRECTORY
from orchestrator.journal.payloads import DamagedPayloadError
from orchestrator.journal.schema import open_for_reading

PAGE = 200
"""Rows that are read at once."""

_COLUMNS = (
    "seq, id, env, split, task_index, epoch, position, step, version, version_end, outcome, rewards, lengths,"
    " min_reward, max_reward, mean_reward, tokens, truncated, started_at, finished_at,"
    " EXISTS (SELECT 1 FROM texts WHERE texts.seq = groups.seq)"
)


class RolloutReader:
    """Looks at the rollouts of a run directory; a context manager."""

    def __init__(self, run_dir: str | Path) -> None:
        """Raises ConfigError where there is no run, JournalError where it cannot be read."""
        self.run_dir = Path(run_dir)
        self._path = self.run_dir / FILE
        has_journal = (self.run_dir / DIRECTORY / DATABASE).is_file()
        if not has_journal and not self._path.is_file():
            raise ConfigError(
                f"{self.run_dir}: there is neither {FILE} nor a journal here; is it the run_dir of a run?"
            )
        self._archive = self._open_archive()
        self._journal: JournalReader | None = None
        try:
            self._journal = JournalReader(self.run_dir) if has_journal else None
        except JournalError:
            # What the archive has can be read without it.
            if self._archive is None:
                raise

    @property
    def archived(self) -> bool:
        """Whether there is an archive; otherwise only groups that the journal holds are there."""
        return self._archive is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._archive is not None:
            self._archive.close()
        if self._journal is not None:
            self._journal.close()

    def groups(
        self,
        *,
        env: str | None = None,
        split: str | None = None,
        step: Bounds = None,
        version: Bounds = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
        outcome: str | None = None,
        task: int | None = None,
        contains: str | None = None,
        readable: bool = False,
        limit: int | None = None,
        newest_first: bool = True,
        after: int | None = None,
        texts: bool = True,
    ) -> Iterator[ArchivedGroup]:
        """The groups that fit every filter, newest first.

        `split` is "train" or "eval"; `step` and `version` are a number or an inclusive pair. With `min_reward` or `max_reward`
        at least one rollout of a group has such a reward. `contains` looks for a text in the messages, in upper or lower case.
        `readable` leaves out groups that have no conversation. `after` is the `seq` of the last group of the page before. Without `texts` the conversations are not read.
        """
        filters = Filters(
            env=env,
            split=split,
            step=step,
            version=version,
            min_reward=min_reward,
            max_reward=max_reward,
            outcome=outcome,
            task=task,
            contains=contains,
            readable=readable or contains is not None,
        )
        found = 0
        for page in self._pages(filters, newest_first, after, limit):
            for group in page:
                if limit is not None and found >= limit:
                    return
                if not filters.fits(group):
                    continue
                if contains is not None or texts:
                    transcript = self._transcript(group)
                    if contains is not None and (transcript is None or not filters.may_speak(transcript)):
                        continue
                    full = group.with_transcript(transcript or b"")
                    if contains is not None and not filters.speaks(full):
                        continue
                    group = full if texts else group
                found += 1
                yield group

    def group(self, key: str | int) -> ArchivedGroup | None:
        """One group by its id, or by its `seq`, with its conversations; None when there is none."""
        if self._archive is None:
            rows = (row for row in self._journal_rows() if key in (row.id, row.seq))
            return next((group for row in rows if (group := self._from_journal(row)) is not None), None)
        column = "seq" if isinstance(key, int) else "id"
        found = [
            _from_row(row)
            # One of two fixed names; the value is bound.
            for row in self._rows(f"SELECT {_COLUMNS} FROM groups WHERE {column} = ?", key)  # noqa: S608
        ]
        return found[0].with_transcript(self._transcript(found[0]) or b"") if found else None

    def task(self, env: str, index: int) -> list[ArchivedGroup]:
        """Every group of one task, oldest first: how the policy's answers to it changed."""
        return list(self.groups(env=env, task=index, newest_first=False))

    def failures(self, env: str | None = None) -> list[ArchivedFailure]:
        """What went wrong, the most frequent first."""
        if self._archive is None:
            return []
        rows = self._rows(
            "SELECT env, split, kind, text, detail, count, first_at, last_at, task_index FROM failures"
            " WHERE env = coalesce(?, env) ORDER BY count DESC, last_at DESC",
            env,
        )
        return [ArchivedFailure(*row) for row in rows]

    def counts(self) -> list[OutcomeCount]:
        """How many groups and rollouts of each env ended how."""
        if self._archive is not None:
            rows = self._rows("SELECT env, split, outcome, groups, rollouts FROM counts WHERE groups > 0")
            return [OutcomeCount(*row) for row in rows]
        found: dict[tuple[str, str], list[int]] = {}
        for row in self._journal_rows():
            mine = found.setdefault((row.task.env, QUEUED if row.step is None else TRAINED), [0, 0])
            mine[0] += 1
            mine[1] += row.rollouts
        return [OutcomeCount(env, "train", outcome, *n) for (env, outcome), n in sorted(found.items())]

    # --- inside ------------------------------------------------------------------------------------------------------

    def _open_archive(self) -> sqlite3.Connection | None:
        """None where there is none yet; a file that is no archive is an error that says so."""
        if not self._path.is_file() or self._path.stat().st_size == 0:
            return None
        try:
            connection = open_for_reading(self._path)
            try:
                application, version = identity_of(connection)
            except sqlite3.Error:
                connection.close()
                raise
        except sqlite3.Error as error:
            raise JournalError(f"{self._path}: cannot be read: {error}") from error
        if (application, version) == (0, 0):
            connection.close()  # a run is just making it
            return None
        if application != APPLICATION_ID or version != SCHEMA_VERSION:
            connection.close()
            what = "no archive" if application != APPLICATION_ID else f"of schema {version}"
            raise JournalError(
                f"{self._path}: {what}; this orchestrator reads archives of schema {SCHEMA_VERSION}"
            )
        return connection

    def _pages(
        self, filters: Filters, newest_first: bool, after: int | None, limit: int | None
    ) -> Iterator[list[ArchivedGroup]]:
        """Light rows that the database thinks fit, a page at a time."""
        if self._archive is None:
            yield from self._journal_pages(newest_first, after)
            return
        conditions, arguments = filters.sql()
        if filters.readable:
            conditions.append(
                "(EXISTS (SELECT 1 FROM texts WHERE texts.seq = groups.seq)"
                " OR id IN (SELECT value FROM json_each(?)))"
            )
            arguments.append(json.dumps([row.id for row in self._held()]))
        order, beyond = ("DESC", "<") if newest_first else ("ASC", ">")
        size = PAGE if limit is None or filters.contains is not None else max(1, min(PAGE, limit))
        while True:
            where = [*conditions, *([f"seq {beyond} ?"] if after is not None else [])]
            rows = self._rows(
                # Only fixed texts are joined; values are bound.
                f"SELECT {_COLUMNS} FROM groups WHERE {' AND '.join(where) or '1'} ORDER BY seq {order} LIMIT ?",  # noqa: S608
                *arguments,
                *([after] if after is not None else []),
                size,
            )
            if not rows:
                return
            yield self._marked([_from_row(row) for row in rows])
            after = rows[-1][0]

    def _marked(self, groups: list[ArchivedGroup]) -> list[ArchivedGroup]:
        """The same groups; those whose conversations only the journal has are said to have one too."""
        without = [group.id for group in groups if not group.has_text and group.outcome in (QUEUED, TRAINED)]
        held = {row.id for row in self._held(without)} if without else set()
        return [group.marked(group.has_text or group.id in held) for group in groups]

    def _held(self, ids: Sequence[str] | None = None) -> list[GroupRow]:
        """What the journal holds of these groups, or of all."""
        if self._journal is None:
            return []
        return [row for row in self._journal.group_rows(ids=ids) if row.transcript_bytes]

    def _transcript(self, group: ArchivedGroup) -> bytes | None:
        """The conversations of a group, undecoded, where they are anywhere."""
        if self._archive is not None:
            for (text,) in self._rows("SELECT text FROM texts WHERE seq = ?", group.seq):
                try:
                    return zlib.decompress(text)
                except (zlib.error, TypeError):
                    break
        for row in self._held([group.id]):
            recorded = self._recorded(row)
            # A task that was asked again has another group under the same id.
            if recorded is not None and recorded.version == group.version:
                return recorded.transcript
        return None

    # --- a run that has only a journal -------------------------------------------------------------------------------

    def _journal_rows(self) -> Iterator[GroupRow]:
        """Whole groups, or the first parts of those that were split, which have the transcript."""
        assert self._journal is not None
        return (row for row in self._journal.group_rows() if not row.part)

    def _journal_pages(self, newest_first: bool, after: int | None) -> Iterator[list[ArchivedGroup]]:
        rows = sorted(self._journal_rows(), key=lambda row: row.seq, reverse=newest_first)
        for row in rows:
            beyond = after is None or (row.seq < after if newest_first else row.seq > after)
            group = self._from_journal(row) if beyond else None
            if group is not None:
                yield [group]

    def _recorded(self, row: GroupRow) -> Group | None:
        """A group as the journal has it; None when a running orchestrator has just given it back."""
        assert self._journal is not None
        try:
            return self._journal.group(row)
        except DamagedPayloadError:
            return None

    def _from_journal(self, row: GroupRow) -> ArchivedGroup | None:
        recorded = self._recorded(row)
        if recorded is None:
            return None
        rewards, lengths, truncated = members_of(recorded)
        return ArchivedGroup(
            seq=row.seq,
            id=row.id,
            env=row.task.env,
            split="train",
            task=row.task.index,
            epoch=row.task.epoch,
            position=row.task.position,
            step=row.step,
            version=row.version,
            version_end=row.version_end,
            outcome=QUEUED if row.step is None else TRAINED,
            rewards=tuple(rewards),
            min_reward=min(rewards, default=None),
            max_reward=max(rewards, default=None),
            mean_reward=sum(rewards) / len(rewards) if rewards else None,
            tokens=row.tokens,
            truncated=sum(truncated),
            started_at=row.finished_at,
            finished_at=row.finished_at,
            has_text=False,
            rollouts=plain_rollouts(rewards, lengths),
        ).with_transcript(recorded.transcript)

    def _rows(self, query: str, *arguments: object) -> list[tuple[Any, ...]]:
        assert self._archive is not None
        try:
            return self._archive.execute(query, arguments).fetchall()
        except (sqlite3.Error, OverflowError) as error:
            raise JournalError(f"{self._path}: cannot be read: {error}") from error


def _from_row(row: Sequence[Any]) -> ArchivedGroup:
    rewards, lengths = _decoded(row[11]), _decoded(row[12])
    known = plain_rollouts(rewards, lengths)
    values: list[Any] = [*row[:11], tuple(rewards), *row[13:20], bool(row[20]), known]
    return ArchivedGroup(*values)


def _decoded(text: str) -> list[Any]:
    value = json.loads(text)
    return value if isinstance(value, list) else []
