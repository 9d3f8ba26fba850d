"""The service's ZMQ socket to the trainer's ranks.

A ROUTER that whoever reaches the port may speak to; nothing that a peer sends or leaves out ends the process or stays
in memory here. Large frames are sent without a copy. A rank whose connection is gone is noticed by a probe that
cannot be delivered. Only ranks are probed: connections that have not joined are not remembered at all.
"""

import asyncio
import errno
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import zmq

from envs.curve import Gatekeeper, ServerKeys, secure_server
from envs.drained import DrainedSocket
from envs.memory import keep_freed_memory
from envs.vanished import notice_vanished
from orchestrator.errors import TrainerLinkError
from orchestrator.trainer.protocol import MAX_REQUEST_BYTES, Pong, encode

_LINGER_MS = 2000
_HANDSHAKE_MS = 10_000
_IPC = "ipc://"


class BatchSocket:
    """Listens at an address; `send` and the callbacks belong to the event loop's thread."""

    def __init__(self, bind: str, *, probe_s: float, keys: ServerKeys | None) -> None:
        """Bind, so that an address in use is found at once. Until `start`, messages are dropped: ranks ask again."""
        self.address = bind
        self._probe_s = probe_s
        self._keys = keys
        self._gatekeeper: Gatekeeper | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._on_message: Callable[[bytes, list[Any]], None] | None = None
        keep_freed_memory()
        self._context = zmq.Context()
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        try:
            self._configure(socket)
            socket.bind(self.address)
        except (zmq.ZMQError, OSError) as error:
            socket.close(0)
            self._stop_gatekeeper()
            self._context.term()
            raise TrainerLinkError(
                f"the trainer link cannot listen at {self.address}: {error}; change trainer.bind or free the address"
            ) from error
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._socket = DrainedSocket(socket, self._on_frames, loop=asyncio.get_running_loop())

    def start(
        self,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[bytes, list[Any]], None],
        *,
        peers: Callable[[], Iterable[bytes]],
        on_lost: Callable[[bytes], None],
    ) -> None:
        """Begin to deliver messages.

        `peers` are the connections to probe, `on_lost` hears of one that something could not be sent to.
        """
        self._loop = loop
        self._peers = peers
        self._on_lost = on_lost
        self._on_message = on_message
        self._timer = loop.call_later(self._probe_s, self._probe)

    def send(self, peer: bytes, frames: list[bytes | memoryview]) -> None:
        """Send a message, or report the peer as lost."""
        try:
            self._socket.send([peer, *frames], copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EHOSTUNREACH, errno.EAGAIN):
                raise
            # Gone, or a thousand messages behind. If it comes back it is unknown, joins and asks again.
            self._on_lost(peer)

    async def aclose(self) -> None:
        """Close, after a moment for what is still to be sent; once is enough."""
        if self._context.closed:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._socket.close(linger_ms=_LINGER_MS)
        self._stop_gatekeeper()
        await asyncio.to_thread(self._context.term)

    def _on_frames(self, frames: list[bytes]) -> None:
        if self._on_message is not None:
            self._on_message(frames[0], frames[1:])

    def _stop_gatekeeper(self) -> None:
        if self._gatekeeper is not None:
            self._gatekeeper.stop()

    def _configure(self, socket: zmq.Socket[bytes]) -> None:
        if self._keys is not None:
            self._gatekeeper = Gatekeeper(self._context, self._keys.clients)
            secure_server(socket, self._keys)
        if self.address.startswith(_IPC):
            # Whoever may enter the directory may connect, so a new one is for this user alone.
            Path(self.address.removeprefix(_IPC)).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.IPV6, "[" in self.address)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        # libzmq ends the process when a heartbeat, its own or a peer's, meets a connection that was reset while its input
        # was stopped. So it sends none, and its input never stops: messages are small, and are read as they come.
        socket.setsockopt(zmq.RCVHWM, 0)
        notice_vanished(socket)

    def _probe(self) -> None:
        for peer in list(self._peers()):
            self.send(peer, [encode(Pong())])
        self._timer = self._loop.call_later(self._probe_s, self._probe)
