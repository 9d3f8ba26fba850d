"""prime-rl's ZMQ transport: batches are published to its trainer's ranks, each under a topic of its own.

A message there has no number: a rank counts what it gets. So a batch that came twice, or not at all, would shift everything
behind it, and nobody would notice. What a publisher sends to nobody is gone, and what it sends is never confirmed but by the
weights that come of it. `Audience` therefore knows of every rank whether it listens, and whether it is a process that was
there when something was sent; `Publisher` sends a batch when all of them listen, notes on disk what it has sent, and sends
again only to a trainer that was started anew, which has nothing. Nothing is sent to a rank that was never heard of: its word
that it has started could come later, to the next bridge, which would take it for a process that has nothing.

Where a connection breaks while a batch is under way, or this process is killed then, nobody can tell whether it arrived.
Nothing is sent until the weights of that step are there, or the trainer starts anew; the log says so.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog
import zmq

from envs.drained import DrainedSocket
from orchestrator.errors import ConfigError

log = structlog.get_logger("bridge")

HIGH_WATER = 10
"""Messages that may wait for a rank, as its trainer has it; there are never more than two."""
_TOPIC = b"data_rank|"
_LINGER_MS = 2000


class Audience:
    """Which ranks listen, and to which of them it is known what they have. No I/O.

    A rank is heard of twice: its subscription comes with every connection, its number once in the life of its process; either may
    come first.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = range(ranks)
        self._listening: set[int] = set()
        self._connected_since: set[int] = set()
        self._told: set[int] = set()
        self._early: set[int] = set()
        self._new: set[int] = set()

    def subscribe(self, rank: int) -> None:
        """A rank's connection is there, its first one or another."""
        if rank in self._ranks:
            self._listening.add(rank)
            self._connected_since.add(rank)
            self._told.discard(rank)
            if rank in self._early:
                self._early.discard(rank)
                self._found_new(rank)

    def unsubscribe(self, rank: int) -> None:
        """A rank's connection is gone."""
        self._listening.discard(rank)

    def announce(self, rank: int) -> None:
        """A process has started as a rank."""
        if rank not in self._ranks:
            return
        if rank not in self._listening or rank in self._told:
            self._early.add(rank)
        elif rank in self._connected_since:
            self._found_new(rank)
        else:
            # It listened already when something was sent, so it has that.
            self._told.add(rank)

    def sent(self) -> None:
        """Everybody who listens has what there is."""
        self._connected_since.clear()
        self._new.clear()

    @property
    def absent(self) -> list[int]:
        """Ranks that do not listen, and those whose fellows have started anew and which have not."""
        behind = set(self._ranks) - self._new if self._new or self._early else set()
        return sorted((set(self._ranks) - self._listening) | behind | self._early)

    @property
    def is_new(self) -> bool:
        """Whether every rank is a process that has got nothing."""
        return len(self._new) == len(self._ranks)

    @property
    def reconnected(self) -> list[int]:
        """Ranks whose connection is newer than what was sent last: it may not have reached them."""
        return sorted(self._connected_since)

    def _found_new(self, rank: int) -> None:
        self._told.add(rank)
        self._new.add(rank)


class Note(msgspec.Struct):
    """What is on disk: of which run, the last step that was sent, and the ranks that have said that they have started."""

    run: str
    sent: int = 0
    heard: list[int] = []


class Publisher:
    """Sends batches to the ranks; `on_change` is called when it should be looked at again (`look`)."""

    def __init__(
        self, host: str, port: int, *, ranks: int, run: str, note: Path, on_change: Callable[[], None]
    ) -> None:
        self._audience = Audience(ranks)
        self._ranks = range(ranks)
        self._path = note
        self._note = _read_note(note, run)
        self._on_change = on_change
        self._batches: dict[int, list[bytes]] = {}
        self._said = ""
        self._context = zmq.Context()
        self._sockets: list[DrainedSocket] = []
        try:
            self._data = self._open(zmq.XPUB, f"tcp://{host}:{port}", self._on_subscription)
            self._open(zmq.PULL, f"tcp://{host}:{port + 1}", self._on_announcement)
        except BaseException:
            self._close_sockets(linger_ms=0)
            self._context.term()
            raise
        log.info("bridge.publishing", address=f"tcp://{host}:{port}", announced_at=port + 1)

    def hold(self, step: int, shares: list[bytes]) -> None:
        """A batch that is to be sent, a message for each rank."""
        self._batches[step] = shares

    def look(self, trained: int) -> None:
        """Send what is due. `trained` is the last step whose weights are there."""
        note = self._note
        for step in [step for step in self._batches if step <= trained]:
            del self._batches[step]
        audience = self._audience
        if absent := audience.absent:
            self._say("bridge.waiting_for_ranks", ranks=absent)
            return
        if unheard := [rank for rank in self._ranks if rank not in note.heard]:
            self._say(
                "bridge.waiting_for_word",
                ranks=unheard,
                note="they listen, and have not said that they have started; if that lasts, a bridge was killed as it heard them: restart the trainer",
            )
            return
        if audience.is_new or note.sent < trained:
            note.sent = trained
        elif audience.reconnected and note.sent > trained:
            self._say(
                "bridge.maybe_lost",
                step=note.sent,
                ranks=audience.reconnected,
                note="their connection broke, or this bridge was restarted, when the step was under way",
                remedy="if the trainer waits for a batch, restart it from its checkpoint; it then gets the step again",
            )
            return
        self._said = ""
        while (step := note.sent + 1) in self._batches:
            self._send(note, step)

    def forget(self) -> None:
        """The trainer was set back: batches come again."""
        self._batches.clear()

    async def aclose(self) -> None:
        """Let go, after a moment for what is still to be sent."""
        # Sockets belong to the loop that reads them; only the wait for what they still send is for a thread.
        self._close_sockets(linger_ms=_LINGER_MS)
        await asyncio.to_thread(self._context.term)

    def _close_sockets(self, *, linger_ms: int) -> None:
        for socket in self._sockets:
            socket.close(linger_ms=linger_ms)

    def _send(self, note: Note, step: int) -> None:
        # Noted first: a batch that may have been sent is never sent again to the same process.
        note.sent = step
        write_note(self._path, note)
        for rank, share in enumerate(self._batches[step]):
            self._data.send([b"%s%d|" % (_TOPIC, rank), share], copy=False)
        self._audience.sent()
        log.info("bridge.handed_over", step=step)

    def _open(self, kind: int, address: str, on_message: Callable[[list[bytes]], None]) -> DrainedSocket:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        try:
            socket.setsockopt(zmq.IPV6, "[" in address)
            if kind == zmq.XPUB:
                socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
                # Also a subscription that is there already: a process may be replaced before its end is noticed.
                socket.setsockopt(zmq.XPUB_VERBOSE, 1)
            for option, value in (("", 1), ("_IDLE", 10), ("_INTVL", 5), ("_CNT", 4)):
                socket.setsockopt(getattr(zmq, f"TCP_KEEPALIVE{option}"), value)
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close(0)
            raise ConfigError(f"cannot listen at {address}: {error}") from error
        drained = DrainedSocket(socket, on_message, loop=asyncio.get_running_loop())
        self._sockets.append(drained)
        return drained

    def _on_subscription(self, frames: list[bytes]) -> None:
        """The first byte says whether it is one, or the end of one; the others are the topic."""
        topic = frames[0][1:]
        rank = _number(topic.removeprefix(_TOPIC).removesuffix(b"|"))
        if rank is None or topic != b"%s%d|" % (_TOPIC, rank):
            return
        if frames[0][:1] == b"\x01":
            self._audience.subscribe(rank)
        else:
            self._audience.unsubscribe(rank)
        self._on_change()

    def _on_announcement(self, frames: list[bytes]) -> None:
        rank = _number(frames[0])
        if rank is not None:
            log.info("bridge.rank_started", rank=rank)
            self._audience.announce(rank)
            if rank in self._ranks and rank not in self._note.heard:
                self._note.heard.append(rank)
                write_note(self._path, self._note)
            self._on_change()

    def _say(self, event: str, **facts: object) -> None:
        """Once, until something else is to be said."""
        told = f"{event} {facts}"
        if told != self._said:
            self._said = told
            (log.warning if "remedy" in facts else log.info)(event, **facts)


def _number(text: bytes) -> int | None:
    return int(text) if text.isdigit() and len(text) < 8 else None


def _read_note(path: Path, run: str) -> Note:
    """What an earlier process noted, if it was of the same run."""
    try:
        note = msgspec.json.decode(path.read_bytes(), type=Note)
    except FileNotFoundError:
        return Note(run)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}): what the trainer has is not known; stop the trainer, delete the file, start both again"
        ) from error
    return note if note.run == run else Note(run)


def write_note(path: Path, note: msgspec.Struct) -> None:
    """Whole or not at all, also where the machine fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(msgspec.json.encode(note))
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
