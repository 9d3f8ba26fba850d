"""The connection to one env server: handshake, requests matched to answers by id, heartbeat, loss.

A link lives once: connecting, alive (the server speaks our protocol), ready (its environment is loaded), and
then closed by us or lost. Room is counted as taken when it is reserved, before the request is there. Every
submitted request ends exactly once: by its answer, by `cancel`, or, when the link is lost for whatever reason
(process gone, connection closed, silence, lease expired), at once with a failure that says so. Nothing is awaited and no future or task is made per message: callbacks only, on the
loop's thread. Restarting and reconnecting is the supervisor's affair.
"""

import asyncio
import itertools
import sys
import time
from collections.abc import Sized
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgspec
import structlog
import zmq

from envs import wire
from envs.curve import ClientKeys, secure_client
from envs.drained import DrainedSocket
from orchestrator.env_servers.requests import Answer, OnDone, RolloutRequest

log = structlog.get_logger()

_SEND_HIGH_WATER = 10_000
_MESSAGE_LENGTH = 1000
_DETAIL_LENGTH = 8000
_WHERE_LENGTH = 300
_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 2000


class LinkState(StrEnum):
    """Where a link is in its life."""

    CONNECTING = "connecting"
    ALIVE = "alive"
    READY = "ready"
    LOST = "lost"
    CLOSED = "closed"


class LinkListener(Protocol):
    """Who is told what happens to a link. Called on the loop's thread, never from within `submit`."""

    def on_ready(self, link: "Link", ready: wire.Ready) -> None: ...

    def on_refused(self, link: "Link", reason: str) -> None: ...

    def on_lost(self, link: "Link", reason: str) -> None: ...

    def on_credit(self, link: "Link", *, told: bool) -> None:
        """Room came back; `told` when the `on_done` of a request has just been called for it.

        Then this is called only if somebody waits for room.
        """


@dataclass(slots=True)
class LinkCounts:
    """What went wrong on a link, counted."""

    malformed: int = 0
    unexpected: int = 0


class Link:
    """One server, from `Link(...)` to `close`."""

    def __init__(
        self,
        *,
        env: str,
        server: str,
        address: str,
        hello: wire.Hello,
        listener: LinkListener,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: ClientKeys | None,
        ping_interval_s: float,
        silence_timeout_s: float,
        waiting: Sized,
    ) -> None:
        self.env = env
        self.server = server
        self.address = address
        self.state = LinkState.CONNECTING
        self.capacity = 0
        self.inflight = 0
        self.stats: wire.ServerStats | None = None
        self.round_trip_s: float | None = None
        self.counts = LinkCounts()
        self.handshake_error = ""
        self._hello = hello
        self._protocol = wire.PROTOCOL
        self._listener = listener
        self._waiting = waiting
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, tuple[RolloutRequest, OnDone | None]] = {}
        self._ids = itertools.count()
        self._ping_interval_s = ping_interval_s
        self._silent_ticks = max(2, round(silence_timeout_s / ping_interval_s))
        self._quiet_ticks = 0
        self._abandoned = 0
        """Rollouts in flight that were cancelled and that the server has not stopped yet."""
        self._clogged_ticks = 0
        self._heard = False
        self._drained: asyncio.Future[None] | None = None
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.SNDHWM, _SEND_HIGH_WATER)
        # libzmq ends the process when a peer's ping meets a connection that was reset while its input was stopped. So
        # its input never stops: a server has no more to say than was asked of it, and is read as it comes.
        socket.setsockopt(zmq.RCVHWM, 0)
        # Only to a connection that stands: what is queued for a dead server would reach its successor.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        if address.startswith("tcp:"):
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        socket.setsockopt(zmq.IPV6, int("[" in address))
        if keys is not None:
            secure_client(socket, keys)
        monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_DISCONNECTED
        )
        self._zmq = socket
        self._monitor = DrainedSocket(monitor, self._on_event, loop=self._loop)
        self._socket = DrainedSocket(socket, self._on_frames, loop=self._loop)
        self._timer = self._loop.call_later(ping_interval_s, self._tick)
        socket.connect(address)

    def has_room(self, count: int) -> bool:
        """Whether `count` rollouts can start; a group larger than the server gets it to itself."""
        return self.state is LinkState.READY and (
            self.inflight == 0 or self.inflight + count <= self.capacity
        )

    def reserve(self, count: int) -> None:
        """Take room for a request that is going to be submitted, so that nobody else plans with it."""
        self.inflight += count

    def release(self, count: int) -> None:
        """Give back room that was reserved for a request which is not going to be submitted."""
        if self.state is LinkState.READY:
            self.inflight -= count

    def submit(self, request: RolloutRequest, on_done: OnDone) -> None:
        """Send a request whose room is reserved; `on_done` is called exactly once, later, unless it is cancelled first."""
        request.id = next(self._ids)
        request.link = self
        self._pending[request.id] = (request, on_done)
        if self.state is not LinkState.READY:
            # Lost since the room was reserved.
            self._loop.call_soon(self._end_unsent, request.id)
            return
        message = wire.Request(
            request.id,
            "group" if request.group else "rollout",
            request.split,
            request.index,
            request.base_url,
            request.count,
            request.session,
            request.cache_salt,
            request.timeout_s,
        )
        if not self._send(wire.encode(message)):
            # The connection is gone and its event not here yet. Not from within submit: see LinkListener.
            self._loop.call_soon(self.lose, "the connection is closed")

    def cancel(self, request: RolloutRequest) -> bool:
        """Forget a request: its `on_done` is not called, its room comes back when the server has stopped it."""
        pending = self._pending.get(request.id)
        if pending is None or pending[0] is not request or pending[1] is None:
            return False
        self._pending[request.id] = (request, None)
        self._abandoned += request.count
        self._send(wire.encode(wire.Cancel(request.id)))
        return True

    async def drain(self) -> None:
        """Have the server finish what runs and accept nothing new; returns when nothing runs any more."""
        if self.state is not LinkState.READY:
            return
        if self._drained is None:
            self._drained = self._loop.create_future()
            self._send(wire.encode(wire.Drain()))
        await asyncio.wait([self._drained])

    def lose(self, reason: str) -> None:
        """Give the server up: everything in flight fails now, the listener is told."""
        if self.state in (LinkState.LOST, LinkState.CLOSED):
            return
        self.state = LinkState.LOST
        self._shut()
        self._end_all(wire.SERVER_LOST, reason, inflight=len(self._pending))
        self._listener.on_lost(self, reason)

    def close(self) -> None:
        """Leave: the server is told to cancel what runs, and what is in flight fails."""
        if self.state in (LinkState.LOST, LinkState.CLOSED):
            return
        self._send(wire.encode(wire.Bye()))
        self.state = LinkState.CLOSED
        self._shut(linger_ms=200)
        self._end_all("closed", "the link was closed")

    def _shut(self, *, linger_ms: int = 0) -> None:
        self._timer.cancel()
        self._monitor.close()
        self._zmq.disable_monitor()
        self._socket.close(linger_ms=linger_ms)
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _end_all(self, kind: str, reason: str, *, retryable: bool = True, inflight: int = 0) -> None:
        """Fail what is in flight; nobody has room here any more."""
        pending, self._pending = self._pending, {}
        self.inflight = 0
        for request, on_done in pending.values():
            if on_done is not None:
                self._tell(on_done, request, self._failure(request.id, kind, reason, retryable, inflight))

    def _end_unsent(self, request_id: int) -> None:
        """Fail a request that came too late to be sent."""
        request, on_done = self._pending.pop(request_id)
        if on_done is not None:
            lost = self.state is LinkState.LOST
            reason = "it was lost before the request was sent" if lost else "the link was closed"
            self._tell(
                on_done,
                request,
                self._failure(request_id, wire.SERVER_LOST if lost else "closed", reason, True, 0),
            )

    def _failure(
        self, request_id: int, kind: str, reason: str, retryable: bool, inflight: int = 0
    ) -> wire.Failure:
        message = f"server {self.server}: {reason}"
        return wire.Failure(request_id, kind, message, retryable, inflight=inflight)

    def _tell(self, on_done: OnDone, request: RolloutRequest, answer: Answer) -> None:
        try:
            on_done(request, answer)
        # The caller's code: its bug must not keep other requests from ending, nor the link from closing.
        except Exception as error:  # noqa: BLE001  see above
            message = f"on_done of a request to {self.server} raised"
            self._loop.call_exception_handler({"message": message, "exception": error})

    def _send(self, header: bytes) -> bool:
        if self._socket.closed:
            return False
        try:
            self._socket.send((header,))
        except zmq.Again:
            return False
        return True

    def _on_frames(self, frames: list[bytes]) -> None:
        self._heard = True
        try:
            message = wire.decode_to_client(frames, self._protocol)
        except wire.WireError as error:
            self._on_malformed(error)
            return
        if isinstance(message, wire.Result):
            self._on_result(message)
        elif isinstance(message, wire.Failure):
            self._finish(message.id, _plain(message))
        else:
            self._on_control(message)

    def _on_result(self, result: wire.Result) -> None:
        """Compare a result with what was asked for; the rest of its content was checked when it was decoded."""
        asked = self._pending.get(result.id)
        answer: Answer = result
        if asked is not None and len(result.rollouts) != asked[0].count:
            wrong = f"asked for {asked[0].count} rollouts, got {len(result.rollouts)}"
            answer = self._failure(result.id, "malformed_result", wrong, retryable=False)
        elif self._hello.train and not all(rollout.lengths for rollout in result.rollouts):
            wrong = "a rollout to train on has no sequence"
            answer = self._failure(result.id, "invalid_rollout", wrong, retryable=False)
        self.counts.malformed += answer is not result
        self._finish(result.id, answer)

    def _finish(self, request_id: int, answer: Answer) -> None:
        """Hand an answer to whoever asked."""
        pending = self._pending.pop(request_id, None)
        if pending is None:
            self.counts.unexpected += 1
            return
        request, on_done = pending
        self.inflight -= request.count
        if on_done is None:
            self._abandoned -= request.count
            self._clogged_ticks = 0
            self._listener.on_credit(self, told=False)
            return
        self._tell(on_done, request, answer)
        if self._waiting:
            self._listener.on_credit(self, told=True)

    def _on_malformed(self, error: wire.WireError) -> None:
        self.counts.malformed += 1
        if self.counts.malformed <= 20 or self.counts.malformed % 1000 == 0:
            log.warning(
                "frame.malformed",
                env=self.env,
                server=self.server,
                why=str(error)[:500],
                count=self.counts.malformed,
            )
        if error.protocol is not None and error.protocol not in wire.VERSIONS:
            self._refuse(_other_protocol(self.server, error.protocol))
        elif error.request_id is not None:
            self._finish(
                error.request_id,
                wire.Failure(error.request_id, error.kind, str(error)[:500], retryable=False),
            )

    def _on_control(
        self, message: wire.Welcome | wire.Ready | wire.Refused | wire.Expired | wire.Pong | wire.Drained
    ) -> None:
        if isinstance(message, wire.Pong):
            self.stats = message.stats
            if message.sent:
                self.round_trip_s = time.perf_counter() - message.sent
        elif isinstance(message, wire.Welcome):
            if message.protocol not in wire.VERSIONS:
                self._refuse(_other_protocol(self.server, message.protocol))
            elif self.state is LinkState.CONNECTING:
                self.state = LinkState.ALIVE
                self._protocol = message.protocol
        elif isinstance(message, wire.Ready):
            if self.state in (LinkState.CONNECTING, LinkState.ALIVE):
                self.state = LinkState.READY
                self.capacity = message.capacity
                self._listener.on_ready(self, message)
        elif isinstance(message, wire.Refused):
            if message.protocol < self._hello.protocol and message.protocol in wire.VERSIONS:
                self._hello = msgspec.structs.replace(self._hello, protocol=message.protocol)
                self._send(wire.encode(self._hello))
            else:
                self._refuse(message.reason)
        elif isinstance(message, wire.Expired):
            if self.state is not LinkState.CONNECTING:
                self.lose("it ended our lease, having heard nothing from us for too long")
        elif self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _refuse(self, reason: str) -> None:
        """The server will never do: nothing runs here from now on."""
        if self.state in (LinkState.LOST, LinkState.CLOSED):
            return
        if self.state is LinkState.READY:
            # It did before: what runs there is asked again, and so is the server itself.
            self.lose(f"it refused us: {reason}")
            return
        self.state = LinkState.CLOSED
        self._shut()
        self._end_all("refused", reason, retryable=False)
        self._listener.on_refused(self, reason)

    def _on_event(self, frames: list[bytes]) -> None:
        """What ZMQ says of the connection itself."""
        event = int.from_bytes(frames[0][:2], sys.byteorder)
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.handshake_error = ""
            if self.state is LinkState.CONNECTING:
                self._send(wire.encode(self._hello))
        elif event == zmq.EVENT_DISCONNECTED:
            if self.state is not LinkState.CONNECTING:
                self.lose("the connection was closed")
        else:
            self.handshake_error = "the encrypted handshake failed: check the CURVE keys of both sides"

    def _tick(self) -> None:
        """Every ping interval. Silence is counted in ticks, so that a stall of our own loop counts as one."""
        self._timer = self._loop.call_later(self._ping_interval_s, self._tick)
        if self.state is LinkState.CONNECTING:
            self._send(wire.encode(self._hello))
            return
        self._send(wire.encode(wire.Ping(time.perf_counter())))
        if self._look_for_clogging():
            return
        if self._heard or self.state is LinkState.ALIVE:
            # A server that is loading may block; readiness has a deadline of its own.
            self._heard = False
            self._quiet_ticks = 0
            return
        self._quiet_ticks += 1
        quiet_s = self._quiet_ticks * self._ping_interval_s
        if self._quiet_ticks == 2:
            log.warning(
                "env.frozen",
                env=self.env,
                server=self.server,
                quiet_s=quiet_s,
                inflight=self.inflight,
                remedy="blocking code in the environment? the server's own log has its stack",
            )
        if self._quiet_ticks >= self._silent_ticks:
            self.lose(f"nothing heard for {quiet_s:g} s")

    def _look_for_clogging(self) -> bool:
        """Give up a server whose room is taken by nothing but cancelled requests that it does not stop.

        It pongs, and would never run anything again.
        """
        clogged = self._abandoned == self.inflight and 2 * self._abandoned >= self.capacity > 0
        self._clogged_ticks = self._clogged_ticks + 1 if clogged else 0
        if self._clogged_ticks < self._silent_ticks:
            return False
        self.lose(f"it has not stopped {self._abandoned} cancelled rollouts, which take its room")
        return True


def _plain(failure: wire.Failure) -> wire.Failure:
    """A failure as it may be told on: of a length that a log can hold, and not of the kind that only we can know."""
    if failure.lost or failure.inflight:
        failure = msgspec.structs.replace(failure, kind="error", inflight=0)
    long = len(failure.message) > _MESSAGE_LENGTH or len(failure.detail) > _DETAIL_LENGTH
    if long or len(failure.where) > _WHERE_LENGTH:
        # What was raised stands at the end of a traceback, and a file at the end of its path.
        failure = msgspec.structs.replace(
            failure,
            message=failure.message[:_MESSAGE_LENGTH],
            detail=failure.detail[-_DETAIL_LENGTH:],
            where=failure.where[-_WHERE_LENGTH:],
        )
    return failure


def _other_protocol(server: str, protocol: int) -> str:
    return f"server {server} speaks protocol {protocol}, we speak {wire.spoken()}; use the same release on both sides"
