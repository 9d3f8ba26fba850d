"""Hosts an environment: one server process per worker, on consecutive ports, restarted when it dies.

Workers get their instructions on standard input, so no secret is in an argument list, and end when this
process does. SIGTERM or SIGINT stops them within a bound. A worker that cannot start ends them all with its
exit code; one that dies later is started again after a growing pause, within a budget.
"""

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
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

_STOP_S = 20.0
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 30.0
_HEALTHY_S = 60.0
_MAX_RESTARTS = 10

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
            log_level=log_level,
            log_format="pretty" if sys.stderr.isatty() else "json",
            parent_pid=os.getpid(),
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
    loop = asyncio.get_running_loop()
    failures = 0
    while True:
        started = loop.time()
        code = await _run(spec, stopping)
        if stopping.is_set():
            return code if code > 0 else 0
        failures = 1 if loop.time() - started > _HEALTHY_S else failures + 1
        if code == EXIT_STARTUP or failures > _MAX_RESTARTS:
            log.error("worker.given_up", worker=spec.name, code=code, failures=failures)
            stopping.set()
            return code if code > 0 else 1
        pause = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (failures - 1))
        log.warning("worker.restarted", worker=spec.name, code=code, pause_s=pause)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await stopping.wait()
                return 0


async def _run(spec: ServerSpec, stopping: asyncio.Event) -> int:
    """One life of a worker; its exit code, negative for a signal."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "envs.server", stdin=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    try:
        # Left open: its end is how the worker notices that we are gone.
        process.stdin.write(msgspec.json.encode(spec) + b"\n")
        async with asyncio.TaskGroup() as tasks:
            ending = tasks.create_task(process.wait())
            asked = tasks.create_task(stopping.wait())
            await asyncio.wait((ending, asked), return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                process.terminate()
                await asyncio.wait((ending,), timeout=_STOP_S)
            asked.cancel()
            if not ending.done():
                log.error("worker.killed", worker=spec.name, why=f"it did not stop in {_STOP_S:g} s")
                process.kill()
        return ending.result()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        process.stdin.close()
