"""Functions that may take for ever, called in helper processes that are ended when they do.

A regular expression or a computer-algebra system can spend hours on a line of text, and neither lets other threads
run meanwhile. `Aside` keeps a few processes, each of which imports the function once and answers one call at a time;
one that is late is killed and replaced. Run as a program this module is such a process. Arguments and results
are JSON; a helper gets no environment variables of ours, and limits itself as far as the machine can.
"""

import asyncio
import ctypes
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from envs.dataset.confined import UnconfinedError, confine
from envs.importing import import_attribute

_SET_DEATH_SIGNAL = 1  # of prctl
_STARTUP_S = 120.0
_MEMORY_BYTES = 4 * 1024**3
_FILE_BYTES = 1024**2
_LONGEST_LINE = 64 * 1024**2


class AsideError(RuntimeError):
    """The function raised, or its process ended; the message is its own."""


class Aside:
    """Calls "module:function" in helper processes, at most `most` at once, each call for at most `timeout_s`."""

    def __init__(self, function: str, *, most: int, timeout_s: float) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._room = asyncio.Semaphore(most)
        self._idle: list[asyncio.subprocess.Process] = []
        self._closed = False

    async def call(self, *arguments: Any) -> Any:
        """What the function returns; TimeoutError when it takes too long, AsideError when it raises."""
        async with self._room:
            process = self._idle.pop() if self._idle else await self._start()
            try:
                answer = await self._ask(process, arguments, self._timeout_s)
            except BaseException:
                # Late, dead or cancelled: it may still be at work, so that nobody else can use it.
                await _end(process)
                raise
            if self._closed:
                await _end(process)
            else:
                self._idle.append(process)
        if "error" in answer:
            raise AsideError(answer["error"])
        return answer["value"]

    async def aclose(self) -> None:
        """End the helpers."""
        self._closed = True
        while self._idle:
            await _end(self._idle.pop())

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "envs.dataset.aside",
            self._function,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={
                "PATH": os.environ.get("PATH", ""),
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)]),
                "PYTHONHASHSEED": "0",
                "LANG": "C.UTF-8",
            },
            limit=_LONGEST_LINE,
        )
        try:
            # The first answer says that the function is imported, which a large library takes its time for.
            ready = await self._ask(process, None, _STARTUP_S)
        except TimeoutError:
            # Not the fault of what is to be looked at.
            await _end(process)
            raise AsideError(
                f"the helper process for {self._function} did not start in {_STARTUP_S:g} s"
            ) from None
        except BaseException:
            await _end(process)
            raise
        if "error" in ready:
            await _end(process)
            raise AsideError(ready["error"])
        return process

    async def _ask(
        self, process: asyncio.subprocess.Process, arguments: Any, timeout_s: float
    ) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        async with asyncio.timeout(timeout_s):
            if arguments is not None:
                process.stdin.write(json.dumps(arguments).encode() + b"\n")
                await process.stdin.drain()
            line = await process.stdout.readline()
        if not line:
            raise AsideError(f"the helper process for {self._function} ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


def _end_with_parent() -> None:
    """Ask the kernel, where it can, to end this process with the one that started it, even in the middle of a call."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def main() -> int:
    """Import the function, say so, and answer call after call until standard input ends."""
    _end_with_parent()
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no answer
    function = None
    try:
        function = import_attribute(sys.argv[1], what="function")
        # A folder of its own that nobody writes to.
        confine(
            folder=tempfile.gettempdir() + "/nothing",
            cpu_s=2**31,
            memory_bytes=_MEMORY_BYTES,
            file_bytes=_FILE_BYTES,
        )
    except UnconfinedError:
        pass  # as far as the machine can
    except Exception as error:  # noqa: BLE001  told to the one who asks
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=channel, flush=True)
        return 1
    print(json.dumps({"value": None}), file=channel, flush=True)
    assert function is not None
    for line in sys.stdin:
        try:
            answer = {"value": function(*json.loads(line))}
        except Exception as error:  # noqa: BLE001  told to the one who asks
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=channel, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
