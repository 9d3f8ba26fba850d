"""Text from elsewhere on its way to a terminal: env names, failure messages, addresses, what a server answered.

Such text may hold control characters, which a terminal obeys: they clear the screen, change its title, or hide what
else is on the line. They are shown as `�` instead. And a terminal, a pipe or a file that cannot be written any more is no reason
to end what runs for days. Must stay light: the command line imports it for every error.
"""

import io
import os
import sys
from typing import Any


def plain(text: str) -> str:
    """One line without control characters, line ends included."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "�" for char in text)


def plain_lines(text: str) -> str:
    """The same for text of several lines, which stay."""
    return "\n".join(plain(line.expandtabs()) for line in text.split("\n"))


def outlive_readers() -> None:
    """From now on standard output and error leave out what cannot be written.

    The terminal is closed, `tee` has ended, or the disk of a redirected log is full: a log has its file in the run directory.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # What somebody else has put in its place is that one's affair.
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            kept = io.BufferedWriter(_Unfailing(stream.fileno()))
            lines = stream.line_buffering
            setattr(sys, name, io.TextIOWrapper(kept, stream.encoding, stream.errors, line_buffering=lines))


class _Unfailing(io.RawIOBase):
    """A file descriptor that takes everything, and loses what cannot be written."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        try:
            return os.write(self._fd, data)
        except OSError:
            return memoryview(data).nbytes
