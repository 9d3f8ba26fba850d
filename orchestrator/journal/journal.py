"""The journal of a run: what is recorded survives the death of the process and, where it was served, of the machine.

Recorded are finished groups, resolved task positions, formed batches, acknowledgements, states, evaluations, what
groups said about their tasks, and what people change.
Hand-outs are not, but for the task that a curriculum chose, which nobody could work out again: a position that is
neither resolved nor held by a queued group is asked again after a restart. A position is resolved when its group is in a batch, or when it ends without one. Invariants:

- Recording never blocks the event loop; one writer thread commits in the order of recording.
- A batch's `on_durable` runs on the event loop after the batch, and every group in it, is on disk; only then may
  it be offered to a trainer, so a batch that a trainer has seen is the same after any crash.
- Records without a callback survive kill -9 once committed (after at most `commit_interval_s`). A power cut may
  take the last of them, always as a whole suffix; their tasks are then asked again.
- One orchestrator per run directory: the lock is held until `close`.

What the rows mean is in docs/journal.md. Reading is `JournalReader`.
"""

import asyncio
import json
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import msgspec
import structlog

from orchestrator.curriculum import TaskOutcome
from orchestrator.errors import JournalError
from orchestrator.facts import StepRecord
from orchestrator.groups.group import Batch, Group
from orchestrator.journal.directory import lock_run_dir, move_aside
from orchestrator.journal.identity import RunIdentity, identity_from_meta, identity_to_meta
from orchestrator.journal.payloads import SEGMENT_BYTES, DamagedPayloadError
from orchestrator.journal.reader import JournalReader, Recovered
from orchestrator.journal.rewinding import FindFlaw, Rewound, rewind
from orchestrator.journal.store import JournalStore
from orchestrator.journal.writer import JournalWriter, explain

log = structlog.get_logger("journal")

KEPT_IN_MEMORY = 4
"""Acknowledged batches that a restart reads, where they are kept without a limit of their own."""

_WORTH_A_WORD_BYTES = 4 * 1024**3
"""Of kept batches; there is a line in the log then, and whenever it has doubled."""

_ROW_BYTES = 256
"""What a record without arrays counts for in the backlog."""


class Journal:
    """Records a run. Use `open`; every `record_*` is called on the event loop and returns at once."""

    def __init__(
        self,
        run_dir: Path,
        lock: IO[str],
        store: JournalStore,
        writer: JournalWriter,
        *,
        meta: dict[str, str],
        moved_aside: Path | None,
        rewound: Rewound | None,
    ) -> None:
        self._run_dir = run_dir
        self._lock = lock
        self._store = store
        self._writer = writer
        self._flushes: set[asyncio.Future[None]] = set()
        self._closed = False
        self._read_again: int | None = None
        self._told_bytes = _WORTH_A_WORD_BYTES
        self.meta = meta
        self.moved_aside = moved_aside
        self.rewound = rewound
        self.on_room: Callable[[], None] = lambda: None
        """Called on the event loop when the journal was `full` and is not any more."""

    @classmethod
    def open(
        cls,
        run_dir: Path,
        *,
        commit_interval_s: float,
        commit_bytes: int,
        keep_batches: int | None,
        max_backlog_bytes: int,
        compress: int,
        fsync: bool,
        fresh: bool = False,
        rewind_to: int | None = None,
        find_flaw: FindFlaw = lambda version, path: "",
        on_error: Callable[[JournalError], None] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> Self:
        """Open or create the journal of a run directory and lock it; raises JournalError when it is not to be trusted.

        `fresh` moves an existing journal aside (`moved_aside` says where to), `rewind_to` sets it back to a step (`rewound`) whose weights
        `find_flaw` finds nothing wrong with. `on_error` is called once, on the loop,
        when a write fails. `keep_batches`: how many that were acknowledged can be read back, None for all behind the step of
        the last `record_checkpoint`. `compress` is a zlib level, 0 for none. `loop` is needed off the event loop's thread.
        """
        loop = loop or asyncio.get_running_loop()
        with ExitStack() as undo:
            lock = undo.enter_context(lock_run_dir(run_dir))
            try:
                moved = move_aside(run_dir) if fresh else None
                rewound = (
                    None
                    if rewind_to is None
                    else rewind(run_dir, rewind_to, fsync=fsync, find_flaw=find_flaw)
                )
                store = JournalStore(
                    run_dir,
                    keep_batches=keep_batches,
                    compress=compress,
                    fsync=fsync,
                    segment_bytes=SEGMENT_BYTES,
                )
            except OSError as error:
                raise JournalError(f"{run_dir}: the run directory cannot be written: {error}") from error
            undo.callback(store.close)
            with JournalReader(run_dir) as reader:
                meta = reader.meta()
            undo.pop_all()
        holder: list[Self] = []

        def failed(error: JournalError) -> None:
            for journal in holder:
                journal._fail_flushes(error)
            if on_error is not None:
                on_error(error)

        def drained() -> None:
            for journal in holder:
                journal._drained()

        writer = JournalWriter(
            store,
            loop=loop,
            on_error=failed,
            on_drained=drained,
            commit_interval_s=commit_interval_s,
            commit_bytes=commit_bytes,
            max_backlog_bytes=max_backlog_bytes,
        )
        journal = cls(run_dir, lock, store, writer, meta=meta, moved_aside=moved, rewound=rewound)
        journal._read_again = KEPT_IN_MEMORY if keep_batches is None else None
        holder.append(journal)
        return journal

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def run_id(self) -> str:
        """Names the run; a resumed run keeps it, a fresh one gets another."""
        return self.meta["run_id"]

    @property
    def rewound_to(self) -> list[int]:
        """The steps that the run was set back to, one for each time."""
        return [int(once["to"]) for once in json.loads(self.meta.get("rewound", "[]"))]

    @property
    def backlog_bytes(self) -> int:
        """Bytes recorded and not yet committed."""
        return self._writer.backlog_bytes

    @property
    def kept(self) -> tuple[int, int]:
        """How many acknowledged batches can be read back, and the bytes of their payloads."""
        return self._store.kept

    @property
    def full(self) -> bool:
        """The disk does not keep up, or writing has failed: dispatch nothing new until this is False."""
        return self._writer.error is not None or self._writer.full

    @property
    def error(self) -> JournalError | None:
        """Why writing has stopped, if it has."""
        return self._writer.error

    def record_group(self, group: Group, learned: TaskOutcome | None = None) -> None:
        """A group is finished and queued; its task is resolved when it gets into a batch."""
        size = (
            group.tokens.nbytes
            + group.logprobs.nbytes
            + group.mask.nbytes
            + len(group.transcript)
            + _ROW_BYTES
        )

        def apply(store: JournalStore) -> None:
            store.add_group(group)
            store.add_learned(group.env, learned)

        self._writer.add(apply, size)

    def record_task(self, env: str, position: int, outcome: str, learned: TaskOutcome | None = None) -> None:
        """A task is resolved without a group: filtered, given_up, …"""

        def apply(store: JournalStore) -> None:
            store.add_task(env, position, outcome)
            store.add_learned(env, learned)

        self._writer.add(apply, _ROW_BYTES)

    def record_late(self, env: str, learned: TaskOutcome | None) -> None:
        """A group came too late to be trained on: its task stays open, what it said about it holds."""
        self._writer.add(lambda store: store.add_late(env, learned), _ROW_BYTES)

    def record_choice(self, env: str, position: int, index: int) -> None:
        """A curriculum has chosen the task of a position, which keeps it until it is resolved."""
        self._writer.add(lambda store: store.add_choice(env, position, index), _ROW_BYTES)

    def evict_group(self, group: Group, reason: str) -> None:
        """A queued group will not be trained on: its task is open again, unless another part of it is in a batch."""
        self._writer.add(lambda store: store.evict_group(group.id, group.env, reason), _ROW_BYTES)

    def split_group(self, group: Group, n: int) -> tuple[Group, Group]:
        """Split a recorded group into its first `n` sequences and the rest; all of it is in one commit."""
        first, rest = group.split(n)
        self._writer.add(lambda store: store.split_group(group, (first, rest)), group.tokens.nbytes * 3)
        return first, rest

    def record_batch(
        self,
        batch: Batch,
        on_durable: Callable[[], None],
        *,
        record: StepRecord | None = None,
        states: Mapping[str, Any] | None = None,
    ) -> None:
        """Recorded groups form a batch, which resolves their tasks; `on_durable` runs on the event loop once that is on disk.

        The step's record and the states that hold with it are in the same commit.
        """
        facts = None if record is None else msgspec.json.encode(record).decode()
        encoded = _encode(states or {})

        size = _ROW_BYTES * len(batch.groups) + sum(map(len, encoded.values())) + len(facts or "")
        self._writer.add(lambda store: store.add_batch(batch, facts, encoded), size, on_durable)

    def record_ack(self, step: int, rank: int, *, world_size: int) -> None:
        """A rank has acknowledged a batch."""
        self._writer.add(lambda store: store.add_ack(step, rank, world_size), _ROW_BYTES)

    def record_acknowledged(self, step: int) -> None:
        """Every rank has acknowledged a batch: it is kept for a while and then given back."""
        self._writer.add(lambda store: store.acknowledge(step), _ROW_BYTES)
        batches, size = self.kept
        if size > self._told_bytes:
            self._told_bytes = 2 * size
            log.warning(
                "journal.kept",
                batches=batches,
                mib=size >> 20,
                note="the trainer may ask for them again (trainer.keep_batches); trainer.checkpointed(step) gives back those up to a step",
            )

    def record_checkpoint(self, step: int) -> None:
        """The trainer can go on from behind a step, whatever happens to it: earlier batches are not needed for that."""
        self._writer.add(lambda store: store.set_checkpoint(step), _ROW_BYTES)
        log.info("trainer.checkpointed", step=step, kept_batches=self.kept[0], kept_mib=self.kept[1] >> 20)

    def record_states(self, states: Mapping[str, Any]) -> None:
        """What a restart needs, JSON-able, in one commit; the latest value of a name wins."""
        encoded = _encode(states)
        size = sum(map(len, encoded.values())) + _ROW_BYTES * len(encoded)
        self._writer.add(lambda store: store.set_states(encoded), size)

    def record_version(self, version: int, step: int, path: str | None) -> None:
        """A version was published after a step was trained on, and this is where its weights lie."""
        self._writer.add(lambda store: store.add_version(version, step, path), _ROW_BYTES)

    def forget_version(self, version: int) -> None:
        """No inference server could load a version: it was never published."""
        self._writer.add(lambda store: store.forget_version(version), _ROW_BYTES)

    def record_report(self, step: int, metrics: Mapping[str, float]) -> None:
        """What the trainer said about a step; names that it said before are replaced."""
        encoded = json.dumps(dict(metrics))
        self._writer.add(lambda store: store.add_report(step, encoded), len(encoded) + _ROW_BYTES)

    def record_eval(self, data: dict[str, Any]) -> None:
        """The result of an evaluation; `env`, `step` and `version` become columns."""
        encoded = json.dumps(data)
        self._writer.add(lambda store: store.add_eval(data, encoded), len(encoded) + _ROW_BYTES)

    def record_control(self, at: float, origin: str, command: Mapping[str, Any]) -> None:
        """A person has changed the run while it goes on."""
        encoded = json.dumps(command)
        self._writer.add(lambda store: store.add_control(at, origin, encoded), len(encoded) + _ROW_BYTES)

    def set_meta(self, key: str, value: str) -> None:
        """Note something about the run that does not change as it goes on."""
        self.meta[key] = value
        self._writer.add(lambda store: store.set_meta(key, value), _ROW_BYTES)

    @property
    def identity(self) -> RunIdentity:
        """What was noted about which tasks come, by this process and earlier ones."""
        return identity_from_meta(self.meta)

    def set_identity(self, identity: RunIdentity) -> None:
        """Note which tasks come; envs of earlier processes that are not in it stay noted, should they come back."""
        for key, value in identity_to_meta(identity).items():
            if self.meta.get(key) != value:
                self.set_meta(key, value)

    def prune(self, env: str, low: int) -> None:
        """Every position of an env below `low` is resolved, so no queued group has one; forget their rows."""
        self._writer.add(lambda store: store.prune(env, low), _ROW_BYTES)

    def when_durable(self, callback: Callable[[], None]) -> None:
        """Call back on the event loop once everything recorded so far is on disk."""
        self._writer.add(_nothing, 0, callback)

    async def flush(self) -> None:
        """Wait until everything recorded so far is on disk; raises JournalError when it cannot be."""
        if self._writer.error is not None:
            raise self._writer.error
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._flushes.add(future)
        try:
            self.when_durable(lambda: None if future.done() else future.set_result(None))
            await future
        finally:
            self._flushes.discard(future)

    def recover(self, *, world_size: int | None = None) -> Recovered:
        """What a restart needs, as it was when the journal was opened; blocks while it reads the payloads, so call it in a thread, before anything is recorded."""
        with JournalReader(self._run_dir) as reader:
            recovered = reader.recover(world_size=world_size, again=self._read_again)
        if damaged := recovered.damaged_rows:
            self._writer.add(lambda store: store.forget_damaged(damaged), _ROW_BYTES)
        return recovered

    def load_batch(self, step: int) -> Batch | None:
        """A kept batch, read back from disk; blocks, so call it in a thread."""
        with JournalReader(self._run_dir) as reader:
            return reader.batch(step)

    def close(self) -> None:
        """Commit the rest, fold the WAL into the database, release the lock; blocks. Raises JournalError when that failed."""
        if self._closed:
            return
        self._closed = True
        try:
            self._writer.close()
            try:
                self._store.tidy(force=True)
            except (sqlite3.Error, OSError, DamagedPayloadError) as error:
                raise self._writer.error or explain(error) from error
        finally:
            self._store.close()
            self._lock.close()

    async def aclose(self) -> None:
        """`close` without blocking the event loop."""
        await asyncio.to_thread(self.close)

    def _drained(self) -> None:
        if not self.full:
            self.on_room()

    def _fail_flushes(self, error: JournalError) -> None:
        for future in self._flushes:
            if not future.done():
                future.set_exception(error)


def _encode(states: Mapping[str, Any]) -> dict[str, str]:
    return {key: json.dumps(value) for key, value in states.items()}


def _nothing(store: JournalStore) -> None:
    """Records nothing; only its place in the order counts."""
