"""Stands between an env server and whoever started it, so that nothing of the server outlives either.

Run as `python -I -S keeper.py COMMAND …`, in a session of its own, with the lifeline as standard input: starts the
command with the same input, passes signals on, and ends as the command ends. A process that a template forked (see
`envs.template`) becomes a keeper by calling `keep`, and what it keeps is a fork of itself. When the command has ended, or when
the lifeline has (its other end is held by the parent alone, so this is the parent's end), everything that is left
is killed. On Linux the keeper is the reaper of all that descends from it: a process whose own parent has gone comes
to the keeper, also one in a session of its own, so none escapes. Elsewhere the process group is all that is reached.
Never reads the lifeline, which brings the command its instructions. Imports nothing beyond the standard library.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIFELINE = 0
_ROUNDS = 200
_ROUND_MS = 50
_NOT_STARTED = 127


def keep(command: Sequence[str] = ()) -> None:
    """Start the command, keep it, and end this process as the command ended. Without one it returns in the new process."""
    own = os.getpid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wakes, waker = os.pipe()
    os.set_blocking(wakes, False)
    os.set_blocking(waker, False)
    passed_on = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
    for number in passed_on:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(waker)
    child = os.fork()
    if child == 0:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != own:
            os._exit(_NOT_STARTED)
        if command:
            _become(command)
        # As a new program would have it, also where whoever started all of it had some of them ignored.
        signal.set_wakeup_fd(-1)
        for number in passed_on:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.close(wakes)
        os.close(waker)
        return
    watched = select.poll()
    watched.register(_LIFELINE, 0)  # its end is told even to those who ask for nothing
    watched.register(wakes, select.POLLIN)
    status = None
    while status is None:
        for descriptor, _ in watched.poll():
            if descriptor == _LIFELINE:
                watched.unregister(_LIFELINE)
                _send(child, signal.SIGKILL)
            else:
                for received in os.read(wakes, 4096):  # each byte is the number of a signal
                    if received != signal.SIGCHLD:
                        _send(child, received)
        status = _reap().get(child)
    _end_rest(watched)
    _end_like(status)


def _become(command: Sequence[str]) -> NoReturn:
    """In the new process: run the command."""
    try:
        os.execvp(command[0], list(command))  # noqa: S606  the command of our own parent
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)  # noqa: T201  there is no log yet
    os._exit(_NOT_STARTED)


def _end_rest(watched: select.poll) -> None:
    """Kill what is left, round by round: the children of what was killed become ours."""
    if sys.platform != "linux":
        os.killpg(0, signal.SIGKILL)
    for _ in range(_ROUNDS):
        for pid in _children():
            _send(pid, signal.SIGKILL)
        _reap()
        if not _children():
            return
        watched.poll(_ROUND_MS)


def _children() -> list[int]:
    own = os.getpid()
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{own}/children").read_text().split()]
    except OSError:
        return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat") if _parent(path) == own]


def _parent(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _reap() -> dict[int, int]:
    """Take leave of those who have ended; their wait status by process id."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if not pid:
            return ended
        ended[pid] = status


def _send(pid: int, number: int) -> None:
    # It may have ended, or have become another user's.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _end_like(status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        signal.pause()
    os._exit(code)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    keep(sys.argv[1:])
