"""The connection to one env server: handshake, requests matched to answers by id, heartbeat, loss.

A link lives once: connecting, alive (the server speaks our protocol), ready (its environment is loaded), and
then closed by us or lost. One that retires takes nothing new and closes itself when what it has has ended. Room is counted
as taken when it is reserved, before the request is there. Every submitted request ends exactly once: by its answer, by
`cancel`, or, when the link is lost for whatever reason (process gone, connection closed, silence, lease expired), at once
with a failure that says so. Nothing is awaited and no future or task is made per message: callbacks only, on the loop's
thread. The socket is `connection`'s; restarting and reconnecting is the supervisor's affair.
"""

import asyncio
import itertools
import time
from collections.abc import Sized
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgspec
import structlog
import zmq

from envs import wire
from envs.curve import ClientKeys
from orchestrator.dispatch.placement import fits
from orchestrator.env_servers.connection import Connection
from orchestrator.env_servers.pulse import Pulse
from orchestrator.env_servers.requests import Answer, OnDone, RolloutRequest, plain

log = structlog.get_logger()


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
        self.retiring = False
        self.capacity = 0
        self.inflight = 0
        self.stats: wire.ServerStats | None = None
        self.round_trip_s: float | None = None
        self.counts = LinkCounts()
        self._hello = hello
        self._protocol = wire.PROTOCOL
        self._takes_models = False
        self._listener = listener
        self._waiting = waiting
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, tuple[RolloutRequest, OnDone | None]] = {}
        self._ids = itertools.count()
        self._ping_interval_s = ping_interval_s
        self._pulse = Pulse(
            env=env, server=server, interval_s=ping_interval_s, silence_timeout_s=silence_timeout_s
        )
        self._abandoned = 0
        """Rollouts in flight that were cancelled and that the server has not stopped yet."""
        self._drained: asyncio.Future[None] | None = None
        self._connection = Connection(
            address,
            context=context,
            keys=keys,
            on_frames=self._on_frames,
            on_connected=self._on_connected,
            on_disconnected=self._on_disconnected,
        )
        self._send = self._connection.send
        self._timer = self._loop.call_later(ping_interval_s, self._tick)

    @property
    def handshake_error(self) -> str:
        """Why the last attempt at an encrypted connection failed; empty once one stands."""
        return self._connection.handshake_error

    @property
    def serving(self) -> bool:
        """Whether it takes requests."""
        return self.state is LinkState.READY and not self.retiring

    def has_room(self, count: int) -> bool:
        """Whether `count` rollouts can start."""
        return (
            self.state is LinkState.READY and not self.retiring and fits(count, self.inflight, self.capacity)
        )

    def reserve(self, count: int) -> None:
        """Take room for a request that is going to be submitted, so that nobody else plans with it."""
        self.inflight += count

    def release(self, count: int) -> None:
        """Give back room that was reserved for a request which is not going to be submitted."""
        if self.state is LinkState.READY:
            self.inflight -= count
            self._retire_if_idle()

    def submit(self, request: RolloutRequest, on_done: OnDone) -> None:
        """Send a request whose room is reserved; `on_done` is called exactly once, later, unless it is cancelled first."""
        request.id = next(self._ids)
        request.link = self
        self._pending[request.id] = (request, on_done)
        if self.state is not LinkState.READY:
            # Lost since the room was reserved.
            self._loop.call_soon(self._end_unsent, request.id)
            return
        if request.model and not self._takes_models:
            # It would ask for the model of the hello, and nobody would notice.
            reason = f'it is too old to be told to ask for "{request.model}"; update the env server'
            failure = self._failure(request.id, "not_accepted", reason, False)
            self._loop.call_soon(self._finish, request.id, failure)
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
            request.model or msgspec.UNSET,
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

    def retire(self) -> None:
        """Take nothing new; close when what was reserved or sent has ended, at once where there is nothing."""
        self.retiring = True
        self._retire_if_idle()

    def _retire_if_idle(self) -> None:
        if self.retiring and (self.inflight == 0 or self.state is not LinkState.READY):
            self.close()
            self._listener.on_credit(self, told=False)

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
        self._connection.close(linger_ms=linger_ms)
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

    def _on_frames(self, frames: list[bytes]) -> None:
        self._pulse.heard = True
        try:
            message = wire.decode_to_client(frames, self._protocol)
        except wire.WireError as error:
            self._on_malformed(error)
            return
        if isinstance(message, wire.Result):
            self._on_result(message)
        elif isinstance(message, wire.Failure):
            self._finish(message.id, plain(message))
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
            self._pulse.unclogged()
            self._listener.on_credit(self, told=False)
            self._retire_if_idle()
            return
        self._tell(on_done, request, answer)
        if self._waiting:
            self._listener.on_credit(self, told=True)
        self._retire_if_idle()

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
                self._takes_models = message.models
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

    def _on_connected(self) -> None:
        if self.state is LinkState.CONNECTING:
            self._send(wire.encode(self._hello))

    def _on_disconnected(self) -> None:
        if self.state is not LinkState.CONNECTING:
            self.lose("the connection was closed")

    def _tick(self) -> None:
        """Every ping interval."""
        self._timer = self._loop.call_later(self._ping_interval_s, self._tick)
        if self.state is LinkState.CONNECTING:
            self._send(wire.encode(self._hello))
            return
        self._send(wire.encode(wire.Ping(time.perf_counter())))
        reason = self._pulse.tick(
            loading=self.state is LinkState.ALIVE,
            inflight=self.inflight,
            abandoned=self._abandoned,
            capacity=self.capacity,
        )
        if reason:
            self.lose(reason)


def _other_protocol(server: str, protocol: int) -> str:
    return f"server {server} speaks protocol {protocol}, we speak {wire.spoken()}; use the same release on both sides"
