"""Many env servers and engines that come and go: what following them costs the loop, with many rollouts in flight.

The whole service: 256 env servers and 64 engines, all named by files, of which some leave and others join every second.
The servers are stubs, many in a process; everything else is real. CPU time is the orchestrator process' own. What the machine
does beside it shows in the lag, so the load is printed with it.
"""

import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog
import uvloop

from benchmarks._stub_servers import ENV
from benchmarks.frame import Effort, Figure
from orchestrator.config import Config
from orchestrator.dispatch.ledger import Lane
from orchestrator.service import Service, start_service
from orchestrator.service.health import calm_garbage_collector

PROCESSES = 2
"""Of stub servers."""
AWAY = 16
"""One in so many members is away at any time."""


@dataclass(frozen=True, slots=True)
class Size:
    """How large a run is measured, and for how long."""

    servers: int
    engines: int
    inflight: int
    latency_s: float
    for_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run showed."""

    servers: int
    engines: int
    inflight: int
    joins: int
    rollouts: int
    failed: int
    cpu_share: float
    lag_p50_s: float
    lag_p99_s: float
    work_p99_s: float
    """CPU time of the loop between two looks of a sleeper: what of the lag is its own, whatever else the machine does."""
    load: float


def figures(effort: Effort = Effort.FULL) -> list[Figure]:
    """One run, with members that change every second."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    size = effort.pick(
        Size(256, 64, 20_000, 20.0, 30.0), Size(32, 8, 2000, 4.0, 8.0), Size(4, 2, 64, 0.5, 1.5)
    )
    one = measure(size)
    return [
        Figure("rollouts in flight", one.inflight, "", goal=f"{size.inflight}"),
        Figure("env servers that were ready", one.servers, f"of {size.servers}"),
        Figure("engines that were ready", one.engines, f"of {size.engines}"),
        Figure("joins of env servers", one.joins, ""),
        Figure("load of the machine", one.load, f"on {os.cpu_count()} cores"),
        Figure(
            "rollouts that failed, of those that ended",
            one.failed,
            "",
            goal="0",
            met=one.failed == 0,
        ),
        Figure("rollouts that ended", one.rollouts, ""),
        Figure("CPU of the orchestrator", 100 * one.cpu_share, "% of a core"),
        Figure("loop lag p50", 1e3 * one.lag_p50_s, "ms"),
        Figure(
            "CPU time of the loop between two looks 10 ms apart, p99",
            1e3 * one.work_p99_s,
            "ms",
            goal="< 50 ms",
            met=one.work_p99_s < 0.05,
        ),
        Figure(
            "loop lag p99",
            1e3 * one.lag_p99_s,
            "ms",
            goal="< 50 ms",
            met=one.lag_p99_s < 0.05,
        ),
    ]


def measure(size: Size) -> Measured:
    """Run a service for a while and look at it."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory, ExitStack() as stack:
        folder = Path(directory)
        each = size.servers // PROCESSES
        servers = [f"ipc://{folder}/{number}" for number in range(each * PROCESSES)]
        for process in range(PROCESSES):
            stack.enter_context(
                _child(
                    "_stub_servers", directory, str(process * each), str(each), str(size.latency_s), lines=1
                )
            )
        engines = stack.enter_context(_child("_stub_engines", str(size.engines), lines=size.engines))
        members = Members(folder, servers, engines)
        config = Config(
            run_dir=folder / "run",
            batch={"size": 1024},
            inference={"base_urls": f"file:{folder}/engines.txt"},
            train={
                "group_size": 8,
                "env": [{"id": ENV, "name": "stub", "ratio": 1.0, "addresses": f"file:{folder}/servers.txt"}],
            },
            dispatch={"max_inflight": size.inflight, "keep_equal_rewards": True, "ramp_s": size.latency_s},
            staleness={"max_versions": 4 + 2 * size.inflight // 1024},
            trainer={"bind": "tcp://127.0.0.1:0"},
            http={"enabled": False},
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_measure(config, members, size))


class Members:
    """Who the files name: all but a few, others every second."""

    def __init__(self, folder: Path, servers: list[str], engines: list[str]) -> None:
        self._lists = {folder / "servers.txt": servers, folder / "engines.txt": engines}
        self._rng = random.Random(0)
        self._away: dict[Path, list[str]] = {path: [] for path in self._lists}
        self.change(0)

    def change(self, share: int) -> None:
        """Some are away from now on that were there, and some are back; `share`: one in so many."""
        for path, members in self._lists.items():
            away = self._away[path]
            count = max(1, len(members) // share) if share else 0
            fresh = self._rng.sample([one for one in members if one not in away], count)
            # For a few changes, so that the absence lasts.
            away[:] = [*away, *fresh][-4 * count :] if count else []
            part = path.with_suffix(".part")
            part.write_text("".join(f"{one}\n" for one in members if one not in away))
            part.replace(path)

    async def keep_changing(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.change(4 * AWAY)


async def _measure(config: Config, members: Members, size: Size) -> Measured:
    result: list[Measured] = []
    async with start_service(config) as service:
        trainer = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks._trainer", service.server.address
        )
        calm_garbage_collector()
        try:
            await service.serve(_observe(service, members, size, result), members.keep_changing())
        finally:
            trainer.terminate()
            await trainer.wait()
    return result[0]


async def _observe(service: Service, members: Members, size: Size, result: list[Measured]) -> None:
    ledger, env = service.run.parts.ledger, service.train["stub"]
    joins, join = 0, env.membership.on_join

    def count(address: str, source: str) -> None:
        nonlocal joins
        joins += 1
        join(address, source)

    env.membership.on_join = count
    async with asyncio.timeout(size.latency_s * 4 + 60):
        while ledger.total_inflight < 0.97 * size.inflight:  # noqa: ASYNC110  a count announces nothing
            await asyncio.sleep(0.1)
    lags: list[float] = []
    stretches: list[float] = []
    before_all = dict(ledger.totals(Lane.TRAIN))
    busy, cpu, started = 0, time.process_time(), time.monotonic()
    while time.monotonic() - started < size.for_s:
        before, worked = time.monotonic(), time.thread_time()
        await asyncio.sleep(0.01)
        lags.append(max(0.0, time.monotonic() - before - 0.01))
        stretches.append(time.thread_time() - worked)
        busy = max(busy, ledger.total_inflight)
    lags.sort()
    stretches.sort()
    after = ledger.totals(Lane.TRAIN)
    ended = {what: n - before_all.get(what, 0) for what, n in after.items()}
    result.append(
        Measured(
            servers=env.ready_servers,
            engines=len(service.pool.ready),
            inflight=busy,
            joins=joins,
            rollouts=ended["completed"],
            failed=sum(n for what, n in ended.items() if what not in ("completed", "cancelled")),
            cpu_share=(time.process_time() - cpu) / (time.monotonic() - started),
            lag_p50_s=lags[len(lags) // 2],
            lag_p99_s=lags[int(len(lags) * 0.99)],
            work_p99_s=stretches[int(len(stretches) * 0.99)],
            load=os.getloadavg()[0],
        )
    )
    service.run.end("measured")
    service.driver.perform()


@contextmanager
def _child(module: str, *arguments: str, lines: int) -> Iterator[list[str]]:
    """A process of this package, once it has said so many lines; ended with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{module}", *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield [process.stdout.readline().strip() for _ in range(lines)]
    finally:
        process.kill()
        process.communicate()
