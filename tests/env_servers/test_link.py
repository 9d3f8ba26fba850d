"""The link to one server, against a scripted server on a real socket: every way a request can end."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
import structlog.testing
import zmq

from envs import wire
from envs.drained import DrainedSocket
from envs.rollout import Rollout
from orchestrator.env_servers.link import Link, LinkState
from orchestrator.env_servers.requests import Answer, RolloutRequest
from tests.envs.test_wire import rollout

HELLO = wire.Hello(wire.PROTOCOL, "me", "e", "m", {})
READY = wire.Ready("e", {"train": 10}, False, 4)


class ScriptedServer:
    """A ROUTER that remembers what it hears and says what a test tells it to."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        socket = context.socket(zmq.ROUTER)
        socket.bind(address)
        self._socket = DrainedSocket(socket, self._on_frames, loop=asyncio.get_running_loop())
        self.heard: list[wire.ToServer] = []
        self.route = b""
        self.obliging = True
        self._changed = asyncio.Event()

    def _on_frames(self, frames: list[bytes]) -> None:
        self.route = frames[0]
        message = wire.decode_to_server(frames[1:])
        self.heard.append(message)
        self._changed.set()
        if self.obliging and isinstance(message, wire.Hello):
            self.say(wire.Welcome(wire.PROTOCOL, "e", 1, "here"))
            self.say(READY)

    def say(self, message: wire.ToClient) -> None:
        self.say_frames([wire.encode(message)])

    def say_frames(self, frames: list[bytes]) -> None:
        self._socket.send([self.route, *frames])

    def finish(self, run_id: int, count: int = 1) -> None:
        self.say_frames(wire.encode_result(run_id, [rollout(3) for _ in range(count)]))

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]

    async def hears(self, kind: type[Any], count: int = 1) -> list[Any]:
        while len(self.of(kind)) < count:
            self._changed.clear()
            await self._changed.wait()
        return self.of(kind)

    def close(self) -> None:
        self._socket.close()


class Listener:
    """Remembers what it is told; every kind of event can be waited for."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []
        self._changed = asyncio.Event()

    def on_ready(self, link: Link, ready: wire.Ready) -> None:
        self._note("ready", ready)

    def on_refused(self, link: Link, reason: str) -> None:
        self._note("refused", reason)

    def on_lost(self, link: Link, reason: str) -> None:
        self._note("lost", reason)

    def on_credit(self, link: Link, *, told: bool) -> None:
        self._note("credit", told)

    def _note(self, kind: str, what: Any) -> None:
        self.events.append((kind, what))
        self._changed.set()

    async def hears(self, kind: str) -> Any:
        while True:
            for name, what in self.events:
                if name == kind:
                    return what
            self._changed.clear()
            await self._changed.wait()


class Ends:
    """How requests ended; raises nothing, loses nothing."""

    def __init__(self) -> None:
        self.all: list[tuple[RolloutRequest, Answer]] = []
        self._changed = asyncio.Event()

    def __call__(self, request: RolloutRequest, outcome: Answer) -> None:
        self.all.append((request, outcome))
        self._changed.set()

    async def count(self, wanted: int) -> list[Answer]:
        while len(self.all) < wanted:
            self._changed.clear()
            await self._changed.wait()
        assert len(self.all) == wanted
        return [outcome for _, outcome in self.all]


class Pair:
    """A link and the server at its other end."""

    def __init__(self, link: Link, server: ScriptedServer, listener: Listener) -> None:
        self.link = link
        self.server = server
        self.listener = listener
        self.ends = Ends()

    @property
    def free(self) -> int:
        return self.link.capacity - self.link.inflight

    def submit(self, *requests: RolloutRequest) -> None:
        for request in requests:
            self.link.reserve(request.count)
            self.link.submit(request, self.ends)


@asynccontextmanager
async def connected(*, obliging: bool = True, **options: Any) -> AsyncIterator[Pair]:
    with TemporaryDirectory(prefix="link-") as directory:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        address = f"ipc://{directory}/s"
        server = ScriptedServer(context, address)
        server.obliging = obliging
        listener = Listener()
        defaults: dict[str, Any] = {
            "hello": HELLO,
            "keys": None,
            "ping_interval_s": 0.05,
            "silence_timeout_s": 60.0,
            "waiting": (),
        }
        link = Link(
            env="e",
            server="e-0",
            address=address,
            listener=listener,
            context=context,
            **(defaults | options),
        )
        try:
            if obliging:
                await listener.hears("ready")
            yield Pair(link, server, listener)
        finally:
            link.close()
            server.close()
            context.term()


def request(index: int = 0, **fields: Any) -> RolloutRequest:
    return RolloutRequest("train", index, "http://x/v1", **fields)


async def test_alive_is_not_ready() -> None:
    """A server that has only said welcome takes no requests; its declaration makes it ready."""
    async with connected(obliging=False) as pair:
        await pair.server.hears(wire.Hello)
        pair.server.say(wire.Welcome(wire.PROTOCOL, "e", 1, "here"))
        await pair.server.hears(wire.Ping)
        assert (pair.link.state, pair.link.capacity, pair.link.has_room(1)) == (LinkState.ALIVE, 0, False)
        pair.server.say(READY)
        assert await pair.listener.hears("ready") == READY
        assert (pair.link.state, pair.free) == (LinkState.READY, 4)


async def test_hello_is_repeated_until_it_is_answered() -> None:
    """A server that was not listening yet misses nothing."""
    async with connected(obliging=False) as pair:
        await pair.server.hears(wire.Hello, 3)


async def test_answers_find_their_requests_in_any_order() -> None:
    """Ids match them, not the order."""
    async with connected() as pair:
        requests = [request(index) for index in range(3)]
        pair.submit(*requests)
        runs = await pair.server.hears(wire.Request, 3)
        assert [run.index for run in runs] == [0, 1, 2]
        for place in (2, 0, 1):
            pair.server.finish(runs[place].id)
        await pair.ends.count(3)
        assert [request.index for request, _ in pair.ends.all] == [2, 0, 1]
        assert all(isinstance(outcome, wire.Result) for _, outcome in pair.ends.all)


async def test_room_follows_what_is_in_flight() -> None:
    """A group costs its count, and one that is larger than the server gets an idle server to itself."""
    async with connected() as pair:
        assert pair.link.has_room(9)
        pair.submit(request(group=True, count=3))
        assert (pair.link.inflight, pair.free) == (3, 1)
        assert pair.link.has_room(1)
        assert not pair.link.has_room(2)
        [run] = await pair.server.hears(wire.Request)
        assert (run.kind, run.count) == ("group", 3)
        pair.server.finish(run.id, 3)
        await pair.ends.count(1)
        assert pair.free == 4


async def test_a_failure_arrives_with_everything_it_says() -> None:
    """Kind, message, whether to retry, and the traceback."""
    async with connected() as pair:
        pair.submit(request())
        [run] = await pair.server.hears(wire.Request)
        pair.server.say(wire.Failure(run.id, "error", "ValueError: no", True, "Traceback"))
        [end] = await pair.ends.count(1)
        assert end == wire.Failure(run.id, "error", "ValueError: no", True, "Traceback")
        assert not end.lost


async def test_malformed_frames_are_counted_and_dropped() -> None:
    """Garbage, half a message and an answer to nobody change nothing but the counts."""
    async with connected() as pair:
        pair.submit(request())
        [run] = await pair.server.hears(wire.Request)
        for frames in ([b"\xc1garbage"], [b""], [wire.encode(wire.Drained()), b"more"]):
            pair.server.say_frames(frames)
        pair.server.finish(10_000)
        pair.server.finish(run.id)
        pair.server.finish(run.id)
        [end] = await pair.ends.count(1)
        assert isinstance(end, wire.Result)
        await pair.server.hears(wire.Ping, 2)
        assert (pair.link.counts.malformed, pair.link.state) == (3, LinkState.READY)
        assert pair.link.counts.unexpected == 2


async def test_a_malformed_answer_fails_the_request_it_was_meant_for() -> None:
    """Nobody waits for an answer that came and could not be read."""
    async with connected() as pair:
        pair.submit(request(), request())
        runs = await pair.server.hears(wire.Request, 2)
        frames = wire.encode_result(runs[0].id, [rollout(3)])
        pair.server.say_frames([frames[0], frames[1][:-1], *frames[2:]])
        pair.server.finish(runs[1].id, count=2)
        ends = await pair.ends.count(2)
        for end in ends:
            assert isinstance(end, wire.Failure)
            assert (end.kind, end.retryable, end.lost) == ("malformed_result", False, False)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(wire.encode(wire.Welcome(7, "e", 1, "here")), id="understood"),
        pytest.param(
            msgspec.msgpack.encode({"type": "welcome", "protocol": 7, "new": 1}), id="not understood"
        ),
        pytest.param(wire.encode(wire.Refused(7, "e-0 speaks protocol 7, we speak 1")), id="refused by it"),
    ],
)
async def test_a_server_of_another_protocol_is_refused_with_both_named(answer: bytes) -> None:
    """Whether or not its handshake can be decoded."""
    async with connected(obliging=False) as pair:
        await pair.server.hears(wire.Hello)
        pair.server.say_frames([answer])
        reason = await pair.listener.hears("refused")
        assert "speaks protocol 7, we speak 1" in reason
        assert pair.link.state is LinkState.CLOSED


@pytest.mark.parametrize("answer", [wire.Refused(7, "go away"), wire.Welcome(7, "e", 1, "here")])
async def test_a_ready_server_that_refuses_is_lost(answer: wire.Refused | wire.Welcome) -> None:
    """Its requests are asked again elsewhere: they did nothing wrong."""
    async with connected() as pair:
        pair.submit(request(0))
        await pair.server.hears(wire.Request)
        pair.server.say_frames([wire.encode(answer)])
        (end,) = await pair.ends.count(1)
        assert isinstance(end, wire.Failure)
        assert (end.kind, end.retryable, end.lost) == ("server_lost", True, True)
        assert "refused us" in await pair.listener.hears("lost")


async def test_a_closed_connection_fails_everything_at_once() -> None:
    """Requests do not wait for silence to be noticed."""
    async with connected() as pair:
        requests = [request(index) for index in range(4)]
        pair.submit(*requests)
        await pair.server.hears(wire.Request, 4)
        pair.server.close()
        ends = await pair.ends.count(4)
        for end in ends:
            assert isinstance(end, wire.Failure)
            assert (end.kind, end.retryable, end.lost, end.inflight) == ("server_lost", True, True, 4)
        assert "closed" in await pair.listener.hears("lost")
        assert not pair.link.has_room(1)


async def test_reserved_room_is_taken_before_the_request_is_there() -> None:
    """Whoever plans next counts with what is left, and room that is given back can be planned with again."""
    async with connected() as pair:
        pair.link.reserve(3)
        assert (pair.free, pair.link.has_room(1), pair.link.has_room(2)) == (1, True, False)
        pair.link.release(3)
        assert (pair.free, pair.link.has_room(4)) == (4, True)


async def test_a_request_for_a_server_that_was_lost_meanwhile_fails_later_and_once() -> None:
    """Room was reserved, the server went away, the request came: it never ran, so it cannot be to blame."""
    async with connected() as pair:
        pair.link.reserve(2)
        pair.server.close()
        await pair.listener.hears("lost")
        unwanted = request()
        pair.link.submit(request(), pair.ends)
        pair.link.submit(unwanted, pair.ends)
        assert pair.ends.all == []
        assert pair.link.cancel(unwanted)
        [end] = await pair.ends.count(1)
        assert isinstance(end, wire.Failure)
        assert (end.kind, end.retryable, end.inflight) == ("server_lost", True, 0)
        pair.link.release(1)
        assert (pair.link.inflight, pair.link.has_room(1)) == (0, False)


async def test_a_request_for_a_link_that_was_closed_meanwhile_fails_later_and_once() -> None:
    """The same where it was we who left."""
    async with connected() as pair:
        pair.link.reserve(1)
        pair.link.close()
        pair.link.submit(request(), pair.ends)
        [end] = await pair.ends.count(1)
        assert isinstance(end, wire.Failure)
        assert (end.kind, end.lost) == ("closed", False)


async def test_cancelled_requests_count_among_what_a_lost_server_had_in_flight() -> None:
    """It may have been one of them that ended it."""
    async with connected() as pair:
        unwanted = request()
        pair.submit(unwanted, request())
        await pair.server.hears(wire.Request, 2)
        pair.link.cancel(unwanted)
        pair.server.close()
        [end] = await pair.ends.count(1)
        assert isinstance(end, wire.Failure)
        assert (end.lost, end.inflight) == (True, 2)


async def test_a_server_cannot_say_that_it_is_lost() -> None:
    """A failure of that kind would be retried without end, and only we can know."""
    async with connected() as pair:
        pair.submit(request())
        [run] = await pair.server.hears(wire.Request)
        pair.server.say(wire.Failure(run.id, wire.SERVER_LOST, "I am gone", True, inflight=9))
        [end] = await pair.ends.count(1)
        assert isinstance(end, wire.Failure)
        assert (end.kind, end.lost, end.inflight) == ("error", False, 0)


async def test_a_result_that_cannot_be_trained_on_is_an_invalid_rollout_and_the_link_goes_on() -> None:
    """One bad answer fails its own request and nothing else."""
    async with connected() as pair:
        pair.submit(request(), request(), request())
        runs = await pair.server.hears(wire.Request, 3)
        frames = wire.encode_result(runs[0].id, [rollout(3)])
        pair.server.say_frames([*frames[:2], b"\1\2\1", *frames[3:]])
        pair.server.say_frames(wire.encode_result(runs[1].id, [Rollout([], 1.0)]))
        pair.server.finish(runs[2].id)
        first, second, third = await pair.ends.count(3)
        for end in (first, second):
            assert isinstance(end, wire.Failure)
            assert (end.kind, end.retryable) == ("invalid_rollout", False)
        assert isinstance(third, wire.Result)
        assert (pair.link.counts.malformed, pair.free) == (2, 4)


async def test_an_evaluation_may_come_without_sequences() -> None:
    """It is not trained on."""
    async with connected(hello=msgspec.structs.replace(HELLO, train=False)) as pair:
        pair.submit(request())
        [run] = await pair.server.hears(wire.Request)
        pair.server.say_frames(wire.encode_result(run.id, [Rollout([], 1.0)]))
        [end] = await pair.ends.count(1)
        assert isinstance(end, wire.Result)


async def test_a_server_of_an_older_protocol_is_spoken_to_in_its_own() -> None:
    """It refuses our newest version and names its own; where that is one that we still speak, hello is said again."""
    newer = max(wire.VERSIONS) + 1
    async with connected(obliging=False, hello=msgspec.structs.replace(HELLO, protocol=newer)) as pair:
        await pair.server.hears(wire.Hello)
        pair.server.obliging = True
        pair.server.say(wire.Refused(1, f"you speak protocol {newer}, this server speaks 1"))
        await pair.listener.hears("ready")
        assert pair.server.of(wire.Hello)[-1].protocol == 1
        pair.submit(request())
        [run] = await pair.server.hears(wire.Request)
        pair.server.finish(run.id)
        [end] = await pair.ends.count(1)
        assert isinstance(end, wire.Result)


async def test_silence_is_noticed_warned_of_and_ends_the_link() -> None:
    """A server whose connection stands but that says nothing is frozen first, then lost."""
    with structlog.testing.capture_logs() as events:
        async with connected(ping_interval_s=0.02, silence_timeout_s=0.2) as pair:
            pair.submit(request())
            [end] = await pair.ends.count(1)
            assert isinstance(end, wire.Failure)
            assert end.lost
            assert "nothing heard" in await pair.listener.hears("lost")
    assert [event["server"] for event in events if event["event"] == "env.frozen"] == ["e-0"]


async def test_a_server_that_answers_pings_is_not_lost() -> None:
    """Any message counts as life."""
    async with connected(ping_interval_s=0.02, silence_timeout_s=1.0) as pair:
        for seen in range(1, 75):
            pings = await pair.server.hears(wire.Ping, seen)
            pair.server.say(wire.Pong(pings[-1].sent, wire.ServerStats(0, 5, 1, 0, 0.01, 1000)))
        assert pair.link.state is LinkState.READY
        assert pair.link.stats is not None
        assert pair.link.stats.done == 5
        assert pair.link.round_trip_s is not None


async def test_a_stall_of_our_own_does_not_look_like_silence() -> None:
    """Silence is counted in ticks: one late tick is one tick."""
    async with connected(ping_interval_s=0.02, silence_timeout_s=0.2) as pair:
        pair.link._timer.cancel()
        pair.link._pulse.heard = True
        for _ in range(3):
            pair.link._tick()
        assert pair.link.state is LinkState.READY


async def test_an_expired_lease_ends_what_was_in_flight() -> None:
    """The server has cancelled it already, so waiting would be for ever."""
    async with connected() as pair:
        pair.submit(request())
        await pair.server.hears(wire.Request)
        pair.server.say(wire.Expired())
        [end] = await pair.ends.count(1)
        assert isinstance(end, wire.Failure)
        assert end.lost
        assert "lease" in await pair.listener.hears("lost")


async def test_a_cancelled_request_ends_silently_and_its_room_comes_back_with_the_answer() -> None:
    """Until the server has stopped the run it still costs the server's capacity."""
    async with connected() as pair:
        unwanted = request()
        pair.submit(unwanted)
        [run] = await pair.server.hears(wire.Request)
        assert pair.link.cancel(unwanted)
        assert not pair.link.cancel(unwanted)
        [cancel] = await pair.server.hears(wire.Cancel)
        assert cancel.id == run.id
        assert pair.free == 3
        pair.server.say(wire.Failure(run.id, "cancelled", "", False))
        assert await pair.listener.hears("credit") is False
        assert pair.free == 4
        assert pair.ends.all == []


async def test_closing_says_goodbye_and_ends_what_is_in_flight() -> None:
    """The server learns at once that nobody wants the results."""
    async with connected() as pair:
        pair.submit(request())
        await pair.server.hears(wire.Request)
        pair.link.close()
        await pair.server.hears(wire.Bye)
        [end] = await pair.ends.count(1)
        assert isinstance(end, wire.Failure)
        assert (end.kind, end.lost) == ("closed", False)


async def test_a_caller_that_raises_does_not_keep_others_from_ending() -> None:
    """Its bug is reported to the loop; the link goes on."""
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))

    def broken(request: RolloutRequest, outcome: Answer) -> None:
        raise ZeroDivisionError("a bug")

    async with connected() as pair:
        pair.link.reserve(1)
        pair.link.submit(request(), broken)
        pair.submit(request(), request())
        runs = await pair.server.hears(wire.Request, 3)
        pair.server.finish(runs[0].id)
        pair.server.finish(runs[1].id)
        await pair.ends.count(1)
        pair.server.close()
        await pair.ends.count(2)
    assert [type(context["exception"]) for context in errors] == [ZeroDivisionError]


async def test_draining_waits_for_the_servers_word() -> None:
    """And ends, too, when the server goes away instead."""
    async with connected() as pair, asyncio.TaskGroup() as group:
        draining = group.create_task(pair.link.drain())
        await pair.server.hears(wire.Drain)
        assert not draining.done()
        pair.server.say(wire.Drained())
        await draining
    async with connected() as pair, asyncio.TaskGroup() as group:
        draining = group.create_task(pair.link.drain())
        await pair.server.hears(wire.Drain)
        pair.server.close()
        await draining


@asynccontextmanager
async def socket_pair(
    on_message: Callable[[list[bytes]], None], *, per_turn: int
) -> AsyncIterator[tuple[DrainedSocket, zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with TemporaryDirectory(prefix="link-") as directory:
        address = f"ipc://{Path(directory) / 's'}"
        other, ours = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        for socket in (other, ours):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
        other.bind(address)
        ours.connect(address)
        drained = DrainedSocket(ours, on_message, loop=asyncio.get_running_loop(), per_turn=per_turn)
        try:
            yield drained, other
        finally:
            drained.close()
            other.close(linger=0)
            context.term()


@pytest.mark.parametrize("per_turn", [1, 3, 64])
async def test_no_message_is_left_behind_an_edge(per_turn: int) -> None:
    """Sends empty the mailbox behind the descriptor's back; every message arrives nevertheless, and in order."""
    received: list[int] = []
    finished = asyncio.Event()
    total = 2000

    def on_message(frames: list[bytes]) -> None:
        received.append(int(frames[0]))
        drained.send([b"thanks"])
        if len(received) == total:
            finished.set()

    async with socket_pair(on_message, per_turn=per_turn) as (drained, other):
        for number in range(total):
            other.send(b"%d" % number)
            if number % 7 == 0:
                drained.send([b"by the way"])
            if number % 50 == 0:
                await asyncio.sleep(0)
        await finished.wait()
    assert received == list(range(total))


async def test_other_callbacks_get_their_turn_between_messages() -> None:
    """A flood is handled in bounded portions."""
    portions: list[int] = []
    finished = asyncio.Event()
    count = 0

    def on_message(frames: list[bytes]) -> None:
        nonlocal count
        count += 1
        if count == 200:
            finished.set()

    def look() -> None:
        portions.append(count)
        if count < 200:
            asyncio.get_running_loop().call_soon(look)

    async with socket_pair(on_message, per_turn=10) as (_, other):
        for number in range(200):
            other.send(b"%d" % number)
        look()
        await finished.wait()
    # Twice a turn's worth at most between two looks: one on the descriptor, one by the scheduled look.
    assert max(after - before for before, after in itertools.pairwise(portions)) <= 20


async def test_a_callback_that_raises_strands_nothing_behind_it() -> None:
    """The next messages do not wait for another edge."""
    received: list[bytes] = []
    finished = asyncio.Event()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)

    def on_message(frames: list[bytes]) -> None:
        received.append(frames[0])
        if frames[0] == b"last":
            finished.set()
        if frames[0] == b"bad":
            raise ZeroDivisionError

    async with socket_pair(on_message, per_turn=64) as (_, other):
        for message in (b"good", b"bad", b"bad", b"last"):
            other.send(message)
        await finished.wait()
    assert received == [b"good", b"bad", b"bad", b"last"]


async def test_a_server_that_cannot_be_told_which_model_to_ask_for_gets_no_such_request() -> None:
    """One of an older release would ask for another, and nobody would notice."""
    async with connected(obliging=False) as pair:
        await pair.server.hears(wire.Hello)
        pair.server.say(wire.Welcome(wire.PROTOCOL, "e", 1, "here"))
        pair.server.say(READY)
        await pair.listener.hears("ready")
        pair.submit(request(model="tiny-v3-01234567"))
        [failure] = await pair.ends.count(1)
        assert isinstance(failure, wire.Failure)
        assert (failure.kind, failure.retryable) == ("not_accepted", False)
        assert 'too old to be told to ask for "tiny-v3-01234567"' in failure.message
        assert (pair.free, pair.server.of(wire.Request)) == (4, [])


async def test_a_request_may_name_the_model_that_is_to_be_asked_for() -> None:
    """Where versions of the policy are adapters, each has a name of its own."""
    async with connected(obliging=False) as pair:
        await pair.server.hears(wire.Hello)
        pair.server.say(wire.Welcome(wire.PROTOCOL, "e", 1, "here"))
        pair.server.say(msgspec.structs.replace(READY, models=True))
        await pair.listener.hears("ready")
        pair.submit(request(model="tiny-v3-01234567"))
        [asked] = await pair.server.hears(wire.Request)
        assert asked.model == "tiny-v3-01234567"
