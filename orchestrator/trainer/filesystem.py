"""The trainer link over a directory that both sides can reach, for clusters without a network path between them.

Carries the same messages as ZMQ does, with the same bytes. A message is one file, written elsewhere and renamed into
place, so that nobody ever sees half of one; the reader deletes it. Trainers write into `inbox`, each reads its own
directory under `outbox`; both sides look every `poll_s`. A service that starts empties the directory: ranks that
were there before find themselves unknown, join again and ask again, as after any restart.

A file holds the number of frames, their sizes, and the frames, each aligned to 64 bytes. Trainers import
this module, so it needs the standard library only.
"""

import itertools
import re
import shutil
import struct
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from orchestrator.errors import TrainerLinkError

SCHEME = "file://"
POLL_S = 0.05

_MAGIC = b"RLMSG001"
_ALIGN = 64
_NAME = re.compile(r"^([0-9a-f]{32})\.(\d{12})\.msg$")


def directory_of(address: str) -> Path:
    """The directory that a `file://` address names."""
    parts = urlsplit(address)
    path = Path(unquote(parts.path))
    if parts.netloc or not path.is_absolute():
        raise TrainerLinkError(f"{address}: name the directory in full, as in file:///shared/run/trainer")
    return path


def write_message(directory: Path, scratch: Path, name: str, frames: Sequence[bytes | memoryview]) -> None:
    """Put a message into a directory, whole or not at all."""
    sizes = [len(frame) for frame in frames]
    head = _MAGIC + struct.pack(f"<Q{len(sizes)}Q", len(sizes), *sizes)
    draft = scratch / f"{uuid.uuid4().hex}.tmp"
    try:
        with draft.open("wb", buffering=0) as file:
            position = 0
            for piece in (head, *frames):
                padding = -position % _ALIGN
                file.write(bytes(padding))
                _write_all(file, memoryview(piece))
                position += padding + len(piece)
        draft.rename(directory / name)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def read_message(path: Path) -> list[memoryview]:
    """The frames of a message, as writable views on one buffer; ValueError when it is not one."""
    data = bytearray(path.stat().st_size)
    view = memoryview(data)
    with path.open("rb", buffering=0) as file:
        got = 0
        while got < len(data) and (count := file.readinto(view[got:])):
            got += count
    if got < len(data) or data[:8] != _MAGIC or len(data) < 16:
        raise ValueError(f"{path.name} is not a message")
    (count,) = struct.unpack_from("<Q", data, 8)
    if count > (len(data) - 16) // 8:
        raise ValueError(f"{path.name} is cut off")
    frames, position = [], 16 + 8 * count
    for size in struct.unpack_from(f"<{count}Q", data, 16):
        position += -position % _ALIGN
        if position + size > len(data):
            raise ValueError(f"{path.name} is cut off")
        frames.append(view[position : position + size])
        position += size
    return frames


def messages_in(directory: Path) -> Iterator[tuple[str, Path]]:
    """Messages that lie in a directory with the peer each is from or for, in each peer's order."""
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except FileNotFoundError:
        return
    for name in names:
        if match := _NAME.match(name):
            yield match[1], directory / name


class FileChannel:
    """The trainer's side; see `channel.Channel`."""

    def __init__(self, address: str, *, poll_s: float = POLL_S) -> None:
        self._root = directory_of(address)
        self._poll_s = poll_s
        self._peer = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._waiting: deque[list[memoryview]] = deque()
        self._failing = False

    def send(self, frame: bytes) -> None:
        """Best effort: while the directory cannot be written, the service counts as silent."""
        try:
            for name in ("inbox", "tmp"):
                (self._root / name).mkdir(parents=True, exist_ok=True)
            name = f"{self._peer}.{next(self._numbers):012d}.msg"
            write_message(self._root / "inbox", self._root / "tmp", name, [frame])
        except OSError:
            return

    def receive(self) -> list[Any] | None:
        """While the directory cannot be read, the service counts as silent, too."""
        if not self._waiting:
            self._failing = False
            try:
                for _, path in messages_in(self._root / "outbox" / self._peer):
                    frames = read_message(path)
                    path.unlink(missing_ok=True)
                    self._waiting.append(frames)
            except FileNotFoundError:
                pass  # a service that starts empties the directory
            except OSError:
                self._failing = True
        return list(self._waiting.popleft()) if self._waiting else None

    def wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        # What could not be read is looked at again only then, or nobody would ever sleep over it.
        while (
            not self._waiting
            and (self._failing or not self._has_mail())
            and (left_s := deadline - time.monotonic()) > 0
        ):
            time.sleep(min(self._poll_s, left_s))

    async def wait_async(self, timeout_s: float) -> None:
        # A shared disk tells nobody of a new file and may be slow to list a directory: look from a thread.
        import asyncio

        await asyncio.to_thread(self.wait, timeout_s)

    def close(self) -> None:
        shutil.rmtree(self._root / "outbox" / self._peer, ignore_errors=True)

    def _has_mail(self) -> bool:
        try:
            return next(messages_in(self._root / "outbox" / self._peer), None) is not None
        except OSError:
            return False


def _write_all(file: Any, data: memoryview) -> None:
    data = data.cast("B") if data.nbytes else data
    while data.nbytes:
        data = data[file.write(data) :]
