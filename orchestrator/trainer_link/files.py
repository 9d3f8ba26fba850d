"""The service's side of the trainer link over a shared directory; the trainer's side and the files are
`orchestrator.trainer.filesystem`. One thread looks for messages and writes answers, so that a slow disk holds up nothing.

A file that is no message, or too large for one, counts as a malformed message; one that cannot even be read or removed is
left where it is. Neither keeps the messages behind it from being read.
"""

import asyncio
import itertools
import shutil
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from orchestrator.errors import TrainerLinkError
from orchestrator.trainer.filesystem import POLL_S, directory_of, messages_in, read_message, write_message
from orchestrator.trainer.protocol import MAX_REQUEST_BYTES


class FileLink:
    """Delivers messages from the directory and writes answers into it, from `start` to `aclose`."""

    def __init__(self, address: str, *, on_error: Callable[[str], None], poll_s: float = POLL_S) -> None:
        self.address = address
        self._root = directory_of(address)
        self._on_error = on_error
        self._poll_s = poll_s
        self._outgoing: deque[tuple[str, list[bytes | memoryview]]] = deque()
        self._numbers = itertools.count()
        self._wake = threading.Event()
        self._closing = False
        self._failing = False
        self._thread: threading.Thread | None = None

    def start(
        self,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[bytes, list[Any]], None],
        *,
        peers: Callable[[], Iterable[bytes]],
        on_lost: Callable[[bytes], None],
    ) -> None:
        """Begin to deliver messages; nobody knows whether a peer of a directory is still there."""
        self._loop = loop
        self._on_message = on_message
        try:
            for name in ("inbox", "outbox", "tmp"):
                shutil.rmtree(self._root / name, ignore_errors=True)
                (self._root / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrainerLinkError(
                f"the trainer link cannot use {self._root}: {error}; is it writable?"
            ) from error
        self._thread = threading.Thread(target=self._run, name="trainer-files", daemon=True)
        self._thread.start()

    def send(self, peer: bytes, frames: list[bytes | memoryview]) -> None:
        self._outgoing.append((peer.decode(), frames))
        self._wake.set()

    async def aclose(self) -> None:
        """Write what is still to be sent, then end the thread; once is enough."""
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        while True:
            closing = self._closing
            self._wake.clear()
            try:
                self._write()
                if closing:
                    return
                self._read()
                self._failing = False
            except OSError as error:
                # A shared disk comes and goes: what could not be written is tried again.
                if closing:
                    return
                if not self._failing:
                    self._failing = True
                    self._post(self._on_error, str(error))
            self._wake.wait(self._poll_s)

    def _write(self) -> None:
        while self._outgoing:
            peer, frames = self._outgoing[0]
            outbox = self._root / "outbox" / peer
            outbox.mkdir(parents=True, exist_ok=True)
            write_message(outbox, self._root / "tmp", f"{peer}.{next(self._numbers):012d}.msg", frames)
            self._outgoing.popleft()

    def _read(self) -> None:
        for peer, path in messages_in(self._root / "inbox"):
            try:
                frames = self._frames_of(path)
                path.unlink(missing_ok=True)
            except (PermissionError, IsADirectoryError):
                continue
            self._post(self._on_message, peer.encode(), frames)

    def _frames_of(self, path: Path) -> list[memoryview]:
        facts = path.lstat()
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > MAX_REQUEST_BYTES:
            return []
        try:
            return read_message(path)
        except ValueError:
            return []

    def _post(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
