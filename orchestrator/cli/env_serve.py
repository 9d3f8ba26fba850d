"""Hosts an environment: one server process per worker, on consecutive ports, restarted when it dies.

Workers get their instructions on standard input, so no secret is in an argument list, and end when this
process does, with all that they started. SIGTERM or SIGINT stops them within a bound. A worker that cannot start ends them all with its
exit code; one that dies later is started again after a growing pause, within a budget.
"""

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
import structlog

from envs.addresses import is_loopback
from envs.curve import read_key, read_pair
from envs.loader import parse_id
from envs.logs import configure_logging
from envs.server_spec import EXIT_STARTUP, ServerSpec
from orchestrator.cli.env import UsageError
from orchestrator.env_servers.child_servers import hash_seed, server_command
from orchestrator.env_servers.processes import ChildProcess, describe_exit
from orchestrator.env_servers.spec import RestartPolicy
from orchestrator.env_servers.supervision import RestartBudget
from orchestrator.views.terminal import outlive_readers

_STOP_S = 20.0
_RESTARTS = RestartPolicy(max_restarts=10, window_s=600.0, first_delay_s=0.5, max_delay_s=30.0)

log = structlog.get_logger()


def build_specs(
    env_id: str,
    *,
    bind: str,
    workers: int,
    capacity: int = 256,
    args: Mapping[str, Any],
    insecure: bool = False,
    secret_key: str | None = None,
    client_keys: Sequence[str] = (),
    key_variables: Sequence[str] = (),
    seed: int = 0,
    log_level: str = "info",
) -> list[ServerSpec]:
    """What each worker is told, or UsageError; nothing is started."""
    parse_id(env_id)
    addresses = worker_addresses(bind, workers)
    pair = read_pair(secret_key) if secret_key else None
    clients = [read_key(source) for source in client_keys]
    if bool(pair) != bool(clients):
        raise UsageError("--secret-key-file and --client-key-file belong together; see `env keygen`")
    if not is_loopback(bind) and pair is None and not insecure:
        raise UsageError(
            f"{bind} can be reached by other machines and there are no keys; make some with"
            " `orchestrator env keygen DIR`, or allow it with --insecure"
        )
    return [
        ServerSpec(
            name=f"{env_id}-{number}",
            id=env_id,
            bind=address,
            args=dict(args),
            capacity=capacity,
            insecure=insecure,
            curve_secret=pair.secret if pair else "",
            curve_public=pair.public if pair else "",
            curve_clients=clients,
            key_variables=list(key_variables),
            seed=seed,
            log_level=log_level,
            log_format="pretty" if sys.stderr.isatty() else "json",
        )
        for number, address in enumerate(addresses)
    ]


def worker_addresses(bind: str, workers: int) -> list[str]:
    """One address per worker: consecutive TCP ports, or numbered socket files."""
    parts = urlsplit(bind)
    if parts.scheme == "ipc" and (parts.netloc or parts.path):
        return [bind] if workers == 1 else [f"{bind}-{number}" for number in range(workers)]
    found = re.fullmatch(r"(tcp://(?:\[[^\]]+\]|[^:/]+)):(\d+)", bind)
    if found is None:
        raise UsageError(f"--bind {bind} is neither tcp://HOST:PORT nor ipc://PATH")
    host, port = found[1], int(found[2])
    if not 0 < port <= 65535 - workers + 1:
        raise UsageError(f"--bind {bind}: {workers} workers need ports from 1 to 65535, known beforehand")
    return [f"{host}:{port + number}" for number in range(workers)]


def shown_addresses(specs: Sequence[ServerSpec]) -> str:
    """The line for the configuration of an orchestrator; a wildcard is replaced by this machine's name."""
    name = socket.getfqdn()
    addresses = [re.sub(r"^tcp://(0\.0\.0\.0|\*|\[::\]):", f"tcp://{name}:", spec.bind) for spec in specs]
    return "addresses = [" + ", ".join(f'"{address}"' for address in addresses) + "]"


def serve_workers(specs: Sequence[ServerSpec]) -> int:
    """Serve until told to stop; the exit code is that of the first worker that could not go on."""
    outlive_readers()
    configure_logging(specs[0].log_level, specs[0].log_format)
    print(shown_addresses(specs), flush=True)
    with asyncio.Runner() as runner:
        return runner.run(_serve(specs))


async def _serve(specs: Sequence[ServerSpec]) -> int:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    async with asyncio.TaskGroup() as tasks:
        workers = [tasks.create_task(_keep(spec, stopping), name=spec.name) for spec in specs]
    return next((code for worker in workers if (code := worker.result())), 0)


async def _keep(spec: ServerSpec, stopping: asyncio.Event) -> int:
    """Run one worker again and again until told to stop, until it cannot start, or the budget is used up."""
    budget = RestartBudget(_RESTARTS)
    while True:
        code = await _run(spec, stopping)
        if stopping.is_set():
            return code if code > 0 else 0
        pause = None if code == EXIT_STARTUP else budget.next_delay_s(time.monotonic())
        if pause is None:
            log.error("worker.given_up", worker=spec.name, why=f"it {describe_exit(code)}")
            stopping.set()
            return code if code > 0 else 1
        log.warning("worker.restarted", worker=spec.name, why=f"it {describe_exit(code)}", pause_s=pause)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await stopping.wait()
                return 0


async def _run(spec: ServerSpec, stopping: asyncio.Event) -> int:
    """One life of a worker; its exit code, negative for a signal."""
    worker = ChildProcess(
        server_command(sys.executable),
        kept=True,
        first_line=msgspec.json.encode(spec) + b"\n",
        log_path=None,
        environ={**os.environ, "PYTHONHASHSEED": hash_seed()},
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(stopping.wait())
            await asyncio.wait((worker.exited, asked), return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()
    finally:
        code = await worker.stop(grace_s=_STOP_S)
    return 1 if code is None else code
