"""The socket to one env server: how it is opened, and what ZMQ says of the connection itself.

It says three things of the connection: that it stands, that it was closed, and that an encrypted handshake failed. What
is sent and heard over it is the link's affair.
"""

import asyncio
import sys
from collections.abc import Callable

import zmq

from envs import wire
from envs.curve import ClientKeys, secure_client
from envs.drained import DrainedSocket
from envs.vanished import notice_vanished

_SEND_HIGH_WATER = 10_000
_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 2000

_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)


class Connection:
    """One DEALER socket and its monitor, from `Connection(...)` to `close`. Callbacks come on the loop's thread, later.

    zmq.ZMQError where there can be none: an address that is none, or no descriptors left. Nothing is open then.
    """

    def __init__(
        self,
        address: str,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: ClientKeys | None,
        on_frames: Callable[[list[bytes]], None],
        on_connected: Callable[[], None],
        on_disconnected: Callable[[], None],
    ) -> None:
        self.handshake_error = ""
        """Why the last attempt at an encrypted connection failed; empty once one stands."""
        self._on_connected = on_connected
        self._on_disconnected = on_disconnected
        socket = context.socket(zmq.DEALER)
        self._zmq = socket
        monitor: zmq.Socket[bytes] | None = None
        try:
            _prepare(socket, address, keys)
            monitor = socket.get_monitor_socket(_EVENTS)
            # Before anything listens: an address that is none leaves nothing behind.
            socket.connect(address)
        except zmq.ZMQError:
            socket.disable_monitor()
            if monitor is not None:
                monitor.close(linger=0)
            socket.close(linger=0)
            raise
        loop = asyncio.get_running_loop()
        self._monitor = DrainedSocket(monitor, self._on_event, loop=loop)
        self._socket = DrainedSocket(socket, on_frames, loop=loop)

    def send(self, header: bytes) -> bool:
        """Whether it could be sent: not while there is no connection."""
        if self._socket.closed:
            return False
        try:
            self._socket.send((header,))
        except zmq.Again:
            return False
        return True

    def close(self, *, linger_ms: int = 0) -> None:
        """Close; what is queued to be sent has `linger_ms` to leave."""
        # In this order: an event that nobody can take any more would block libzmq's thread for ever, with the lock that the
        # end of monitoring takes, and so all connections and this thread too.
        self._zmq.disable_monitor()
        self._monitor.close()
        self._socket.close(linger_ms=linger_ms)

    def _on_event(self, frames: list[bytes]) -> None:
        event = int.from_bytes(frames[0][:2], sys.byteorder)
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.handshake_error = ""
            self._on_connected()
        elif event == zmq.EVENT_DISCONNECTED:
            self._on_disconnected()
        else:
            self.handshake_error = "the encrypted handshake failed: check the CURVE keys of both sides"


def _prepare(socket: zmq.Socket[bytes], address: str, keys: ClientKeys | None) -> None:
    """What must be set before a socket connects."""
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
    notice_vanished(socket)
    socket.setsockopt(zmq.IPV6, int("[" in address))
    if keys is not None:
        secure_client(socket, keys)
