"""How env servers come to be: the seam between supervision and the places where servers run.

A launcher starts server n of an environment and gives back its process, whose address is known only once it listens,
whose end is told, and which can be stopped. `child_servers` starts processes of this machine, `on_ray` actors of a Ray
cluster. Servers at configured addresses are not ours: they have no process. Supervision, restart budgets and links are
the same for all.
"""

import asyncio
from pathlib import Path
from typing import Protocol

import msgspec

from envs.curve import ClientKeys, ServerKeys
from envs.server_spec import ServerSpec
from orchestrator.env_servers.spec import EnvSpec


class ServerProcess(Protocol):
    """One server that a launcher started, from its start to its end."""

    @property
    def address(self) -> asyncio.Future[str]:
        """Where it listens; of a server that ends before it does, never known."""

    @property
    def exited(self) -> asyncio.Future[int]:
        """Its return code (negative: the signal), once it has ended; as after SIGKILL where nobody saw how it ended."""

    @property
    def running(self) -> bool: ...
    @property
    def node(self) -> str:
        """The machine that it runs on; empty on this one, and before it is known."""

    @property
    def log_path(self) -> Path | None: ...
    def log_tail(self, lines: int = 20) -> str:
        """The last lines that it wrote."""

    def ending(self) -> str:
        """How it ended, in words that follow its name."""

    async def stop(self, *, grace_s: float) -> int | None:
        """End it within `grace_s` plus a bounded wait; its return code, None if it may still be there."""


class Launcher(Protocol):
    """Starts the servers of one environment in one kind of place."""

    @property
    def keys(self) -> ClientKeys | None:
        """What a link to its servers needs; None where nobody else can reach them."""

    @property
    def lease_s(self) -> float:
        """How long its servers go on without hearing from us."""

    @property
    def python(self) -> str:
        """Their interpreter, as messages name it."""

    async def prepare(self) -> None:
        """What takes long and all its servers share; called once, before the first is started."""

    def start(self, server: str, life: int) -> ServerProcess:
        """Start a server, under another `life` each time; OSError when it cannot be started at all."""

    async def aclose(self) -> None:
        """Give back what the launcher itself holds; its servers have been stopped."""


def instructions(spec: EnvSpec, server: str, *, bind: str, keys: ServerKeys | None = None) -> bytes:
    """What a server is told over its standard input."""
    told = ServerSpec(
        name=server,
        env=spec.name,
        id=spec.id,
        bind=bind,
        args=dict(spec.args),
        splits=[spec.split],
        capacity=spec.capacity,
        seed=spec.seed,
        key_variables=[spec.api_key_env] if spec.api_key_env else [],
        curve_secret=keys.own.secret if keys else "",
        curve_public=keys.own.public if keys else "",
        curve_clients=list(keys.clients) if keys else [],
        log_level=spec.log_level,
        log_format=spec.log_format,
        report=str(spec.report or ""),
    )
    return msgspec.json.encode(told) + b"\n"
