"""Rows of the journal's tables: what a group and a batch look like in them, and how many are inserted at once.

A group's and a batch's row carry a checksum over what identifies them, so that a row that changed on disk is not
taken for the one that was recorded. Pure but for `insert_rows`. The columns are documented in docs/journal.md.
"""

import json
import sqlite3
import zlib
from collections.abc import Sequence

from orchestrator.groups.group import Batch, Group
from orchestrator.journal.payloads import Place

GROUP_COLUMNS = (
    "id, env, split, position, part, task_index, epoch, version, version_end, rollouts, sequences, tokens, reward,"
    " finished_at, segment, offset, bytes, details_bytes, transcript_bytes, codec, checksum, digest, row_checksum"
)
GROUP_IDENTITY = (
    "id, env, split, position, part, task_index, epoch, version, version_end, rollouts, sequences, tokens, bytes,"
    " details_bytes, transcript_bytes, codec, checksum, digest"
)
"""Columns that never change once a group is recorded: all that is covered by its row's checksum."""
_ROWS_PER_STATEMENT = 64


def group_checksum(identity: Sequence[object]) -> int:
    """The checksum of a group's row, from the values of GROUP_IDENTITY; it depends on their types too."""
    return zlib.crc32(repr(tuple(identity)).encode())


def batch_checksum(step: int, version: int, group_ids: Sequence[str]) -> int:
    """The checksum of a batch's row: what it is trained on, and which groups are in it, in which order."""
    return zlib.crc32(json.dumps([step, version, group_ids]).encode())


def group_row(group: Group, place: Place, now: float) -> tuple[object, ...]:
    """The values of GROUP_COLUMNS."""
    task = group.task
    named = (
        group.id,
        task.env,
        task.split,
        task.position,
        group.part,
        task.index,
        task.epoch,
        group.version,
        group.version_end,
        group.rollouts,
        group.size,
        len(group.tokens),
    )
    stored = (
        place.bytes,
        len(group.details),
        len(group.transcript),
        place.codec,
        place.checksum,
        group.digest,
    )
    reward = _sum_of_rewards(group) / max(group.size, 1)
    return (*named, reward, now, place.segment, place.offset, *stored, group_checksum((*named, *stored)))


def insert_rows(connection: sqlite3.Connection, into: str, rows: list[tuple[object, ...]]) -> None:
    """Insert and forget the rows."""
    for start in range(0, len(rows), _ROWS_PER_STATEMENT):
        some = rows[start : start + _ROWS_PER_STATEMENT]
        one = f"({', '.join('?' * len(some[0]))})"
        connection.execute(
            f"{into} VALUES {', '.join([one] * len(some))}", [value for row in some for value in row]
        )
    rows.clear()


def tasks_of(batch: Batch) -> dict[str, list[tuple[int, int]]]:
    """Per env, the position of every group's task, and the group's part of it."""
    tasks: dict[str, list[tuple[int, int]]] = {}
    for group in batch.groups:
        tasks.setdefault(group.env, []).append((group.task.position, group.part))
    return tasks


def shares_of(batch: Batch) -> dict[str, dict[str, float]]:
    """What each env has in a batch."""
    shares: dict[str, dict[str, float]] = {}
    for group in batch.groups:
        share = shares.setdefault(group.env, {"groups": 0, "sequences": 0, "tokens": 0, "reward": 0.0})
        share["groups"] += 1
        share["sequences"] += group.size
        share["tokens"] += len(group.tokens)
        share["reward"] += _sum_of_rewards(group)
    for share in shares.values():
        share["reward"] /= share["sequences"]
    return shares


def _sum_of_rewards(group: Group) -> float:
    # For the few numbers that a group has, this takes a fifth of the time of numpy's sum.
    return float(sum(group.rewards.tolist()))
