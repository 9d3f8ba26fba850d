"""How the servers of an environment are reached, and held to one declaration.

Where servers run is a launcher's affair (`launcher`); there is none for servers at configured addresses. An address on
the network is connected to with CURVE keys only, unless the configuration allows it otherwise.
"""

import contextlib
import secrets
import sys
from collections.abc import Mapping, Sized

import msgspec
import structlog
import zmq

from envs import wire
from envs.addresses import is_loopback
from envs.sessions import canonical_id
from orchestrator.env_servers.child_servers import ProcessLauncher
from orchestrator.env_servers.launcher import Launcher, ServerProcess
from orchestrator.env_servers.link import Link, LinkListener
from orchestrator.env_servers.on_ray.launcher import RayLauncher
from orchestrator.env_servers.spec import EnvSpec
from orchestrator.env_servers.supervision import last_lines
from orchestrator.errors import EnvError, EnvProtocolError

log = structlog.get_logger()

_NEEDED = ("msgspec", "zmq", "numpy", "aiohttp", "structlog")


class ServerLauncher:
    """Starts and reaches the servers of one environment, and holds them to one declaration."""

    def __init__(self, spec: EnvSpec, context: zmq.Context[zmq.Socket[bytes]], waiting: Sized) -> None:
        self._spec = spec
        self._waiting = waiting
        self._context = context
        self._first: tuple[str, wire.Ready] | None = None
        self._told_of_tasks = False
        if len(set(spec.addresses)) != len(spec.addresses):
            raise EnvError(spec.name, f"an address is listed twice: {', '.join(spec.addresses)}")
        self._places: dict[str, str] = {}
        for number, address in enumerate(spec.addresses):
            self.place(f"{spec.name}-{number}", address)
        self._launcher = _launcher_of(spec)
        self._hello = wire.Hello(
            protocol=wire.PROTOCOL,
            client=f"{spec.name}-{secrets.token_hex(8)}",
            env=spec.id,
            model=spec.model,
            sampling=dict(spec.sampling),
            system_prompt=spec.system_prompt,
            api_key_env=spec.api_key_env,
            train=spec.train,
            splits=[spec.split],
            lease_s=spec.lease_s if self._launcher is None else self._launcher.lease_s,
        )

    @property
    def ready(self) -> wire.Ready:
        """What the servers declared; known once one of them is ready."""
        if self._first is None:
            raise EnvError(self._spec.name, "not connected yet: what it is, its servers declare")
        return self._first[1]

    @property
    def declared_group_scored(self) -> bool:
        """Whether a server has declared that it scores whole groups."""
        return self._first is not None and self._first[1].group_scored

    async def aclose(self) -> None:
        """Give back what starting servers needed."""
        if self._launcher is not None:
            await self._launcher.aclose()

    async def prepare(self) -> None:
        """Before the first server is started."""
        if self._launcher is not None:
            await self._launcher.prepare()

    def start_process(self, server: str, life: int) -> ServerProcess | None:
        """Start a server's process; None when it runs elsewhere."""
        return None if self._launcher is None else self._launcher.start(server, life)

    def place(self, server: str, address: str) -> None:
        """Say where a server listens that runs elsewhere; EnvError if it must not be spoken to."""
        if not is_loopback(address) and self._spec.keys is None and not self._spec.insecure:
            raise EnvError(
                self._spec.name,
                f"{address} is reached over the network without CURVE keys; "
                "set server_key_file, or allow it with insecure = true",
            )
        self._places[server] = address

    def forget(self, server: str) -> None:
        """A server that runs elsewhere is of no interest any more."""
        del self._places[server]

    def known_address(self, server: str) -> str:
        """Where a server that runs elsewhere listens."""
        return self._places[server]

    def open_link(self, server: str, address: str, listener: LinkListener) -> Link:
        """Connect to a server; EnvProtocolError where ZMQ will not even try."""
        try:
            return Link(
                env=self._spec.name,
                server=server,
                address=address,
                hello=self._hello,
                listener=listener,
                context=self._context,
                keys=self._spec.keys if self._launcher is None else self._launcher.keys,
                ping_interval_s=self._spec.ping_interval_s,
                silence_timeout_s=self._spec.silence_timeout_s,
                waiting=self._waiting,
            )
        except zmq.ZMQError as error:
            raise EnvProtocolError(
                self._spec.name,
                f"server {server} cannot be reached at {address}: {zmq.strerror(error.errno or 0)}",
            ) from None

    def check_ready(self, server: str, ready: wire.Ready) -> None:
        """Take the first server's word for what the environment is; the others must say the same."""
        if canonical_id(ready.env) != canonical_id(self._spec.id):
            raise EnvProtocolError(
                self._spec.name, f'server {server} serves "{ready.env}", we asked for "{self._spec.id}"'
            )
        if self._spec.split not in ready.tasks:
            raise EnvProtocolError(
                self._spec.name, f'server {server} does not declare split "{self._spec.split}"'
            )
        if self._first is None:
            self._first = (server, ready)
            return
        first, known = self._first
        for what in ("tasks", "group_scored"):
            if getattr(known, what) != getattr(ready, what):
                raise EnvProtocolError(
                    self._spec.name,
                    f"server {server} declares {what} {getattr(ready, what)!r}, "
                    f"server {first} {getattr(known, what)!r}; all must serve the same",
                )
        self._compare_tasks(server, ready.samples.get(self._spec.split, {}))

    def _compare_tasks(self, server: str, samples: Mapping[int, int]) -> None:
        """Say once that an index is another task on another server, or after a restart; groups of both are dropped."""
        assert self._first is not None
        first, known = self._first[0], self._first[1].samples.get(self._spec.split, {})
        differing = sorted(index for index in samples.keys() & known.keys() if samples[index] != known[index])
        if differing and not self._told_of_tasks:
            self._told_of_tasks = True
            log.error(
                "env.tasks_differ",
                env=self._spec.name,
                servers=[first, server],
                index=differing[0],
                effect="groups whose rollouts ran on both are dropped",
                remedy='seed whatever is random; "orchestrator env try ID --check" shows which tasks differ',
            )

    def explain(self, log_tail: str) -> tuple[str, str]:
        """What the last lines of a server's log say in one, and what to show below: the author's frames, or the lines."""
        python = sys.executable if self._launcher is None else self._launcher.python
        for module in _NEEDED:
            if f"No module named '{module}'" in log_tail:
                packages = "msgspec pyzmq numpy aiohttp structlog"
                return f"{python} lacks {module}; run: {python} -m pip install {packages}", last_lines(
                    log_tail
                )
        if "nknown option: -P" in log_tail:
            return f"{python} is older than Python 3.11, which env servers need", last_lines(log_tail)
        for line in reversed(log_tail.splitlines()):
            with contextlib.suppress(msgspec.DecodeError):
                record = msgspec.json.decode(line)
                if isinstance(record, dict) and record.get("event") == "server.start_failed":
                    trace = record.get("traceback")
                    return str(record.get("why")), f"\n{str(trace).rstrip()}" if trace else ""
        return "", last_lines(log_tail)


def _launcher_of(spec: EnvSpec) -> Launcher | None:
    """Who starts its servers; nobody where they run elsewhere."""
    if spec.elsewhere:
        return None
    return ProcessLauncher(spec) if spec.ray is None else RayLauncher(spec, spec.ray)
