"""Child processes that never outlive us, and whose end is seen at once.

A child gets its own session, its output goes to a log file that is kept within a bound, and one line (its instructions) to its standard
input, which then stays open as the lifeline that tells it that we live. Its exit is an event on its process
descriptor, not a poll. Stopping is SIGTERM, a grace period, SIGKILL of the whole process group, and a bounded
wait; what a child leaves behind in its group is killed when it exits. A child that is a keeper (`envs.keeper`) is
killed by the end of its lifeline instead, so that it can take all that descends from it along, and as a group only
if it does not.
Must be used from the main thread: a parent-death signal that a child sets follows the thread that started it.
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, BinaryIO, Protocol

import structlog

log = structlog.get_logger()

KILL_WAIT_S = 10.0
"""How long the kernel may take to end a process after SIGKILL."""

_KEEPER_S = 2.0
"""How long a keeper may take to kill what it keeps before it is killed itself."""

_PIPE_BYTES = 64 * 1024
_TAIL_BYTES = 16 * 1024
LOG_BYTES = 64 * 1024 * 1024
"""Size at which a log file becomes the `.old.log` and begins anew."""

_LOOK_AT_LOG_S = 5.0


class Started(Protocol):
    """A process that was just started, in whichever way."""

    @property
    def pid(self) -> int: ...
    @property
    def pidfd(self) -> int | None:
        """Its process descriptor, which becomes readable when it ends; None where there are none. The taker closes it."""

    def tell(self, line: bytes) -> None:
        """Write to its standard input; one that died already is reported by its exit."""

    def let_go(self) -> None:
        """End its standard input, which is its lifeline."""

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""

    def kill_group(self) -> None:
        """Kill it and its group; only while it may run."""

    def reap(self) -> int:
        """Once it has ended: kill what it left in its group, and its return code."""


class Spawned:
    """A process with a program of its own."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        out: BinaryIO | None,
        environ: Mapping[str, str] | None,
        stdin: int = subprocess.PIPE,
    ) -> None:
        self._popen = subprocess.Popen(
            argv,
            stdin=stdin,
            stdout=out,
            stderr=subprocess.STDOUT if out is not None else None,
            env=None if environ is None else dict(environ),
            start_new_session=True,
        )
        self.pid = self._popen.pid
        self.pidfd = _open_pidfd(self.pid)

    def tell(self, line: bytes) -> None:
        assert self._popen.stdin is not None
        write_line(self._popen.stdin, line)

    def let_go(self) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._popen.send_signal(number)

    def kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> int:
        # Before the child is reaped its id cannot be taken by another group.
        self.kill_group()
        return self._popen.wait()


class ChildProcess:
    """One child from its start to its end; `exited` gets its return code (negative: the signal)."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        first_line: bytes,
        log_path: Path | None,
        kept: bool = False,
        environ: Mapping[str, str] | None = None,
        log_bytes: int = LOG_BYTES,
        look_at_log_s: float = _LOOK_AT_LOG_S,
        start: Callable[[BinaryIO | None], Started] | None = None,
    ) -> None:
        """Start it; OSError when it cannot be started at all. Without `log_path` its output goes where ours does.

        `start`: another way than to run the command, given the file for what it says.
        """
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self.log_path = log_path
        self._log_bytes = log_bytes
        self._look_at_log_s = look_at_log_s
        self._rotation: asyncio.Future[None] | None = None
        self._kept = kept
        with _open_log(log_path, log_bytes) if log_path is not None else contextlib.nullcontext() as out:
            self._log_start = out.tell() if out is not None else 0
            self._started = start(out) if start is not None else Spawned(argv, out=out, environ=environ)
        self.pid = self._started.pid
        self._pidfd = self._started.pidfd
        if self._pidfd is not None:
            self._loop.add_reader(self._pidfd, self._on_exit)
        else:
            threading.Thread(target=self._wait_in_thread, name=f"wait-{self.pid}", daemon=True).start()
        self._log_timer = self._loop.call_later(look_at_log_s, self._look_at_log)
        self._started.tell(first_line)

    @property
    def running(self) -> bool:
        return not self.exited.done()

    def log_tail(self, lines: int = 20) -> str:
        """The last lines that this child wrote."""
        return "" if self.log_path is None else read_tail(self.log_path, self._log_start, lines)

    def kill(self) -> None:
        """Have it killed at once, with all that it started."""
        if not self.running:
            return
        if self._kept:
            self._started.let_go()
            # Should the keeper itself be stuck; a timer that outlives the child does nothing.
            self._loop.call_later(_KEEPER_S, self._kill_group)
        else:
            self._kill_group()

    async def stop(self, *, grace_s: float) -> int | None:
        """End the child within `grace_s` plus a bounded wait; its return code, None if even SIGKILL did not help."""
        try:
            if self.running and grace_s > 0:
                self._started.send_signal(signal.SIGTERM)
                await asyncio.wait([self.exited], timeout=grace_s)
        finally:
            # Also when cancelled while waiting: a child must not survive its owner.
            self.kill()
        await asyncio.wait([self.exited], timeout=KILL_WAIT_S)
        if self.running:
            log.error("process.unkillable", pid=self.pid)
            return None
        return self.exited.result()

    def _kill_group(self) -> None:
        if self.running:
            self._started.kill_group()

    def _on_exit(self) -> None:
        """The child ended; called once, on the loop."""
        self._log_timer.cancel()
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        code = self._started.reap()
        self._started.let_go()
        if not self.exited.done():
            self.exited.set_result(code)

    def _look_at_log(self) -> None:
        """Begin a new log file when the present one is full. The child keeps writing to it, so it is copied and emptied."""
        self._log_timer = self._loop.call_later(self._look_at_log_s, self._look_at_log)
        copying = self._rotation is not None and not self._rotation.done()
        with contextlib.suppress(OSError):
            if self.log_path is not None and not copying and self.log_path.stat().st_size > self._log_bytes:
                self._log_start = 0
                self._rotation = self._loop.run_in_executor(None, _rotate, self.log_path)

    def _wait_in_thread(self) -> None:
        """Where there are no process descriptors, a thread waits without reaping."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._on_exit)


def write_line(pipe: IO[bytes], line: bytes) -> None:
    """Hand a line over; nobody waits for the other end to read it."""
    with contextlib.suppress(AttributeError, OSError):
        # So that the whole line fits; Linux only, 1 MB at most.
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, max(len(line), _PIPE_BYTES))
    with contextlib.suppress(BrokenPipeError):
        pipe.write(line)
        pipe.flush()


def read_tail(path: Path, start: int, lines: int) -> str:
    """The last lines of a log file behind a position."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start, end - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def describe_exit(code: int | None) -> str:
    """A return code in words."""
    if code is None:
        return "still runs"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _open_log(path: Path, max_bytes: int) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        # A server that is restarted for ever must not fill the disk with what it says at its end.
        if path.stat().st_size > max_bytes:
            path.replace(path.with_suffix(".old.log"))
    file = path.open("ab")
    file.seek(0, os.SEEK_END)
    return file


def _rotate(path: Path) -> None:
    """Off the loop. Lines that arrive between the copy and the cut are lost; the file stays open in the child."""
    try:
        shutil.copyfile(path, path.with_suffix(".old.log"))
        os.truncate(path, 0)
    except OSError as error:
        log.warning("process.log_not_rotated", path=str(path), why=str(error))


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
