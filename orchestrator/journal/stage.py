"""The stage: memory in which payloads are laid out as they will lie in their file, summed up, and written from.

What is written from here goes to the disk past the system's page cache (`O_DIRECT`), in whole blocks: nobody reads it again
before a restart, and copying it into the cache and bringing it from there to disk costs twice the CPU of the rest.
A filesystem that cannot do that gets the same blocks through its cache. Writing past the cache asks for addresses, offsets
and lengths in whole blocks, so what is written at once is filled up with zeros. The memory is in large pages where
there are any, which are cheaper to hand to a device than many small ones.
"""

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Sequence

import numpy as np

BLOCK_BYTES = 4096
"""What offsets and lengths are a multiple of."""
_STAGE_BYTES = 4 * 1024 * 1024
_DIRECT: int = getattr(os, "O_DIRECT", 0)


class Stage:
    """One file at a time is written from it, from an offset on. Not thread-safe."""

    def __init__(self, *, direct: bool) -> None:
        self._direct = direct
        self._memory = mmap.mmap(-1, _STAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _use_large_pages(self._memory)
        self._bytes = memoryview(self._memory)
        self._words = np.frombuffer(self._memory, "<u8")
        self._fd = -1
        self._offset = 0
        self._used = self._summed = self._sum = 0

    @property
    def end(self) -> int:
        """Where in the file the next payload begins."""
        return self._offset + self._used

    def use(self, fd: int, offset: int) -> None:
        """Go on with a file (-1 for none), from a multiple of the block's size; what is on the stage is forgotten."""
        self._fd, self._offset = fd, offset
        self._used = self._summed = 0
        if fd >= 0 and self._direct and _DIRECT:
            self._set_direct(on=True)

    def add(self, parts: Sequence[memoryview]) -> tuple[int, int]:
        """Copy a payload, each part filled up with zeros to 8 bytes; returns its size and its checksum.

        Raises OSError when the stage was full and could not be written.
        """
        start = self.end
        self._sum = 0
        for part in parts:
            end = self._used + len(part)
            if end > _STAGE_BYTES:
                part, end = self._spill(part)
            self._bytes[self._used : end] = part
            self._used = end
            if end & 7:
                self._used += -end & 7
                self._bytes[end : self._used] = bytes(-end & 7)
        self._add_up()
        total = self._sum & 0xFFFF_FFFF_FFFF_FFFF
        return self.end - start, total - (1 << 64) if total >> 63 else total

    def write(self) -> None:
        """Write what is there, filled up to a whole block; on OSError some of it may be written."""
        end = self._used + -self._used % BLOCK_BYTES
        self._bytes[self._used : end] = bytes(end - self._used)
        written = 0
        while written < end:
            written += self._write_at(self._offset + written, self._bytes[written:end])
        self._offset += end
        self._used = self._summed = 0

    def _spill(self, part: memoryview) -> tuple[memoryview, int]:
        """Write the full stage for as long as a part does not fit; returns the rest of it and where it will end."""
        while (end := self._used + len(part)) > _STAGE_BYTES:
            room = _STAGE_BYTES - self._used
            self._bytes[self._used :] = part[:room]
            self._used = _STAGE_BYTES
            self._add_up()
            self.write()
            part = part[room:]
        return part, end

    def _add_up(self) -> None:
        """Add the words that were copied last to the checksum, while they are in the processor's cache."""
        self._sum += int(np.add.reduce(self._words[self._summed >> 3 : self._used >> 3]))
        self._summed = self._used

    def _write_at(self, offset: int, data: memoryview) -> int:
        try:
            return os.pwrite(self._fd, data, offset)
        except OSError as error:
            # Larger blocks than ours, or a write that a full disk cut short: the rest goes through the cache.
            if error.errno != errno.EINVAL or not self._set_direct(on=False):
                raise
            return os.pwrite(self._fd, data, offset)

    def _set_direct(self, *, on: bool) -> bool:
        """Write past the cache or not, where the filesystem can; returns whether that is a change."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        wanted = flags | _DIRECT if on else flags & ~_DIRECT
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, wanted)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return wanted != flags


def _use_large_pages(memory: mmap.mmap) -> None:
    """Where the system has any: not everywhere, and a kernel that was built without them answers with an error."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
