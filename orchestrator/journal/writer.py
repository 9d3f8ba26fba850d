"""The journal's writer thread: group commit, so that the event loop never waits for a disk.

Records are handed over in order and committed in order, many at a time: after `commit_interval_s`, earlier when
`commit_bytes` are waiting, at once when somebody waits for durability. Callbacks run on the event loop, all
those of one commit in one hop. A write that fails stops the thread from trying again on its own: the
records stay in memory, `on_error` is called once, and `close` makes one last attempt. When more than
`max_backlog_bytes` have waited and no longer do, `on_drained` is called.
"""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Any

from orchestrator.errors import JournalError
from orchestrator.journal.store import JournalStore

Apply = Callable[[JournalStore], None]
"""A record: what it does to the store."""


class JournalWriter:
    """Owns the thread and, while it runs, the store. Records are added by one thread at a time, as a rule the event loop's."""

    def __init__(
        self,
        store: JournalStore,
        *,
        loop: asyncio.AbstractEventLoop,
        on_error: Callable[[JournalError], None],
        on_drained: Callable[[], None],
        commit_interval_s: float,
        commit_bytes: int,
        max_backlog_bytes: int,
    ) -> None:
        self._store = store
        self._loop = loop
        self._on_error = on_error
        self._on_drained = on_drained
        self._interval_s = commit_interval_s
        self._commit_bytes = commit_bytes
        self._max_backlog_bytes = max_backlog_bytes
        self._was_full = False
        self._changed = threading.Condition()
        self._records: list[Apply] = []
        self._callbacks: list[Callable[[], None]] = []
        self._queued_bytes = 0
        self._writing_bytes = 0
        self._urgent = False
        self._first_at = 0.0
        self._closing = False
        self.error: JournalError | None = None
        self._thread = threading.Thread(target=self._run, name="journal-writer", daemon=True)
        self._thread.start()

    @property
    def backlog_bytes(self) -> int:
        """Bytes recorded and not yet committed."""
        return self._queued_bytes + self._writing_bytes

    @property
    def full(self) -> bool:
        """Whether more waits than may."""
        return self.backlog_bytes > self._max_backlog_bytes

    def add(self, record: Apply, size: int = 0, on_durable: Callable[[], None] | None = None) -> None:
        """Line a record up; with `on_durable` it is committed and brought to disk as soon as possible."""
        with self._changed:
            if self._closing:
                raise JournalError("the journal is closed; nothing more can be recorded")
            first = not self._records and not self._callbacks
            self._records.append(record)
            self._queued_bytes += size
            self._was_full |= self.full
            if on_durable is not None:
                self._callbacks.append(on_durable)
                self._urgent = True
            if first:
                self._first_at = time.monotonic()
            if first or self._urgent or self._queued_bytes >= self._commit_bytes:
                self._changed.notify()

    def close(self) -> None:
        """Commit the rest and end the thread; blocks. Raises JournalError when something could not be written."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        if self._records:
            raise self.error or JournalError("the journal could not write everything that was recorded")

    def _run(self) -> None:
        while True:
            records, callbacks, sync, closing = self._take()
            if records or callbacks:
                error = self._commit(records, sync=sync)
                if error is None:
                    self._finish(callbacks)
                else:
                    self._put_back(records, callbacks)
                    self._fail(error)
                    if closing:
                        return
            elif closing:
                return

    def _take(self) -> tuple[list[Apply], list[Callable[[], None]], bool, bool]:
        """Wait until there is enough to commit, then take all of it."""
        with self._changed:
            while not self._closing:
                if self.error is not None or not (self._records or self._callbacks):
                    self._changed.wait()
                    continue
                left_s = self._first_at + self._interval_s - time.monotonic()
                if self._urgent or self._queued_bytes >= self._commit_bytes or left_s <= 0:
                    break
                self._changed.wait(left_s)
            taken = self._records, self._callbacks, self._urgent or self._closing, self._closing
            self._records, self._callbacks, self._urgent = [], [], False
            self._writing_bytes, self._queued_bytes = self._queued_bytes, 0
            return taken

    def _commit(self, records: list[Apply], *, sync: bool) -> JournalError | None:
        try:
            self._store.begin(sync=sync)
            for record in records:
                record(self._store)
            self._store.commit(sync=sync)
        # A thread has nobody to raise to: whatever it is, the event loop must learn of it.
        except Exception as error:  # noqa: BLE001  see above
            return self._undo(error)
        try:
            self._store.tidy()
        except Exception as error:  # noqa: BLE001  as above
            # What was recorded is committed, so its callbacks still run.
            self._fail(explain(error))
        return None

    def _undo(self, error: Exception) -> JournalError:
        try:
            self._store.rollback()
        except (sqlite3.Error, OSError) as second:
            error.add_note(f"and rolling back failed: {second}")
        return error if isinstance(error, JournalError) else explain(error)

    def _finish(self, callbacks: list[Callable[[], None]]) -> None:
        with self._changed:
            self._writing_bytes = 0
            drained = self._was_full and not self.full
            if drained:
                self._was_full = False
        if drained:
            callbacks = [*callbacks, self._on_drained]
        if callbacks:
            self._post(_call_all, callbacks)

    def _put_back(self, records: list[Apply], callbacks: list[Callable[[], None]]) -> None:
        with self._changed:
            self._records[:0] = records
            self._callbacks[:0] = callbacks
            self._queued_bytes += self._writing_bytes
            self._writing_bytes = 0

    def _fail(self, error: JournalError) -> None:
        if self.error is None:
            self.error = error
            self._post(self._on_error, error)

    def _post(self, function: Callable[[Any], None], argument: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, argument)
        except RuntimeError:
            if not self._loop.is_closed():
                raise


def _call_all(callbacks: list[Callable[[], None]]) -> None:
    for callback in callbacks:
        callback()


def explain(error: Exception) -> JournalError:
    """What a person is told, whatever could not be done."""
    return JournalError(
        f"the journal cannot be written: {str(error) or repr(error)}; free space or make run_dir writable, then run the same command again"
    )
