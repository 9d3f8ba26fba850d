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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

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
    ) -> None:
        """Start it; OSError when it cannot be started at all. Without `log_path` its output goes where ours does."""
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self.log_path = log_path
        self._log_bytes = log_bytes
        self._look_at_log_s = look_at_log_s
        self._rotation: asyncio.Future[None] | None = None
        self._kept = kept
        with _open_log(log_path, log_bytes) if log_path is not None else contextlib.nullcontext() as out:
            self._log_start = out.tell() if out is not None else 0
            self._popen = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT if out is not None else None,
                env=None if environ is None else dict(environ),
                start_new_session=True,
            )
        self.pid = self._popen.pid
        self._pidfd = _open_pidfd(self.pid)
        if self._pidfd is not None:
            self._loop.add_reader(self._pidfd, self._on_exit)
        else:
            threading.Thread(target=self._wait_in_thread, name=f"wait-{self.pid}", daemon=True).start()
        self._log_timer = self._loop.call_later(look_at_log_s, self._look_at_log)
        self._write(first_line)

    @property
    def running(self) -> bool:
        return not self.exited.done()

    def log_tail(self, lines: int = 20) -> str:
        """The last lines that this child wrote."""
        if self.log_path is None:
            return ""
        try:
            with self.log_path.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, end - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def kill(self) -> None:
        """Have it killed at once, with all that it started."""
        if not self.running:
            return
        if self._kept:
            self._close_lifeline()
            # Should the keeper itself be stuck; a timer that outlives the child does nothing.
            self._loop.call_later(_KEEPER_S, self._kill_group)
        else:
            self._kill_group()

    async def stop(self, *, grace_s: float) -> int | None:
        """End the child within `grace_s` plus a bounded wait; its return code, None if even SIGKILL did not help."""
        try:
            if self.running and grace_s > 0:
                with contextlib.suppress(ProcessLookupError):
                    self._popen.send_signal(signal.SIGTERM)
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
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _close_lifeline(self) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()

    def _write(self, line: bytes) -> None:
        """Hand over the instructions; a child that died already is reported by its exit."""
        assert self._popen.stdin is not None
        with contextlib.suppress(AttributeError, OSError):
            # So that the whole line fits and nobody waits for the child to read it; Linux only, 1 MB at most.
            fcntl.fcntl(self._popen.stdin, fcntl.F_SETPIPE_SZ, max(len(line), _PIPE_BYTES))
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.write(line)
            self._popen.stdin.flush()

    def _on_exit(self) -> None:
        """The child ended; called once, on the loop."""
        self._log_timer.cancel()
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        # Before the child is reaped its id cannot be taken by another group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        code = self._popen.wait()
        self._close_lifeline()
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
