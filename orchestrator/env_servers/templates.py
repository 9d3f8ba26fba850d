"""Servers of this machine that are forked from a template instead of started as programs of their own.

What a server imports costs some 0.4 s of CPU; a template (`envs.template`) pays it once for all servers that have the same
interpreter, environment variables and working directory, of whichever env. Where there is no template, because this is not
Linux, because it did not become ready or because it has died, a server is spawned: slower, and otherwise the same. Servers of
a template that died go on. Templates belong to the environments of a run together, and end with the last launcher that uses them.
"""

import asyncio
import contextlib
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import structlog

import envs
from envs.template import ENDED, FORKED, MESSAGE_BYTES, READY, REFUSED
from orchestrator.env_servers.private_directory import PrivateDirectory
from orchestrator.env_servers.processes import ChildProcess, Spawned, Started, describe_exit, write_line

log = structlog.get_logger()

_READY_S = 30.0
"""How long servers wait for a template; what it imports takes well below a second."""

_ANSWER_S = 5.0
"""How long a template may take for a fork, which takes it milliseconds."""

_END_S = 2.0

Key = tuple[str, frozenset[tuple[str, str]], Path]


class Templates:
    """The templates of a run: one for each interpreter and environment, while somebody uses them."""

    def __init__(self) -> None:
        self._users = 0
        self._directory: PrivateDirectory | None = None
        self._templates: dict[Key, Template] = {}
        self._useless: set[Key] = set()

    @property
    def library(self) -> Path:
        """A directory that holds nothing but our `envs`, for the search path of any interpreter."""
        assert self._directory is not None, "join() comes first"
        return self._directory.path / "lib"

    def join(self) -> None:
        """One user more."""
        self._users += 1
        if self._directory is None:
            self._directory = PrivateDirectory()
            self.library.mkdir()
            (self.library / "envs").symlink_to(Path(envs.__file__).parent)

    async def leave(self) -> None:
        """One user less; the last one ends the templates."""
        self._users -= 1
        if self._users or self._directory is None:
            return
        directory, self._directory = self._directory, None
        templates, self._templates = self._templates, {}
        self._useless.clear()
        for template in templates.values():
            await template.stop(grace_s=0)
        directory.remove()

    async def prepare(self, python: str, environ: Mapping[str, str]) -> None:
        """Have a template ready for servers like that, or find that there will be none."""
        template = self._find(python, environ)
        if template is not None:
            milestones: list[asyncio.Future[Any]] = [template.ready, template.exited]
            await asyncio.wait(milestones, timeout=_READY_S, return_when=asyncio.FIRST_COMPLETED)
            if not template.ready.done() and template.running:
                template.give_up(f"not ready in {_READY_S:g} s")
                await asyncio.wait([template.exited], timeout=_END_S)

    def start(
        self, argv: Sequence[str], *, python: str, environ: Mapping[str, str], out: BinaryIO | None
    ) -> Started:
        """A server with its keeper: forked where a template is ready, else spawned by the command. OSError: neither can be."""
        template = self._find(python, environ)
        if template is not None and template.ready.done() and template.running and out is not None:
            forked = template.fork(out)
            if forked is not None:
                return forked
        return Spawned(argv, out=out, environ=environ)

    def _find(self, python: str, environ: Mapping[str, str]) -> "Template | None":
        """The template for servers like that, which may not be ready yet."""
        if sys.platform != "linux":
            return None
        key = (python, frozenset(environ.items()), Path.cwd())
        if key in self._useless:
            return None
        template = self._templates.get(key)
        if template is None and self._directory is not None:
            log_path = self._directory.path / f"template-{len(self._templates)}.log"
            try:
                template = self._templates[key] = Template(python, environ, log_path)
            except OSError:
                self._useless.add(key)  # spawning a server will say the same
                return None
            template.exited.add_done_callback(partial(self._on_end, key, template))
        return template

    def _on_end(self, key: Key, template: "Template", exited: asyncio.Future[int]) -> None:
        if self._templates.get(key) is not template:
            return
        del self._templates[key]
        if not template.ready.done():
            self._useless.add(key)
        why = template.why or describe_exit(exited.result())
        said = template.log_tail(lines=1)
        effect = "servers that run go on; " + (
            "the next are forked from another one" if template.ready.done() else "each imports for itself"
        )
        log.warning("env.template_lost", python=key[0], why=why, said=said, effect=effect)


class Template(ChildProcess):
    """One template's process, which forks when it is asked to. `ready` is set once it can."""

    def __init__(self, python: str, environ: Mapping[str, str], log_path: Path) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.why = ""
        self._codes: dict[int, int] = {}
        """Return codes of servers that have ended and that nobody has asked for yet."""
        self._forked: tuple[int, int] | OSError | None = None
        argv = [python, "-P", "-m", "envs.server", "--template"]
        try:
            super().__init__(
                argv,
                first_line=b"",
                log_path=log_path,
                start=lambda out: _Controlled(argv, out=out, environ=environ, ours=self._socket, its=other),
            )
        except OSError:
            self._socket.close()
            raise
        finally:
            other.close()
        self._loop.add_reader(self._socket.fileno(), self._hear)
        log.info("env.template_started", python=python, pid=self.pid)

    def fork(self, out: BinaryIO) -> "Forked | None":
        """A new server with its keeper; None when the template is of no use any more. OSError: there cannot be one."""
        reading, writing = os.pipe()
        lifeline = os.fdopen(writing, "wb")
        self._forked = None
        try:
            socket.send_fds(self._socket, [b"fork"], [reading, out.fileno()])
            while self._forked is None:
                self._receive(_ANSWER_S)
        except OSError as error:
            self.give_up(f"it does not answer: {error}")
        finally:
            os.close(reading)
        if isinstance(self._forked, tuple):
            return Forked(self, *self._forked, lifeline=lifeline)
        # Should the template fork nevertheless, its keeper finds the lifeline at its end.
        lifeline.close()
        if isinstance(self._forked, OSError):
            raise self._forked
        return None

    def code_of(self, pid: int) -> int:
        """The return code of a server that has ended; as after SIGKILL when the template did not live to tell it."""
        with contextlib.suppress(OSError):
            while self.running and pid not in self._codes:
                self._receive(_ANSWER_S)
        return self._codes.pop(pid, -signal.SIGKILL)

    def give_up(self, why: str) -> None:
        """End it: it is of no use."""
        self.why = self.why or why
        self._kill_group()

    def _on_exit(self) -> None:
        with contextlib.suppress(OSError):
            while True:  # what it said last
                self._receive(0)
        self._loop.remove_reader(self._socket.fileno())
        super()._on_exit()

    def _hear(self) -> None:
        try:
            self._receive(0)
        except BlockingIOError:
            return  # somebody could not wait for it
        except OSError:
            self._loop.remove_reader(self._socket.fileno())  # it is gone, as its exit tells

    def _receive(self, wait_s: float) -> None:
        """Take one message; OSError when there is none, or will be none any more."""
        if wait_s:
            readable = select.poll()  # not select(), which knows a thousand descriptors only
            readable.register(self._socket, select.POLLIN)
            readable.poll(1000 * wait_s)
        message, descriptors, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if not message:
            raise ConnectionResetError("it has gone")
        word, number, code = message.decode().split()
        if word == READY and not self.ready.done():
            self.ready.set_result(None)
        elif word == FORKED:
            self._forked = (int(number), descriptors[0])
        elif word == REFUSED:
            self._forked = OSError(int(number), os.strerror(int(number)))
        elif word == ENDED:
            self._codes[int(number)] = int(code)


class Forked:
    """A keeper, and by it a server, that a template forked. Its parent is the template, so its end is known from there."""

    def __init__(self, template: Template, pid: int, pidfd: int, *, lifeline: BinaryIO) -> None:
        self._template = template
        self.pid = pid
        self.pidfd = pidfd
        # The one above is closed when it has ended; signals may be wanted up to then and not behind it.
        self._signals = os.dup(pidfd)
        self._lifeline = lifeline

    def tell(self, line: bytes) -> None:
        write_line(self._lifeline, line)

    def let_go(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._lifeline.close()

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._signals, number)

    def kill_group(self) -> None:
        """The keeper alone: the server is killed with it by the kernel, the rest of the group by the template."""
        self.send_signal(signal.SIGKILL)

    def reap(self) -> int:
        os.close(self._signals)
        return self._template.code_of(self.pid)


class _Controlled(Spawned):
    """A process whose standard input is a socket; our end of it is its lifeline."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        out: BinaryIO | None,
        environ: Mapping[str, str],
        ours: socket.socket,
        its: socket.socket,
    ) -> None:
        super().__init__(argv, out=out, environ=environ, stdin=its.fileno())
        self._socket = ours

    def tell(self, line: bytes) -> None:
        """Orders come later."""

    def let_go(self) -> None:
        self._socket.close()
