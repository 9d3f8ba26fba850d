"""The trainer link within one process and one event loop: for scripts that are their own trainer. No socket, no port.

Both ends are here: `InsideLink` is what the service has in place of a socket, `InsideClient` the trainer. In between are
the same messages as over the wire, so leases, acknowledgements and publications follow the same rules.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from orchestrator.trainer.channel import Channel
from orchestrator.trainer.client import AsyncTrainerClient

_PEER = b"inside"


class InsideLink:
    """Hands messages over to the client of the same process, and its messages to the service."""

    address = "inside this process"

    def __init__(self) -> None:
        self.channel = _InsideChannel()

    def start(
        self,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[bytes, list[Any]], None],
        *,
        peers: Callable[[], Iterable[bytes]],
        on_lost: Callable[[bytes], None],
    ) -> None:
        """Begin to deliver messages; the client cannot be lost."""
        self.channel.deliver = lambda frame: loop.call_soon(on_message, _PEER, [frame])

    def send(self, peer: bytes, frames: list[bytes | memoryview]) -> None:
        # A batch is the trainer's to change; the service may have to send it once more.
        self.channel.put([bytearray(frame) for frame in frames])

    async def aclose(self) -> None:
        self.channel.deliver = _drop


class _InsideChannel:
    """The client's end."""

    def __init__(self) -> None:
        self.deliver: Callable[[bytes], object] = _drop
        self._arrived: deque[list[Any]] = deque()
        self._changed = asyncio.Event()

    def put(self, frames: list[Any]) -> None:
        self._arrived.append(frames)
        self._changed.set()

    def send(self, frame: bytes) -> None:
        self.deliver(frame)

    def receive(self) -> list[Any] | None:
        return self._arrived.popleft() if self._arrived else None

    def wait(self, timeout_s: float) -> None:
        raise RuntimeError("a client inside the service's event loop cannot block it")

    async def wait_async(self, timeout_s: float) -> None:
        if self._arrived:
            return
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def close(self) -> None:
        self._arrived.clear()


class InsideClient(AsyncTrainerClient):
    """The trainer of the same process. One coroutine may publish while another waits for a batch."""

    def __init__(self, link: InsideLink, *, token: str | None) -> None:
        super().__init__(link.address, token=token or "")
        self._inside = link.channel

    def _open(self) -> Channel:
        return self._inside

    async def join(self) -> None:
        """Become the trainer."""
        self._channel = self._open()
        await self._drive(self._join())

    async def ack_in_hand(self) -> None:
        """Acknowledge the batch that was handed out last, unless that was done."""
        await self._drive(self._ack_in_hand())

    async def leave(self) -> None:
        """Say goodbye; the batch in hand stays as it is."""
        await self._drive(self._leave(well=False))


def _drop(frame: bytes) -> None:
    """Nobody is there yet, or any more: the client asks again."""
