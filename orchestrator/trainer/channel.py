"""How a trainer's messages travel: one interface, ZMQ here, files in `filesystem`.

A channel may lose what was sent when the service restarts or the network breaks; the session above it asks again.
Received frames are writable memory that nobody else uses. A trainer imports this, so of other
packages it needs pyzmq only; asyncio is imported by those who wait with it.
"""

from typing import Any, Protocol

import zmq

from orchestrator.errors import TrainerLinkError
from orchestrator.trainer.filesystem import SCHEME, FileChannel
from orchestrator.trainer.protocol import MAX_FRAME_BYTES

_LINGER_MS = 1000
_KEPT_BYTES = 16 * 1024 * 1024


class Channel(Protocol):
    """A way to the service."""

    def send(self, frame: bytes) -> None:
        """Send a message of one frame."""

    def receive(self) -> list[Any] | None:
        """The frames of a message that has come, if one has."""

    def wait(self, timeout_s: float) -> None:
        """Block until a message may be there, or the time is over."""

    async def wait_async(self, timeout_s: float) -> None:
        """The same for asyncio."""

    def close(self) -> None:
        """Let go, after at most a second for what is still to be sent."""


class ZmqChannel:
    """A DEALER socket. It has no name of its own, so that every connection is new to the service."""

    def __init__(
        self, address: str, *, server_key: bytes | None, public_key: bytes | None, secret_key: bytes | None
    ) -> None:
        # A large block that is freed, untouched, has the C library keep what each batch frees for the next one, instead of a
        # page fault for every 4 KiB of it: `envs.memory` explains.
        bytes(_KEPT_BYTES)  # not a bytearray: that writes its zeros
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        try:
            if server_key is not None:
                if public_key is None or secret_key is None:
                    public_key, secret_key = zmq.curve_keypair()
                self._socket.curve_serverkey = server_key
                self._socket.curve_publickey = public_key
                self._socket.curve_secretkey = secret_key
            self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
            self._socket.setsockopt(zmq.IPV6, "[" in address)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            # A heartbeat on a connection whose input is stopped and which is then reset ends the process inside
            # libzmq, and so does the peer's. Without heartbeats, and with an input that never stops, neither can.
            self._socket.setsockopt(zmq.RCVHWM, 0)
            # A host that vanished without a word is noticed by TCP, as `envs.vanished` explains: an idle connection is asked
            # for after 10 s, thrice; nothing stays unacknowledged for 20 s, and no attempt to connect takes longer than 5 s.
            self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
            self._socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
            self._socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
            self._socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
            self._socket.setsockopt(zmq.TCP_MAXRT, 20_000)
            self._socket.setsockopt(zmq.CONNECT_TIMEOUT, 5_000)
            # A service that restarts is looked for at most a second apart.
            self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
            self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._socket.close(0)
            self._context.term()
            hint = "" if "://" in address else f'; did you mean "tcp://{address}"?'
            raise TrainerLinkError(f"{address} is not an address to connect to: {error}{hint}") from error

    def send(self, frame: bytes) -> None:
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            # A thousand messages wait for a service that does not come; one more would say nothing new.
            return

    def receive(self) -> list[Any] | None:
        try:
            return list(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
        except zmq.Again:
            return None

    def wait(self, timeout_s: float) -> None:
        self._socket.poll(int(timeout_s * 1000))

    async def wait_async(self, timeout_s: float) -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        descriptor = self._socket.fileno()
        loop.add_reader(descriptor, readable.set)
        try:
            # The descriptor tells of changes only, so what is there already is looked for after it is watched.
            async with asyncio.timeout(timeout_s):
                while not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                    await readable.wait()
                    readable.clear()
        except TimeoutError:
            return
        finally:
            loop.remove_reader(descriptor)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def open_channel(
    address: str,
    *,
    server_key: bytes | None = None,
    public_key: bytes | None = None,
    secret_key: bytes | None = None,
) -> Channel:
    """The channel that an address asks for: `file://` a directory, anything else ZMQ."""
    if address.startswith(SCHEME):
        return FileChannel(address)
    return ZmqChannel(address, server_key=server_key, public_key=public_key, secret_key=secret_key)
