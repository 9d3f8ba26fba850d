"""A process that has imported what every env server imports, and from which servers are forked.

`python -m envs.server --template`, with a socket as standard input. An order on it brings the two descriptors of a server,
its lifeline and its log. The template forks a keeper (`envs.keeper`) in a session of its own, and that forks the server, which
goes on as a server that was spawned does: it has the same interpreter, environment, path and limits, because the template was
started with them, and no code of an environment ran before. The template tells how each keeper ended, and ends with its socket.
It never has a thread, an event loop or a ZMQ context, so that there is nothing that a fork could break; one that finds
another thread in itself says so and ends. Linux only.
"""

import contextlib
import gc
import os
import select
import signal
import socket
import sys
from pathlib import Path

from envs.keeper import keep

READY, FORKED, REFUSED, ENDED = "ready", "forked", "refused", "ended"
"""What a template says: the word, a process id (of a refusal: the error's number), a return code."""

MESSAGE_BYTES = 64


def become_server() -> None:
    """Fork servers as they are ordered, and return in each of them."""
    control = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    _import_the_loop()
    _forbid_threads()
    gc.collect()
    gc.freeze()  # what is here stays, in all of them: a collection would only copy the pages
    _Template(control).run()
    _seed_anew()


class _Template:
    """The orders that come in, and the keepers that have not ended."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._kept: dict[int, int] = {}
        """Keepers by process descriptor."""
        self._watched = select.poll()
        self._watched.register(control, select.POLLIN)

    def run(self) -> None:
        """Until the service goes, which ends this process; returns in a server."""
        self._say(READY)
        while True:
            for descriptor, _ in self._watched.poll():
                if descriptor != self._control.fileno():
                    self._report(descriptor)
                elif self._take_order():
                    return

    def _take_order(self) -> bool:
        """Fork a server; whether this is the new one."""
        order, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
        if not order:
            sys.exit(0)
        try:
            pid = os.fork()
        except OSError as error:
            self._say(REFUSED, error.errno or 0)
        else:
            if pid == 0:
                self._leave_behind()
                _take_over(*descriptors)
                keep()
                return True
            descriptor = os.pidfd_open(pid)
            self._kept[descriptor] = pid
            self._watched.register(descriptor, select.POLLIN)
            self._say(FORKED, pid, descriptor=descriptor)
        for descriptor in descriptors:
            os.close(descriptor)
        return False

    def _leave_behind(self) -> None:
        self._control.close()
        for descriptor in self._kept:
            os.close(descriptor)

    def _report(self, descriptor: int) -> None:
        """A keeper has ended: what it left in its group ends too, before its id can be taken by another group."""
        self._watched.unregister(descriptor)
        os.close(descriptor)
        pid = self._kept.pop(descriptor)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        self._say(ENDED, pid, os.waitstatus_to_exitcode(status))

    def _say(self, word: str, number: int = 0, code: int = 0, *, descriptor: int | None = None) -> None:
        message = f"{word} {number} {code}".encode()
        try:
            socket.send_fds(self._control, [message], [] if descriptor is None else [descriptor])
        except (BrokenPipeError, ConnectionResetError):
            sys.exit(0)  # nobody is left to tell; the servers see the end of their lifelines


def _take_over(lifeline: int, log: int) -> None:
    """As a new process has it: a session of its own, the lifeline as input, the log for what it says."""
    os.setsid()
    for given, descriptor in ((lifeline, 0), (log, 1), (log, 2)):
        os.dup2(given, descriptor)
    os.close(lifeline)
    os.close(log)


def _seed_anew() -> None:
    """Give a server its own chance: `random` sees to it after a fork, numpy's global generator does not."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _import_the_loop() -> None:
    """What a server imports only when it runs."""
    with contextlib.suppress(ImportError):
        import uvloop  # noqa: F401


def _forbid_threads() -> None:
    """End where there is another thread: what it holds at the moment of a fork stays held for ever in the new process."""
    # Libraries that are prepared for a fork end their threads before it, so look after one.
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    if len(threads) > 1:
        sys.exit(f"no template: there are other threads in this process ({', '.join(threads)})")
