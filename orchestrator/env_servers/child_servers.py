"""Servers as processes of this machine: command line, sockets, search path, log files.

They listen on `ipc://` sockets in a private directory with a short path, which only the user can enter and which goes
away with the launcher. Their instructions travel over standard input, never in arguments. They find our `envs` package
under any interpreter through a directory that holds nothing but a link to it, and the modules that a configuration
names behind it (`envs.importing.module_path`). Where they can be, they are forked from a template (`templates`).
"""

import asyncio
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import structlog

from envs import keeper
from envs.importing import module_path
from orchestrator.env_servers.launcher import instructions
from orchestrator.env_servers.private_directory import PrivateDirectory
from orchestrator.env_servers.processes import ChildProcess, Started, describe_exit
from orchestrator.env_servers.spec import EnvSpec

log = structlog.get_logger()

_OWN_LEASE_S = 600.0
"""Servers of our own end with us, so a long sleep of this machine need not cost their rollouts."""


class ChildServer(ChildProcess):
    """A server's process, which listens where it was told to."""

    node = ""

    def __init__(
        self,
        start: Callable[[BinaryIO | None], Started],
        *,
        address: str,
        first_line: bytes,
        log_path: Path,
    ) -> None:
        super().__init__([], first_line=first_line, log_path=log_path, kept=True, start=start)
        self.address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.address.set_result(address)

    def ending(self) -> str:
        return f"its process {describe_exit(self.exited.result())}"


class ProcessLauncher:
    """Starts children of this process."""

    keys = None
    lease_s = _OWN_LEASE_S

    def __init__(self, spec: EnvSpec) -> None:
        self._spec = spec
        self.python = spec.python or sys.executable
        self._directory = PrivateDirectory()
        self._templates = spec.templates
        self._templates.join()
        self._closed = False

    async def prepare(self) -> None:
        """Wait for the template that the servers are forked from, if there can be one."""
        await self._templates.prepare(self.python, self._environ())

    def start(self, server: str, life: int) -> ChildServer:
        spec = self._spec
        # A path of its own for every life, so that nobody talks to the socket of a dead one.
        address = f"ipc://{self._directory.path}/{server.rpartition('-')[2]}.{life}"
        child = ChildServer(
            lambda out: self._templates.start(
                server_command(self.python, "-P"), python=self.python, environ=self._environ(), out=out
            ),
            address=address,
            first_line=instructions(spec, server, bind=address),
            log_path=server_log(spec, server),
        )
        log.info("env.server_started", env=spec.name, server=server, pid=child.pid, life=life)
        return child

    async def aclose(self) -> None:
        """Remove the private directory, and let go of the templates."""
        self._directory.remove()
        if not self._closed:
            self._closed = True
            await self._templates.leave()

    def _environ(self) -> dict[str, str]:
        # Our `envs` comes first, from a directory that holds nothing else, so that another interpreter finds
        # it and a directory of that name in the working directory does not hide it.
        library, outside = str(self._templates.library), os.environ.get("PYTHONPATH", "")
        path = [library, *module_path(*self._spec.module_dirs), outside]
        return {
            **{name: value for name, value in os.environ.items() if name not in self._spec.withheld},
            "PYTHONHASHSEED": hash_seed(),
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "PYTHONUNBUFFERED": "1",
        }


def server_log(spec: EnvSpec, server: str) -> Path:
    """The file for what a server says."""
    return spec.log_dir / f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', server)}.log"


def hash_seed() -> str:
    """`PYTHONHASHSEED` of every server: what follows from hashes is the same in all; the user may choose another number."""
    chosen = os.environ.get("PYTHONHASHSEED", "")
    return chosen if chosen.isdecimal() else "0"


def server_command(python: str, *options: str) -> list[str]:
    """The command line of an env server under an interpreter, with the keeper that ends whatever it leaves."""
    return [python, "-I", "-S", keeper.__file__, python, *options, "-m", "envs.server"]
