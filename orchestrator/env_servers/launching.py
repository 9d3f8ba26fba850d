"""How the servers of an environment are started and reached: command line, instructions, sockets, log files.

Servers that we spawn listen on `ipc://` sockets in a private directory with a short path, which only the user
can enter and which goes away with the launcher. Their instructions travel over standard input, never in
arguments. They find our `envs` package under any interpreter through a directory that holds nothing but a
link to it, and the modules that a configuration names behind it (`envs.importing.module_path`).
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import structlog
import zmq

import envs
from envs import keeper, wire
from envs.addresses import is_loopback
from envs.curve import ClientKeys
from envs.importing import module_path
from envs.logs import LogFormat
from envs.server_spec import ServerSpec
from envs.sessions import canonical_id
from orchestrator.env_servers.link import Link, LinkListener
from orchestrator.env_servers.processes import ChildProcess
from orchestrator.env_servers.supervision import RestartPolicy, last_lines
from orchestrator.errors import EnvError, EnvProtocolError

log = structlog.get_logger()

_PREFIX = "envs-"
_TEMP_PATH_BYTES = 60
"""Unix socket paths end at 107 bytes; ours add some 30 to the directory for temporary files."""
_OWN_LEASE_S = 600.0
_NEEDED = ("msgspec", "zmq", "numpy", "aiohttp", "structlog")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """What an environment is and how its servers are run; see the configuration reference for each field."""

    name: str
    id: str
    split: str
    train: bool
    args: Mapping[str, Any] = field(repr=False)
    model: str
    sampling: Mapping[str, Any]
    system_prompt: str | None
    api_key_env: str | None
    python: str | None
    module_dirs: tuple[Path, ...]
    """Where a spawned server finds modules, beside the working directory."""
    workers: int
    addresses: tuple[str, ...]
    capacity: int
    seed: int
    ready_timeout_s: float
    silence_timeout_s: float
    reconnect_timeout_s: float
    ping_interval_s: float
    lease_s: float
    restart: RestartPolicy
    keys: ClientKeys | None
    insecure: bool
    withheld: frozenset[str]
    """Environment variables that a spawned server does not get: the secrets of the service itself."""
    log_dir: Path
    log_level: str
    log_format: LogFormat
    report: Path | None
    """Where a spawned server describes its first tasks before it is ready, for `check --deep`."""


class ServerLauncher:
    """Starts and reaches the servers of one environment, and holds them to one declaration."""

    def __init__(self, spec: EnvSpec, context: zmq.Context[zmq.Socket[bytes]], waiting: Sized) -> None:
        self._spec = spec
        self._waiting = waiting
        self._context = context
        self._first: tuple[str, wire.Ready] | None = None
        self._told_of_tasks = False
        self._directory: PrivateDirectory | None = None
        if len(set(spec.addresses)) != len(spec.addresses):
            raise EnvError(spec.name, f"an address is listed twice: {', '.join(spec.addresses)}")
        for address in spec.addresses:
            if not is_loopback(address) and spec.keys is None and not spec.insecure:
                raise EnvError(
                    spec.name,
                    f"{address} is reached over the network without CURVE keys; "
                    "set server_key_file, or allow it with insecure = true",
                )
        if not spec.addresses:
            self._directory = PrivateDirectory()
            library = self._directory.path / "lib"
            library.mkdir()
            (library / "envs").symlink_to(Path(envs.__file__).parent)
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
            # Servers of our own end with us, so a long sleep of this machine need not cost their rollouts.
            lease_s=spec.lease_s if spec.addresses else _OWN_LEASE_S,
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

    def close(self) -> None:
        """Remove the private directory."""
        if self._directory is not None:
            self._directory.remove()
            self._directory = None

    def _address(self, server: str, life: int) -> str:
        number = int(server.rpartition("-")[2])
        if self._spec.addresses:
            return self._spec.addresses[number]
        # A path of its own for every life, so that nobody talks to the socket of a dead one.
        assert self._directory is not None
        return f"ipc://{self._directory.path}/{number}.{life}"

    def start_process(self, server: str, life: int) -> ChildProcess | None:
        """Start a server's process; None when it runs elsewhere."""
        if self._spec.addresses:
            return None
        assert self._directory is not None
        spec = self._spec
        instructions = ServerSpec(
            name=server,
            env=spec.name,
            id=spec.id,
            bind=self._address(server, life),
            args=dict(spec.args),
            splits=[spec.split],
            capacity=spec.capacity,
            seed=spec.seed,
            key_variables=[spec.api_key_env] if spec.api_key_env else [],
            log_level=spec.log_level,
            log_format=spec.log_format,
            report=str(spec.report or ""),
        )
        # Our `envs` comes first, from a directory that holds nothing else, so that another interpreter finds
        # it and a directory of that name in the working directory does not hide it.
        library, outside = str(self._directory.path / "lib"), os.environ.get("PYTHONPATH", "")
        path = [library, *module_path(*spec.module_dirs), outside]
        child = ChildProcess(
            server_command(spec.python or sys.executable, "-P"),
            kept=True,
            first_line=msgspec.json.encode(instructions) + b"\n",
            log_path=spec.log_dir / f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', server)}.log",
            environ={
                **{name: value for name, value in os.environ.items() if name not in spec.withheld},
                "PYTHONHASHSEED": hash_seed(),
                "PYTHONPATH": os.pathsep.join(filter(None, path)),
                "PYTHONUNBUFFERED": "1",
            },
        )
        log.info("env.server_started", env=self._spec.name, server=server, pid=child.pid, life=life)
        return child

    def open_link(self, server: str, life: int, listener: LinkListener) -> Link:
        """Connect to a server."""
        assert self._context is not None
        return Link(
            env=self._spec.name,
            server=server,
            address=self._address(server, life),
            hello=self._hello,
            listener=listener,
            context=self._context,
            keys=self._spec.keys,
            ping_interval_s=self._spec.ping_interval_s,
            silence_timeout_s=self._spec.silence_timeout_s,
            waiting=self._waiting,
        )

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
        python = self._spec.python or sys.executable
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


def hash_seed() -> str:
    """`PYTHONHASHSEED` of every server: what follows from hashes is the same in all; the user may choose another number."""
    chosen = os.environ.get("PYTHONHASHSEED", "")
    return chosen if chosen.isdecimal() else "0"


def server_command(python: str, *options: str) -> list[str]:
    """The command line of an env server under an interpreter, with the keeper that ends whatever it leaves."""
    return [python, "-I", "-S", keeper.__file__, python, *options, "-m", "envs.server"]


class PrivateDirectory:
    """A directory that only the user can enter, short enough for Unix sockets, removed with its owner.

    A lock that is held as long as the owner lives tells others whose owner could not remove it any more.
    """

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        if len(os.fsencode(parent)) > _TEMP_PATH_BYTES:
            parent = Path("/tmp")  # noqa: S108  what is made in it is private
        _sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = (self.path / "locking").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Under its name only once it is held, so that nobody finds it free in between.
        (self.path / "locking").rename(self.path / "lock")

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _sweep(parent: Path) -> None:
    """Remove what owners left behind that were killed."""
    for lock in parent.glob(f"{_PREFIX}*/lock"):
        with contextlib.suppress(OSError), lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
