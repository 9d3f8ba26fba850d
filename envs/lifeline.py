"""A spawned server's end of its parent: instructions come in over standard input, whose end is the parent's end.

Three nets, because each has a hole: on Linux the kernel kills the server when its parent dies, even if it is
stopped or stuck; a thread sees the end of the pipe and stops the server in order; a keeper, a tiny process in
the server's group, sees it too and then kills the whole group, so that processes that an environment started
(sandboxes) go as well. Standard input itself becomes empty, so that none of those reads from the lifeline.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_LINE_BYTES = 16 * 1024 * 1024

_KEEPER = """
import os, signal
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
while os.read(0, 4096):
    pass
os.killpg(0, signal.SIGKILL)
"""


class Lifeline:
    """Taken hold of once, at the start of a spawned process and before any thread is made."""

    def __init__(self) -> None:
        self._keeper: subprocess.Popen[bytes] | None = None
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

    def die_with(self, parent_pid: int) -> bool:
        """Have the kernel kill this process when its parent ends; False when it has ended already."""
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        return parent_pid in (0, os.getppid())

    def start_keeper(self) -> None:
        """Guard the process group, if this process leads one of its own."""
        if os.getpgrp() == os.getpid():
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _KEEPER], stdin=self._descriptor
            )

    def stop_keeper(self) -> None:
        """At an orderly end, so that nobody has to bury it."""
        if self._keeper is not None:
            self._keeper.kill()
            self._keeper.wait()

    def watch(self, on_end: Callable[[], object], *, kill_after_s: float) -> None:
        """Call `on_end` from a thread when the parent ends; a process that is still there afterwards is stuck."""

        def wait() -> None:
            while os.read(self._descriptor, 4096):
                pass
            on_end()
            time.sleep(kill_after_s)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=wait, name="lifeline", daemon=True).start()
