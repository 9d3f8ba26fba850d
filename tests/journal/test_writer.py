"""The journal's writer thread: many records a commit, one hop to the event loop per commit, and order."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.errors import JournalError
from orchestrator.journal.store import JournalStore
from orchestrator.journal.writer import JournalWriter
from tests.support.waiting import until


class CountingStore:
    """A store that keeps its transactions, and can be held up or made to fail."""

    def __init__(self) -> None:
        self.commits: list[tuple[list[object], bool]] = []
        self.applied: list[object] = []
        self.may_commit = threading.Event()
        self.may_commit.set()
        self.failure: Exception | None = None
        self.tidying_failure: Exception | None = None

    def begin(self, *, sync: bool) -> None:
        self.applied = []

    def commit(self, *, sync: bool) -> None:
        self.may_commit.wait()
        if self.failure is not None:
            raise self.failure
        self.commits.append((self.applied, sync))

    def rollback(self) -> None:
        self.applied = []

    def tidy(self) -> None:
        if self.tidying_failure is not None:
            raise self.tidying_failure


class CountingLoop:
    """Passes hops on to the real loop and counts them."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.hops = 0

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> None:
        self.hops += 1
        self.loop.call_soon_threadsafe(callback, *args)

    def is_closed(self) -> bool:
        return False


def make_writer(
    store: CountingStore, loop: Any = None, **options: Any
) -> tuple[JournalWriter, list[JournalError]]:
    errors: list[JournalError] = []
    settings: dict[str, Any] = {
        "commit_interval_s": 3600.0,
        "commit_bytes": 1000,
        "max_backlog_bytes": 1_000_000,
        "on_drained": lambda: None,
        **options,
    }
    fake: Any = store
    writer = JournalWriter(fake, loop=loop or asyncio.get_running_loop(), on_error=errors.append, **settings)
    return writer, errors


def mark(name: object) -> Callable[[JournalStore], None]:
    """A record that leaves its name with the store."""

    def apply(store: Any) -> None:
        store.applied.append(name)

    return apply


async def test_records_are_committed_together_in_order_with_one_hop_for_their_callbacks() -> None:
    """A thousand callbacks of one commit cost the event loop one wake-up."""
    store, loop = CountingStore(), CountingLoop()
    writer, _ = make_writer(store, loop)
    store.may_commit.clear()
    called: list[int] = []
    done = asyncio.Event()
    writer.add(mark("first"), 1, lambda: None)
    for number in range(1000):
        writer.add(mark(number), 1, lambda number=number: called.append(number))  # type: ignore[misc] # binds the loop's value
    writer.add(mark("last"), 0, done.set)
    store.may_commit.set()
    await done.wait()
    await asyncio.to_thread(writer.close)
    assert [name for names, _ in store.commits for name in names] == ["first", *range(1000), "last"]
    assert called == list(range(1000))
    assert len(store.commits) <= 2
    assert loop.hops <= 2


async def test_nothing_is_committed_before_the_interval_unless_it_is_much_or_awaited() -> None:
    """Group commit: size and somebody waiting are what hurries it."""
    store = CountingStore()
    writer, _ = make_writer(store)
    writer.add(mark("small"), 10)
    assert store.commits == []
    assert writer.backlog_bytes == 10
    writer.add(mark("large"), 2000)
    await until(lambda: store.commits)
    assert store.commits == [(["small", "large"], False)]
    await asyncio.to_thread(writer.close)


async def test_what_is_awaited_is_brought_to_disk_and_the_rest_is_not() -> None:
    """Only commits that somebody relies on pay for an fsync."""
    store = CountingStore()
    writer, _ = make_writer(store, commit_interval_s=0.001)
    durable = asyncio.Event()
    writer.add(mark("quiet"), 10)
    await until(lambda: store.commits)
    writer.add(mark("awaited"), 10, durable.set)
    await durable.wait()
    assert store.commits == [(["quiet"], False), (["awaited"], True)]
    await asyncio.to_thread(writer.close)


async def test_a_failure_keeps_the_records_says_it_once_and_close_tries_again() -> None:
    """A disk that has room again at the end gets everything."""
    store = CountingStore()
    writer, errors = make_writer(store)
    store.failure = OSError(28, "No space left on device")
    called: list[str] = []
    writer.add(mark("a"), 10, lambda: called.append("a"))
    await until(lambda: errors)
    writer.add(mark("b"), 10, lambda: called.append("b"))
    assert "No space left" in str(errors[0])
    assert "free space" in str(errors[0])
    assert store.commits == []
    assert writer.backlog_bytes == 20
    store.failure = None
    await asyncio.to_thread(writer.close)
    await asyncio.sleep(0)
    assert store.commits == [(["a", "b"], True)]
    assert called == ["a", "b"]
    assert len(errors) == 1


async def test_what_cannot_be_written_to_the_end_is_an_error_of_close() -> None:
    """Nobody believes that everything was recorded."""
    store = CountingStore()
    writer, errors = make_writer(store)
    store.failure = OSError(28, "No space left on device")
    writer.add(mark("a"), 10)
    with pytest.raises(JournalError, match="No space left"):
        await asyncio.to_thread(writer.close)
    await asyncio.sleep(0)
    assert len(errors) == 1
    with pytest.raises(JournalError, match="closed"):
        writer.add(mark("b"))


async def test_a_record_that_cannot_be_applied_reaches_the_event_loop_too() -> None:
    """A mistake of ours in the thread is an error of the run, not a thread that is silently gone."""
    store = CountingStore()
    writer, errors = make_writer(store)
    writer.add(lambda store: store.set_states(1), 0, lambda: None)  # type: ignore[arg-type] # the mistake
    await until(lambda: errors)
    assert "cannot be written" in str(errors[0])
    with pytest.raises(JournalError):
        await asyncio.to_thread(writer.close)


async def test_whatever_fails_after_a_commit_reaches_the_event_loop_and_undoes_nothing() -> None:
    """What was committed is told, and what comes later is written when the journal is closed."""
    store = CountingStore()
    writer, errors = make_writer(store)
    store.tidying_failure = MemoryError()
    durable = asyncio.Event()
    writer.add(mark("a"), 10, durable.set)
    await durable.wait()
    assert "MemoryError" in str(errors[0])
    writer.add(mark("b"), 10)
    await asyncio.to_thread(writer.close)
    assert [names for names, _ in store.commits] == [["a"], ["b"]]
    assert len(errors) == 1
