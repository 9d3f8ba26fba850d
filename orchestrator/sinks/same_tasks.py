"""Whether an index of an env is one task: on all its servers, after every restart, and in every epoch.

Every result carries a digest of its task. The members of a group must agree on it, otherwise they answered different
questions and their rewards cannot be compared. And an index that had another digest before, in this process or in an
earlier one of the run, tells that the env's data has changed. Servers that make no digest are believed. Pure but for the log.
"""

from typing import Any

import msgspec
import structlog

from envs.wire import Result
from orchestrator.dispatch.work import PendingGroup
from orchestrator.tasks.task import TrainTask

log = structlog.get_logger()

_REMEMBERED = 1 << 16
"""Tasks of all envs whose digests are kept; what comes after them is not compared with later epochs."""
_TEXT_CHARS = 500


class SameTasks:
    """Compares digests, and logs the first of each kind of difference per env in full."""

    def __init__(self) -> None:
        self._digests: dict[tuple[str, str, int], int] = {}
        self._told: set[tuple[str, str]] = set()

    def agree(self, pending: PendingGroup) -> bool:
        """Whether all rollouts of a group are of one task."""
        first: Result | None = None
        for result in pending.results:
            if not result.digest:
                continue
            if first is None:
                first = result
            elif result.digest != first.digest:
                self._tell_mismatch(pending, first, result)
                return False
        if first is not None:
            self.note(pending.task, first.digest)
        return True

    def note(self, task: TrainTask, digest: int) -> None:
        """An index has this digest; said once per env if it had another one before."""
        if not digest:
            return
        key = (task.env, task.split, task.index)
        before = self._digests.get(key)
        if before is None:
            if len(self._digests) < _REMEMBERED:
                self._digests[key] = digest
        elif before != digest:
            self._digests[key] = digest
            if self._first_of("changed", task.env):
                log.warning(
                    "env.tasks_changed",
                    env=task.env,
                    index=task.index,
                    note="this index was another task before: the env's data has changed, or it is drawn anew each time",
                )

    def _tell_mismatch(self, pending: PendingGroup, one: Result, other: Result) -> None:
        if self._first_of("mismatch", pending.env):
            log.error(
                "group.task_mismatch",
                env=pending.env,
                task=pending.task.key,
                index=pending.task.index,
                one=_question(one.transcript),
                other=_question(other.transcript),
                effect="such groups are dropped",
                remedy='seed whatever is random; "orchestrator env try ID --check" shows which tasks differ',
            )

    def _first_of(self, what: str, env: str) -> bool:
        first = (what, env) not in self._told
        self._told.add((what, env))
        return first


def _question(transcript: bytes) -> str:
    """The first thing that a user said in a result's first rollout, cut to a length that a log can hold."""
    try:
        entries: Any = msgspec.msgpack.decode(transcript)
        said = [message for message in entries[0]["messages"] if message.get("role") == "user"]
        return str(said[0]["content"])[:_TEXT_CHARS]
    # Transcripts are whatever the environment made of them.
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError):
        return "(it has no text)"
