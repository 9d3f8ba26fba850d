"""The way to a Ray cluster, and servers on its nodes as the service sees them.

The way is a driver process (`driver`), shared by all environments of a run: started when the first server is, started
anew after it was lost, and ended when the last environment is done with it. With the driver its servers end.
"""

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import structlog
import zmq

import envs
from envs import keeper
from envs.drained import DrainedSocket
from orchestrator.env_servers.on_ray.messages import (
    Connected,
    DriverSpec,
    Ended,
    Listening,
    Start,
    Stop,
    ToDriver,
    ToService,
    Unusable,
)
from orchestrator.env_servers.private_directory import PrivateDirectory
from orchestrator.env_servers.processes import (
    KILL_WAIT_S,
    LOG_BYTES,
    ChildProcess,
    describe_exit,
    read_tail,
)

log = structlog.get_logger()

_CONNECT_WITHIN_S = 100.0
"""How long a driver may take to import Ray and to reach a cluster, or to start one: longer than Ray's own patience with
three local starts, and less than a server has to be ready. One that hangs would keep its successors from trying."""

_DRIVER_GRACE_S = 10.0
"""How long a driver may take to leave its cluster, or to end a local one."""


class RayServer:
    """One server on a node, from its start to its end."""

    def __init__(self, cluster: "RayCluster", key: int, log_path: Path) -> None:
        loop = asyncio.get_running_loop()
        self._cluster = cluster
        self._key = key
        self._why = ""
        self._log_start = log_path.stat().st_size if log_path.exists() else 0
        self.log_path = log_path
        self.address: asyncio.Future[str] = loop.create_future()
        self.exited: asyncio.Future[int] = loop.create_future()
        self.node = ""

    @property
    def running(self) -> bool:
        return not self.exited.done()

    def log_tail(self, lines: int = 20) -> str:
        return read_tail(self.log_path, self._log_start, lines)

    def ending(self) -> str:
        return self._why or f"its process {describe_exit(self.exited.result())}"

    async def stop(self, *, grace_s: float) -> int | None:
        if self.running:
            self._cluster.stop_server(self._key, grace_s)
            await asyncio.wait([self.exited], timeout=grace_s + KILL_WAIT_S)
        if self.running:
            log.error("ray.server_not_stopped", node=self.node, note="it ends with its lease or its node")
            return None
        return self.exited.result()

    def on_listening(self, told: Listening) -> None:
        self.node = told.node
        if not self.address.done():
            self.address.set_result(told.address)

    def on_ended(self, code: int | None, why: str) -> None:
        self._why = why
        if self.running:
            self.exited.set_result(-signal.SIGKILL if code is None else code)


class RayCluster:
    """The way to a cluster, with a driver process while somebody uses it."""

    def __init__(
        self,
        *,
        address: str | None,
        runtime_env: Mapping[str, Any],
        withheld: frozenset[str],
        log_dir: Path,
        connect_within_s: float = _CONNECT_WITHIN_S,
    ) -> None:
        """`withheld`: environment variables that the driver does not get, and so no server on a local cluster."""
        self._address = address
        self._runtime_env = runtime_env
        self._withheld = withheld
        self._log_dir = log_dir
        self._connect_within_s = connect_within_s
        self._users = 0
        self._keys = itertools.count()
        self._servers: dict[int, RayServer] = {}
        self._driver: _Driver | None = None

    def join(self) -> None:
        """One user more."""
        self._users += 1

    async def leave(self) -> None:
        """One user less; the last one ends the driver."""
        self._users -= 1
        if not self._users and self._driver is not None:
            driver, self._driver = self._driver, None
            await driver.aclose()

    def start_server(self, **order: Any) -> RayServer:
        """Have a server started; see `Start`."""
        if self._driver is None or not self._driver.running:
            self._driver = self._start_driver()
        key = next(self._keys)
        server = self._servers[key] = RayServer(self, key, Path(order["log"]))
        self._driver.send(Start(key=key, **order))
        return server

    def stop_server(self, key: int, grace_s: float) -> None:
        """Have a server ended."""
        if self._driver is not None:
            self._driver.send(Stop(key, grace_s))

    def _start_driver(self) -> "_Driver":
        told = DriverSpec(
            control="", address=self._address, runtime_env=dict(self._runtime_env), log_bytes=LOG_BYTES
        )
        environ = {name: value for name, value in os.environ.items() if name not in self._withheld}
        # Not the working directory, where a folder may be called ray; our own package wherever it is.
        path = [os.environ.get("PYTHONPATH", ""), str(Path(envs.__file__).parents[1])]
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        return _Driver(told, environ, self._log_dir / "ray.log", self, self._connect_within_s)

    def on_message(self, message: Listening | Ended) -> None:
        """What the driver tells of a server."""
        if isinstance(message, Listening):
            self._servers[message.key].on_listening(message)
        else:
            self._servers.pop(message.key).on_ended(message.code, message.why)

    def on_driver_lost(self, why: str) -> None:
        """With the driver its job ends, and with that all servers."""
        servers, self._servers = self._servers, {}
        for server in servers.values():
            server.on_ended(None, why)


class _Driver:
    """One life of the driver process and the socket to it."""

    def __init__(
        self,
        spec: DriverSpec,
        environ: Mapping[str, str],
        log_path: Path,
        cluster: RayCluster,
        connect_within_s: float,
    ) -> None:
        self._cluster = cluster
        self._why = ""
        self._directory = PrivateDirectory()
        control = f"ipc://{self._directory.path}/ray"
        self._process = ChildProcess(
            [
                sys.executable,
                "-I",
                "-S",
                keeper.__file__,
                sys.executable,
                "-P",
                "-m",
                f"{__package__}.driver",
            ],
            kept=True,
            first_line=msgspec.json.encode(msgspec.structs.replace(spec, control=control)) + b"\n",
            log_path=log_path,
            environ=environ,
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._decoder = msgspec.json.Decoder(ToService)
        # It is we who connect, so that what is sent before the driver listens waits for it.
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.connect(control)
        self._socket = DrainedSocket(socket, self._on_frames, loop=asyncio.get_running_loop())
        self._process.exited.add_done_callback(self._on_exit)
        where = f"at {spec.address}" if spec.address else "on this machine"
        why = f"Ray {where} has not answered in {connect_within_s:g} s; does the cluster run, and can it be reached?"
        self._deadline = asyncio.get_running_loop().call_later(connect_within_s, self._give_up, why)
        log.info("ray.driver_started", pid=self._process.pid, address=spec.address)

    @property
    def running(self) -> bool:
        return self._process.running

    def send(self, message: ToDriver) -> None:
        if not self._socket.closed:
            self._socket.send([msgspec.json.encode(message)])

    async def aclose(self) -> None:
        """End the driver's job, and the driver."""
        await self._process.stop(grace_s=_DRIVER_GRACE_S)

    def _on_frames(self, frames: list[bytes]) -> None:
        message = self._decoder.decode(frames[0])
        if isinstance(message, Unusable):
            self._give_up(message.why)
        elif isinstance(message, Connected):
            self._deadline.cancel()
        else:
            self._cluster.on_message(message)

    def _give_up(self, why: str) -> None:
        self._why = why
        self._process.kill()

    def _on_exit(self, exited: asyncio.Future[int]) -> None:
        self._deadline.cancel()
        self._socket.close()
        self._context.term()
        self._directory.remove()
        how = f"the Ray driver {describe_exit(exited.result())}; its log: {self._process.log_path}"
        self._cluster.on_driver_lost(self._why or how)
