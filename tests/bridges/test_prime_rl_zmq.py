"""Batches over prime-rl's ZMQ transport, with ranks that connect, announce themselves and receive as its trainer does."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import pytest
import zmq
import zmq.asyncio
from structlog.testing import capture_logs

from orchestrator.bridges.prime_rl import Exchange, run_bridge
from orchestrator.bridges.prime_rl_zmq import Audience, Publisher
from orchestrator.errors import ConfigError
from orchestrator.trainer import AsyncTrainerClient
from orchestrator.trainer_link.server import BatchServer
from tests.bridges.test_prime_rl import POLL_S, broadcast
from tests.support.journal_groups import make_batch
from tests.support.ports import free_ports
from tests.support.trainer_links import make_server
from tests.support.waiting import until

RANKS = 2


class RankProcess:
    """What a rank does: subscribe, say its number once, count what comes. Leaving it is its death."""

    def __init__(self, port: int, rank: int) -> None:
        self.received: list[bytes] = []
        self._context = zmq.asyncio.Context()
        self._data = self._context.socket(zmq.SUB)
        self._data.setsockopt(zmq.RCVHWM, 10)
        self._data.connect(f"tcp://127.0.0.1:{port}")
        self._data.setsockopt(zmq.SUBSCRIBE, b"data_rank|%d|" % rank)
        self._ready = self._context.socket(zmq.PUSH)
        self._ready.connect(f"tcp://127.0.0.1:{port + 1}")
        self._rank = rank
        self._task = asyncio.create_task(self._run())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._task.cancel()
        self._context.destroy(linger=0)

    async def _run(self) -> None:
        await self._ready.send(str(self._rank).encode())
        while True:
            topic, payload = await self._data.recv_multipart()
            assert topic == b"data_rank|%d|" % self._rank
            self.received.append(payload)


class Ranks:
    """All ranks of a trainer; `counted` is what each of them has got."""

    def __init__(self, port: int, ranks: Sequence[int] = range(RANKS)) -> None:
        self._port = port
        self._stack = ExitStack()
        self._processes: list[RankProcess] = []
        for rank in ranks:
            self.join(rank)

    def join(self, rank: int) -> None:
        self._processes.append(self._stack.enter_context(RankProcess(self._port, rank)))

    def counted(self) -> list[list[bytes]]:
        return [process.received for process in self._processes]

    def have(self, count: int) -> Callable[[], bool]:
        return lambda: all(len(received) == count for received in self.counted())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@asynccontextmanager
async def bridge(server: BatchServer, out: Path, port: int) -> AsyncIterator["asyncio.Task[None]"]:
    """A bridge that is killed when the block is left: it says and does nothing more."""
    exchange = Exchange(out, ranks=RANKS, max_tokens=64)
    client = AsyncTrainerClient(server.address, auto_ack=False)
    task = asyncio.create_task(run_bridge(client, exchange, listen=("127.0.0.1", port), poll_s=POLL_S))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


def expected(tmp_path: Path, steps: Sequence[int]) -> list[list[bytes]]:
    """What each rank gets for some steps, in order."""
    exchange = Exchange(tmp_path, ranks=RANKS, max_tokens=64)
    shares = [exchange.share_out(_as_served(step)) for step in steps]
    return [[share[rank] for share in shares] for rank in range(RANKS)]


def _as_served(step: int) -> Any:
    from orchestrator.trainer.batch import decode_batch
    from orchestrator.trainer_link.encoding import encode_batch

    return decode_batch([bytearray(frame) for frame in encode_batch(make_batch(step), 0, 1)])


async def test_nothing_is_sent_before_every_rank_listens(tmp_path: Path) -> None:
    """A rank that joins late gets every batch, in order; each is acknowledged when its weights are there."""
    acked: list[int] = []
    out, port = tmp_path / "out", free_ports(2)
    async with make_server(bind=f"ipc://{tmp_path}/s", world_size=1, on_ack=acked.append) as server:
        for step in (1, 2, 3):
            server.offer(make_batch(step))
        server.finish("max_steps")
        broadcast(out, 0)
        with capture_logs() as said, Ranks(port, [0]) as ranks:
            async with bridge(server, out, port) as task:
                await until(lambda: {"ranks": [1]}.items() <= _last(said, "bridge.waiting_for_ranks").items())
                assert ranks.counted() == [[]]
                ranks.join(1)
                await until(ranks.have(2))
                assert acked == []
                broadcast(out, 1)
                await until(ranks.have(3))
                assert acked == [1]
                broadcast(out, 2)
                broadcast(out, 3)
                await task
            assert acked == [1, 2, 3]
            assert ranks.counted() == expected(tmp_path, (1, 2, 3))
            assert msgspec.msgpack.decode(ranks.counted()[0][0])


async def test_a_killed_bridge_sends_nothing_twice_to_the_same_trainer(tmp_path: Path) -> None:
    """Killed between sending and acknowledging: the ranks reconnect without a word, and get the step behind what they have."""
    acked: list[int] = []
    out, port = tmp_path / "out", free_ports(2)
    async with make_server(bind=f"ipc://{tmp_path}/s", world_size=1, on_ack=acked.append) as server:
        for step in (1, 2, 3, 4):
            server.offer(make_batch(step))
        broadcast(out, 0)
        with Ranks(port) as ranks:
            async with bridge(server, out, port):
                await until(ranks.have(2))
            assert acked == []
            with capture_logs() as said:
                async with bridge(server, out, port):
                    # Whether they arrived is not known here, so it is told, and waited for what comes of them.
                    await until(lambda: _last(said, "bridge.maybe_lost").get("step") == 2)
                    broadcast(out, 1)
                    await until(lambda: acked == [1])
                    assert ranks.have(2)()
                    broadcast(out, 2)
                    await until(ranks.have(4))
            assert ranks.counted() == expected(tmp_path, (1, 2, 3, 4))
            # Killed with nothing under way: nobody has to wait.
            broadcast(out, 3)
            broadcast(out, 4)
            async with bridge(server, out, port):
                await until(lambda: acked == [1, 2, 3, 4])
                server.offer(make_batch(5))
                await until(ranks.have(5))


async def test_nothing_is_sent_to_a_rank_that_was_never_heard_of(tmp_path: Path) -> None:
    """It listens, and its word that it has started is on its way: the next bridge would take it for a process that has nothing."""
    port, note = free_ports(2), tmp_path / "note"

    def open_publisher() -> Publisher:
        publisher = Publisher("127.0.0.1", port, ranks=1, run="r", note=note, on_change=lambda: None)
        publisher.hold(1, [b"share"])
        return publisher

    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as data, context.socket(zmq.PUSH) as ready:
        data.setsockopt(zmq.SUBSCRIBE, b"data_rank|0|")
        data.connect(f"tcp://127.0.0.1:{port}")
        received = asyncio.ensure_future(data.recv_multipart())
        publisher = open_publisher()
        await until(lambda: not publisher._audience.absent)
        with capture_logs() as said:
            publisher.look(0)
        assert _last(said, "bridge.waiting_for_word")["ranks"] == [0]
        assert not note.exists(), "it was sent"
        ready.setsockopt(zmq.LINGER, 0)
        ready.connect(f"tcp://127.0.0.1:{port + 1}")
        await ready.send(b"0")
        await until(
            lambda: msgspec.json.decode(note.read_bytes())["heard"] == [0] if note.exists() else False
        )
        await publisher.aclose()
        # It says nothing to the next one, which knows of it.
        publisher = open_publisher()
        await until(lambda: not publisher._audience.absent)
        publisher.look(0)
        assert await received == [b"data_rank|0|", b"share"]
        await publisher.aclose()


async def test_a_trainer_that_is_started_anew_gets_again_what_it_was_not_done_with(tmp_path: Path) -> None:
    """Also where it starts while no bridge is there; the bytes are the same."""
    out, port = tmp_path / "out", free_ports(2)
    async with make_server(bind=f"ipc://{tmp_path}/s", world_size=1) as server:
        for step in (1, 2, 3):
            server.offer(make_batch(step))
        broadcast(out, 0)
        async with bridge(server, out, port):
            with Ranks(port) as ranks:
                await until(ranks.have(2))
                broadcast(out, 1)
                await until(ranks.have(3))
            with Ranks(port) as ranks:
                await until(ranks.have(2))
                assert ranks.counted() == expected(tmp_path, (2, 3))
        with Ranks(port) as ranks:
            async with bridge(server, out, port):
                await until(ranks.have(2))
                assert ranks.counted() == expected(tmp_path, (2, 3))


async def test_a_trainer_that_was_set_back_is_fed_from_there(tmp_path: Path) -> None:
    """Its launcher has deleted later broadcasts; the bridge goes on without a restart, with what the orchestrator keeps."""
    acked: list[int] = []
    out, port = tmp_path / "out", free_ports(2)
    async with make_server(bind=f"ipc://{tmp_path}/s", world_size=1, keep=4, on_ack=acked.append) as server:
        for step in (1, 2, 3, 4):
            server.offer(make_batch(step))
        broadcast(out, 0)
        async with bridge(server, out, port):
            with Ranks(port) as ranks:
                for step in (1, 2, 3):
                    await until(ranks.have(step + 1))
                    broadcast(out, step)
                await until(lambda: acked == [1, 2, 3])
            for step in (2, 3):
                (out / "broadcasts" / f"step_{step}" / "STABLE").unlink()
                (out / "broadcasts" / f"step_{step}").rmdir()
            with Ranks(port) as ranks:
                await until(ranks.have(2))
                assert ranks.counted() == expected(tmp_path, (2, 3))
                broadcast(out, 2)
                await until(ranks.have(3))
                broadcast(out, 3)
                broadcast(out, 4)
                await until(lambda: acked == [1, 2, 3, 4])
            assert ranks.counted() == expected(tmp_path, (2, 3, 4))


async def test_what_cannot_be_known_is_refused(tmp_path: Path) -> None:
    """A note that cannot be read, and a port that is taken, end the bridge before anything is sent."""
    out, port = tmp_path / "out", free_ports(2)
    broadcast(out, 0)
    note = out / "orchestrator_bridge.json"
    async with make_server(bind=f"ipc://{tmp_path}/s", world_size=1) as server:
        note.write_text("{", encoding="utf-8")
        async with bridge(server, out, port) as task:
            with pytest.raises(ConfigError, match="what the trainer has is not known"):
                await task
        note.unlink()
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", port + 1))
            taken.listen()
            async with bridge(server, out, port) as task:
                with pytest.raises(ConfigError, match=rf"cannot listen at tcp://127.0.0.1:{port + 1}"):
                    await task


def _last(said: Sequence[Any], event: str) -> dict[str, Any]:
    return next((dict(entry) for entry in reversed(said) if entry["event"] == event), {})


# --- who listens --------------------------------------------------------------------------------------------------


def hear(audience: Audience, *events: str) -> Audience:
    """`+0` a subscription of rank 0, `-0` its end, `!0` its announcement, `>` something was sent."""
    for event in events:
        match event[0], event[1:]:
            case "+", rank:
                audience.subscribe(int(rank))
            case "-", rank:
                audience.unsubscribe(int(rank))
            case "!", rank:
                audience.announce(int(rank))
            case _:
                audience.sent()
    return audience


@pytest.mark.parametrize(
    ("events", "absent", "is_new", "reconnected"),
    [
        ([], [0, 1], False, []),
        (["+0", "+1"], [], False, [0, 1]),
        (["+0", "!0", "+1"], [1], False, [0, 1]),
        (["+0", "!0", "+1", "!1"], [], True, [0, 1]),
        (["!0", "!1", "+0", "+1"], [], True, [0, 1]),
        (["+0", "!0", "!1", "+1", ">"], [], False, []),
        # The announcement comes after what was sent: whoever listened has it.
        (["+0", "+1", ">", "!0", "!1"], [], False, []),
        # A connection broke and came back.
        (["+0", "!0", "+1", "!1", ">", "-1"], [1], False, []),
        (["+0", "!0", "+1", "!1", ">", "-1", "+1"], [], False, [1]),
        # One rank has started anew, then the other; either order of what is heard.
        (["+0", "!0", "+1", "!1", ">", "-0", "-1", "+0", "!0", "+1"], [1], False, [0, 1]),
        (["+0", "!0", "+1", "!1", ">", "-0", "-1", "+0", "!0", "!1", "+1"], [], True, [0, 1]),
        # Its announcement comes before its end is noticed.
        (["+0", "!0", "+1", "!1", ">", "!0", "!1"], [0, 1], False, []),
        (["+0", "!0", "+1", "!1", ">", "!0", "!1", "+0", "+1"], [], True, [0, 1]),
        # Nobody asked for a third.
        (["+0", "+1", "+2", "!2"], [], False, [0, 1]),
    ],
)
def test_it_is_known_who_listens_and_who_is_new(
    events: list[str], absent: list[int], is_new: bool, reconnected: list[int]
) -> None:
    """Whatever is heard first: a subscription, or a number."""
    audience = hear(Audience(RANKS), *events)
    assert (audience.absent, audience.is_new, audience.reconnected) == (absent, is_new, reconnected)
