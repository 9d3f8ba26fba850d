"""The process that speaks to Ray for the service: it starts an actor for every server, and tells what becomes of it.

Ray's import takes seconds, its calls block, and it ends a process that lost its cluster; so none of that happens in the
service. A driver belongs to the service by its lifeline (see `envs.keeper`); when it ends, so does its Ray job, and with
the job every actor and its server. It writes what servers say into their log files.
"""

import asyncio
import contextlib
import importlib
import os
import signal
import sys
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec
import zmq

import envs
from envs.drained import DrainedSocket
from envs.lifeline import Lifeline
from orchestrator.env_servers import private_directory
from orchestrator.env_servers.on_ray import actor
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

_PATIENCE_S = 5.0
"""How long a server may wait for a node before its log says that it does."""

_LOCAL_STARTS = 3

_LISTENING = b"server.listening"
_IDENTITY = ("class_name:", "actor_id:", "namespace:", "pid:")
"""Lines of Ray's messages that mean nothing to a user."""

_NAMED = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
"""Resources that Ray has options of their own for."""


class Driver:
    """Servers by the key of their life. All of it happens on one event loop."""

    def __init__(self, spec: DriverSpec, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._spec = spec
        socket = context.socket(zmq.DEALER)
        socket.bind(spec.control)
        self._socket = DrainedSocket(socket, self._on_message, loop=asyncio.get_running_loop())
        self._decoder = msgspec.json.Decoder(ToDriver)
        self._actors: dict[int, Any] = {}
        self._orders: asyncio.Queue[ToDriver] = asyncio.Queue()

    async def wait_order(self) -> None:
        """Wait until the service has said something, and so can be told something."""
        order = await self._orders.get()
        self._orders.put_nowait(order)

    async def run(self, ray: Any, library: Any) -> None:
        """Do what the service says until cancelled."""
        remote = ray.remote(actor.ServerActor)
        async with asyncio.TaskGroup() as tasks:
            while True:
                order = await self._orders.get()
                if isinstance(order, Stop):
                    if order.key in self._actors:
                        tasks.create_task(_stop(ray, self._actors[order.key], order.grace_s))
                    continue
                try:
                    made = remote.options(**options(order.resources)).remote()
                except Exception as error:  # noqa: BLE001  whatever Ray finds wrong with the resources
                    self.tell(Ended(order.key, None, f"Ray refuses it: {' '.join(str(error).split())[:500]}"))
                    continue
                self._actors[order.key] = made
                tasks.create_task(self._serve(ray, made, library, order))

    def tell(self, message: ToService) -> None:
        self._socket.send([msgspec.json.encode(message)])

    def close(self) -> None:
        """What was told has a moment to arrive."""
        self._socket.close(linger_ms=1000)

    def _on_message(self, frames: list[bytes]) -> None:
        self._orders.put_nowait(self._decoder.decode(frames[0]))

    async def _serve(self, ray: Any, made: Any, library: Any, order: Start) -> None:
        """Follow one server from its actor's start to its end."""
        ended = Ended(order.key, None, "its actor was lost")
        try:
            with ServerLog(Path(order.log), self._spec.log_bytes) as log:
                starting = made.start.remote(
                    library, order.instructions, order.python, order.path, order.environ
                )
                node = await _placed(ray, starting, order, log)
                code, rest, address = None, b"", ""
                while code is None:
                    said, code = await made.output.remote()
                    log.write(said)
                    if address:
                        continue  # no line is looked for any more: a progress bar has no end of a line for days
                    *lines, rest = (rest + said).split(b"\n")
                    for line in lines:
                        if _LISTENING in line and not address and (address := _address_in(line)):
                            self.tell(Listening(order.key, address, node))
            ended = Ended(order.key, code)
        except Exception as error:  # noqa: BLE001  whatever Ray says of an actor or its node that is gone
            ended = Ended(order.key, None, _describe(error))
        finally:
            del self._actors[order.key]
            _kill(ray, made)
            self.tell(ended)


class ServerLog:
    """The file of what one server says, kept within a bound; what cannot be written, on a full disk for example, is lost."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._file: FileIO | None = None

    def __enter__(self) -> "ServerLog":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def write(self, said: bytes) -> None:
        with contextlib.suppress(OSError):
            if self._file is not None and self._file.tell() > self._max_bytes:
                full, self._file = self._file, None
                full.close()
                self._path.replace(self._path.with_suffix(".old.log"))
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("ab", buffering=0)
            self._file.write(said)


def options(resources: dict[str, float]) -> dict[str, Any]:
    """How Ray is asked for an actor. It is not restarted by Ray: the service does that, elsewhere if need be."""
    named = {_NAMED[name]: amount for name, amount in resources.items() if name in _NAMED}
    own = {name: amount for name, amount in resources.items() if name not in _NAMED}
    return {
        "num_cpus": 0,
        **named,
        "resources": own,
        "scheduling_strategy": "SPREAD",
        "max_restarts": 0,
        "max_concurrency": 4,
    }


async def _placed(ray: Any, starting: Any, order: Start, log: ServerLog) -> str:
    """The node that a server has been started on; a wait for one is noted in the server's log."""
    placed = asyncio.wrap_future(starting.future())
    done, _ = await asyncio.wait([placed], timeout=_PATIENCE_S)
    if not done:
        wanted = shown(order.resources)
        free, there = ray.available_resources(), ray.cluster_resources()
        log.write(
            f"Ray has not placed it yet: it needs a node with {wanted} free; free in the whole cluster: "
            f"{shown({name: free.get(name, 0) for name in order.resources})} of "
            f"{shown({name: there.get(name, 0) for name in order.resources})}\n".encode()
        )
    node: str = await placed
    return node


def shown(resources: dict[str, float]) -> str:
    """Resources as messages show them."""
    return ", ".join(f"{name} = {amount:g}" for name, amount in resources.items()) or "anything"


async def _stop(ray: Any, made: Any, grace_s: float) -> None:
    with contextlib.suppress(Exception):  # it may be gone already, or out of reach
        if grace_s > 0:
            await asyncio.wait_for(made.stop.remote(grace_s), grace_s + 2.0)
            return
    _kill(ray, made)


def _kill(ray: Any, made: Any) -> None:
    with contextlib.suppress(Exception):  # Ray may have lost its cluster
        ray.kill(made, no_restart=True)


def _address_in(line: bytes) -> str:
    with contextlib.suppress(msgspec.DecodeError):
        record = msgspec.json.decode(line)
        if isinstance(record, dict) and record.get("event") == _LISTENING.decode():
            return str(record.get("address", ""))
    return ""


def _describe(error: Exception) -> str:
    """What Ray says, in one line: a cause that our own code raised by its own words."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, OSError):
        return str(cause)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(_IDENTITY)]
    return f"its actor is gone: {' '.join(lines)[:500] or type(error).__name__}"


def _connect(spec: DriverSpec) -> Any:
    """Ray, connected to the cluster; a local one is started where none is named.

    It may block for as long as it likes, and with it all of this process: the service has the deadline.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = importlib.import_module("ray")
    # Nodes need not have our package: the actor's code travels with it.
    for module in (actor, private_directory):
        ray.cloudpickle.register_pickle_by_value(module)
    address = spec.address or os.environ.get("RAY_ADDRESS")
    settings = {"runtime_env": spec.runtime_env or None, "log_to_driver": False}
    if address:
        ray.init(address=address, **settings)
        return ray
    # Ray gives a cluster of its own 30 s to start, which is little on a busy machine.
    for left in reversed(range(_LOCAL_STARTS)):
        try:
            ray.init(address="local", include_dashboard=False, **settings)
            break
        except Exception:  # Ray says it by a plain one
            ray.shutdown()
            if not left:
                raise
    return ray


async def _drive(spec: DriverSpec) -> int:
    with zmq.Context() as context:
        driver = Driver(spec, context)
        await driver.wait_order()
        try:
            ray = _connect(spec)
            library = ray.put(actor.packed(Path(envs.__file__).parent))
        except Exception as error:  # noqa: BLE001  whatever Ray finds wrong with the cluster or its settings
            what = f"at {spec.address}" if spec.address else "on this machine"
            driver.tell(Unusable(f"Ray {what} cannot be used: {' '.join(str(error).split())[:500]}"))
            # The service ends us once it has read this.
            await asyncio.Event().wait()
        driver.tell(Connected())
        running = asyncio.ensure_future(driver.run(ray, library))  # noqa: TID251  cancelled by the signal, awaited below
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await running
        driver.close()
        ray.shutdown()
    return 0


def main() -> int:
    """Entry point of the driver."""
    spec = msgspec.json.decode(Lifeline().read_line(), type=DriverSpec)
    return asyncio.run(_drive(spec))


if __name__ == "__main__":
    sys.exit(main())
