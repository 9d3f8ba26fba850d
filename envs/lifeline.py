"""A spawned server's end of its parent: instructions come in over standard input, whose end is the parent's end.

A thread sees that end and stops the server in order. Where a keeper stands in between (see `envs.keeper`) it sees
the same and is quicker: it kills the server and all that the environment started. Standard input itself becomes
empty, so that none of those reads from the lifeline.
"""

import os
import signal
import threading
import time
from collections.abc import Callable

_LINE_BYTES = 16 * 1024 * 1024


class Lifeline:
    """Taken hold of once, at the start of a spawned process and before any thread is made."""

    def __init__(self) -> None:
        self._descriptor = os.dup(0)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)

    def read_line(self) -> bytes:
        """The instructions: all that is ever written; empty when the parent has gone already."""
        chunks: list[bytes] = []
        size = 0
        while size < _LINE_BYTES and (chunk := os.read(self._descriptor, 65536)):
            chunks.append(chunk)
            size += len(chunk)
            if chunk.endswith(b"\n"):
                return b"".join(chunks)
        return b""

    def watch(self, on_end: Callable[[], object], *, kill_after_s: float) -> None:
        """Call `on_end` from a thread when the parent ends; a process that is still there afterwards is stuck."""

        def wait() -> None:
            while os.read(self._descriptor, 4096):
                pass
            on_end()
            time.sleep(kill_after_s)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=wait, name="lifeline", daemon=True).start()
