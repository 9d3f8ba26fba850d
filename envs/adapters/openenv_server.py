"""An OpenEnv server of our own: the app of an installed environment, started beside the env server.

It listens on a Unix socket in a private directory, so there is no port to collide on and nobody else gets in. What it
writes goes where the env server writes. One that ended is started again by the next rollout that needs it; at
the end it is asked to stop, then killed.
"""

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import aiohttp
import structlog

from envs.backoff import backoff_s
from envs.errors import EnvironmentLoadError

INSTALL = "pip install 'rollout-orchestrator[openenv]'"

log = structlog.get_logger()

_STOP_S = 2.0


class LocalServer:
    """The app "module:attribute", served by this interpreter's uvicorn."""

    def __init__(self, app: str) -> None:
        for needed in ("openenv", "uvicorn"):
            if importlib.util.find_spec(needed) is None:
                raise EnvironmentLoadError(
                    f"openenv::{app}: {needed} is not installed for this interpreter; {INSTALL}, or set `python` "
                    "to one that has it, or give the URL of a server that runs elsewhere"
                )
        refuse_other_releases(_installed_release())
        self._app = app
        self._home = tempfile.TemporaryDirectory(prefix="openenv-")
        self._socket = Path(self._home.name) / "socket"
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def connector(self) -> aiohttp.BaseConnector:
        """How to reach it, whatever host a URL names."""
        return aiohttp.UnixConnector(str(self._socket), limit=0)

    async def ensure(self, http: aiohttp.ClientSession, base_url: str) -> None:
        """Start it unless it runs; returns when it answers. An app that ends instead is a RuntimeError."""
        async with self._starting:
            if self.running:
                return
            if self._process is not None:
                log.warning("openenv.server_ended", app=self._app, exit_code=self._process.returncode)
            self._socket.unlink(missing_ok=True)
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "uvicorn", self._app),
                *("--uds", str(self._socket), "--log-level", "warning", "--no-access-log"),
                env={"ENABLE_WEB_INTERFACE": "false", **os.environ},
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
            )
            log.info("openenv.server_started", app=self._app, pid=self._process.pid)
            await self._answers(http, base_url)

    async def _answers(self, http: aiohttp.ClientSession, base_url: str) -> None:
        assert self._process is not None
        attempt = 0
        while True:
            attempt += 1
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with http.get(f"{base_url}/health") as response:
                    if response.status == 200:
                        return
            pause_s = backoff_s(attempt, first_s=0.05, max_s=0.5)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    code = await self._process.wait()
                    raise RuntimeError(
                        f"openenv::{self._app}: its server ended with exit code {code} instead of serving"
                    )

    async def wait_ended(self) -> None:
        """After a lost connection: a server that died is known to have, before the next rollout looks for it."""
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await self._process.wait()

    async def aclose(self) -> None:
        """End it, within a bound."""
        process = self._process
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(_STOP_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        self._home.cleanup()


def refuse_other_releases(version: str) -> None:
    """Raise EnvironmentLoadError unless the adapter fits the release; empty where `openenv` is of another distribution."""
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) != (0, 3):
        shown = f"openenv-core {version}" if version else "a package openenv that is not of openenv-core"
        raise EnvironmentLoadError(
            f"{shown} is not supported, openenv-core 0.3 is; {INSTALL} in a virtualenv of its own and set `python` to it"
        )


def _installed_release() -> str:
    try:
        return importlib.metadata.version("openenv-core")
    except importlib.metadata.PackageNotFoundError:
        return ""
