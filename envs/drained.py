"""A plain ZMQ socket that is drained on its file descriptor by the event loop.

The descriptor is edge-triggered: it becomes readable when the socket's inner mailbox does, and any call on
the socket, a send included, may empty that mailbox. So the socket is looked at again after every send and
after every full turn; otherwise a message could wait for ever. At most `per_turn` messages are handled
before other callbacks get their turn. Messages go to one callback, in order; nothing is awaited, nothing
is allocated per message but the frames. The owner of the context ends it; this closes only the socket.
"""

import asyncio
from collections.abc import Callable, Sequence

import zmq

_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

PER_TURN = 64
"""Messages handled in one turn of the loop: some 2 ms of work."""


class DrainedSocket:
    """Owns a connected or bound socket from construction to `close`."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_message: Callable[[list[bytes]], None],
        *,
        loop: asyncio.AbstractEventLoop,
        per_turn: int = PER_TURN,
    ) -> None:
        self._socket = socket
        self._on_message = on_message
        self._loop = loop
        self._per_turn = per_turn
        self._look_scheduled = False
        self.closed = False
        self._fd = socket.FD
        loop.add_reader(self._fd, self._drain)
        self._look_again()

    def send(self, frames: Sequence[bytes | memoryview], *, copy: bool = True) -> None:
        """Send without waiting; zmq.Again when the peer takes nothing more.

        Without `copy`, large frames are sent from where they lie and must not be changed afterwards.
        """
        send = self._socket.send
        try:
            # What send_multipart does, without combining enum flags for every frame.
            for frame in frames[:-1]:
                send(frame, _NOBLOCK_MORE, copy=copy)
            send(frames[-1], _NOBLOCK, copy=copy)
        finally:
            # Also when it failed: the attempt may have emptied the mailbox as well.
            if not self._look_scheduled:
                self._look_again()

    def close(self, *, linger_ms: int = 0) -> None:
        """Stop listening and close; what is queued to be sent has `linger_ms` to leave."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._fd)
        self._socket.close(linger=linger_ms)

    def _look_again(self) -> None:
        self._look_scheduled = True
        self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._look_scheduled = False
        self._drain()

    def _drain(self) -> None:
        """Handle what has arrived; a callback may close the socket, so that is looked at each time."""
        receive = self._socket.recv
        emptied = False
        try:
            for _ in range(self._per_turn):
                if self.closed:
                    return
                try:
                    frame = receive(_NOBLOCK, copy=False)
                except zmq.Again:
                    emptied = True
                    return
                # What recv_multipart does, for two thirds of its price: a frame knows whether one follows.
                frames = [frame.bytes]
                while frame.more:
                    frame = receive(_NOBLOCK, copy=False)
                    frames.append(frame.bytes)
                self._on_message(frames)
        finally:
            # Also on an error in the callback: the messages behind it must not wait for the next edge.
            if not emptied and not self.closed and not self._look_scheduled:
                self._look_again()
