"""The service's ZMQ socket to the trainer's ranks.

A ROUTER drained on its file descriptor; large frames are sent without a copy. A rank whose connection is gone is
noticed by a probe that cannot be delivered, and reported once per peer that something could not be sent to.
"""

import asyncio
import errno
from collections.abc import Callable
from typing import Any

import zmq

from envs.curve import Gatekeeper, ServerKeys, secure_server
from orchestrator.errors import TrainerLinkError
from orchestrator.trainer.protocol import Pong, encode

_MESSAGES_PER_TURN = 64
_LINGER_MS = 2000


class BatchSocket:
    """Listens at an address; `send` and the callbacks belong to the event loop's thread."""

    def __init__(
        self,
        bind: str,
        *,
        on_lost: Callable[[bytes], None],
        probe_s: float,
        keys: ServerKeys | None,
    ) -> None:
        self.address = bind
        self._on_lost = on_lost
        self._probe_s = probe_s
        self._keys = keys
        self._gatekeeper: Gatekeeper | None = None
        self._draining = False
        self._peers: set[bytes] = set()

    def start(self, loop: asyncio.AbstractEventLoop, on_message: Callable[[bytes, list[Any]], None]) -> None:
        """Bind and begin to deliver messages."""
        self._loop = loop
        self._on_message = on_message
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        try:
            self._configure()
        except zmq.ZMQError as error:
            self._socket.close(0)
            self._end_context()
            raise TrainerLinkError(
                f"the trainer link cannot listen at {self.address}: {error}; change trainer.bind or free the address"
            ) from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        loop.add_reader(self._socket.fileno(), self._drain)
        self._timer = loop.call_later(self._probe_s, self._probe)
        self._look_again()

    def send(self, peer: bytes, frames: list[bytes | memoryview]) -> None:
        """Send a message, or report the peer as lost."""
        try:
            self._socket.send_multipart([peer, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            # Gone, or a thousand messages behind. If it comes back it is unknown, joins and asks again.
            self._peers.discard(peer)
            self._on_lost(peer)
        self._look_again()

    async def aclose(self) -> None:
        """Close, after a moment for what is still to be sent."""
        self._timer.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close(_LINGER_MS)
        await asyncio.to_thread(self._end_context)

    def _end_context(self) -> None:
        if self._gatekeeper is not None:
            self._gatekeeper.stop()
        self._context.term()

    def _configure(self) -> None:
        if self._keys is not None:
            self._gatekeeper = Gatekeeper(self._context, self._keys.clients)
            secure_server(self._socket, self._keys)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.IPV6, "[" in self.address)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20000)
        self._socket.bind(self.address)

    def _drain(self) -> None:
        """Read what has come; the descriptor is edge-triggered, so nothing may be left behind unseen."""
        self._draining = False
        if self._socket.closed:
            return
        for _ in range(_MESSAGES_PER_TURN):
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._peers.add(peer)
            self._on_message(peer, frames)
        self._look_again()

    def _look_again(self) -> None:
        if not self._draining and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._draining = True
            self._loop.call_soon(self._drain)

    def _probe(self) -> None:
        for peer in list(self._peers):
            self.send(peer, [encode(Pong())])
        self._timer = self._loop.call_later(self._probe_s, self._probe)
