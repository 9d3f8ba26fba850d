"""The whole service under a load of one shape, and what a rollout costs it: `python -m benchmarks._load NAME=NUMBER …` prints JSON.

Env servers are stubs that only wait, many in a process, and so are the engines that nobody asks anything; everything else is
real: links, dispatcher, buffer, journal, archive, trainer link, a trainer. A process of its own for every load, so that
none begins with what another left in memory.
"""

import asyncio
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog
import uvloop

from benchmarks._stub_servers import ENV
from orchestrator.config import Config
from orchestrator.service import Service, start_service
from orchestrator.service.health import calm_garbage_collector

BATCH = 256
FILL_S = 150.0
"""How long the slots may take to be filled; what was reached by then is what is measured."""
PROCESSES = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the service, and for how long it is looked at."""

    inflight: int = 1024
    envs: int = 4
    endpoints: int = 1
    transcript_bytes: int = 0
    tokens: int = 64
    rate: int = 1000
    """Rollouts per second that are asked for, whatever the shape; a core can do several times as many."""
    for_s: float = 8.0

    @property
    def latency_s(self) -> float:
        # What is said in a second stays below 64 MB, or compressing it would be all that is measured.
        rate = min(self.rate, 64e6 / max(1, self.transcript_bytes))
        return max(0.1, self.inflight / rate)


class Cost(msgspec.Struct):
    """What a rollout took of the orchestrator's CPU, all its threads included, with so many in flight; and its peak memory."""

    cpu_us: float
    inflight: int
    rollouts_per_s: float
    memory_mib: float


def cost_of(load: Load) -> Cost:
    """Measure a load in a process of its own."""
    asked = [f"{field.name}={getattr(load, field.name)}" for field in fields(load)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks._load", *asked], check=True, stdout=subprocess.PIPE
    )
    return msgspec.json.decode(done.stdout, type=Cost)


def run_under(load: Load, look: Callable[[Service, Load], Awaitable[T]]) -> T:
    """Run a service, and end it when it has been looked at."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory, ExitStack() as stack:
        servers = max(load.envs, PROCESSES)
        each = -(-servers // PROCESSES)
        capacity = -(-2 * load.inflight // load.envs)
        for process in range(PROCESSES):
            numbers = (process * each, each, load.latency_s, load.tokens, capacity, load.transcript_bytes)
            stack.enter_context(_child("_stub_servers", directory, *map(str, numbers), lines=1))
        engines = stack.enter_context(_child("_stub_engines", str(load.endpoints), lines=load.endpoints))
        config = Config(
            run_dir=Path(directory, "run"),
            batch={"size": BATCH},
            inference={"base_urls": engines},
            train={
                "group_size": 8,
                "env": [
                    {
                        "id": ENV,
                        "name": f"stub-{number}",
                        "ratio": 1.0,
                        "addresses": [f"ipc://{directory}/{number}"],
                        "capacity": capacity,
                    }
                    for number in range(load.envs)
                ],
            },
            dispatch={"max_inflight": load.inflight, "keep_equal_rewards": True, "ramp_s": 0.0},
            # A group is open until the slowest of its eight has ended, thrice as long as one takes in the mean.
            staleness={"max_versions": 8 + 24 * load.inflight // BATCH},
            trainer={"bind": "tcp://127.0.0.1:0"},
            http={"enabled": False},
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(config, lambda service: look(service, load)))


async def _serve(config: Config, look: Callable[[Service], Awaitable[T]]) -> T:
    found: list[T] = []

    async def observe() -> None:
        found.append(await look(service))
        service.run.end("measured")
        service.driver.perform()

    async with start_service(config) as service:
        trainer = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks._trainer", service.server.address
        )
        calm_garbage_collector()
        try:
            await service.serve(observe())
        finally:
            trainer.terminate()
            await trainer.wait()
    return found[0]


async def warm_up(service: Service, load: Load) -> None:
    """Wait until the slots are taken, and groups end as they begin: three times as long as a rollout takes in the mean."""
    ledger = service.run.parts.ledger
    started = time.monotonic()
    while ledger.total_inflight < 0.97 * load.inflight and time.monotonic() - started < FILL_S:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    await asyncio.sleep(max(1.0, 3 * load.latency_s))


async def look_at_cost(service: Service, load: Load) -> Cost:
    """What rollouts take from then on."""
    ledger = service.run.parts.ledger
    await warm_up(service, load)
    cpu, done, began, busy = time.process_time(), ledger.totals()["completed"], time.monotonic(), 0
    while time.monotonic() - began < load.for_s:
        await asyncio.sleep(0.05)
        busy = max(busy, ledger.total_inflight)
    rollouts = ledger.totals()["completed"] - done
    return Cost(
        cpu_us=1e6 * (time.process_time() - cpu) / max(1, rollouts),
        inflight=busy,
        rollouts_per_s=rollouts / (time.monotonic() - began),
        memory_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


@contextmanager
def _child(module: str, *arguments: str, lines: int) -> Iterator[list[str]]:
    """A process of this package, once it has said so many lines."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield [process.stdout.readline().strip() for _ in range(lines)]
        finally:
            process.terminate()


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    given = dict(argument.split("=") for argument in sys.argv[1:])
    load = Load(
        **{name: float(value) if name == "for_s" else int(value) for name, value in given.items()}  # type: ignore[arg-type]
    )
    print(msgspec.json.encode(run_under(load, look_at_cost)).decode())
