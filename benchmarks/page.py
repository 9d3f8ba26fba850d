"""The page: what open dashboards and scrapers cost the orchestrator's process, and how soon a long run is shown.

A process like the service answers 50 open pages and 100 scrapes a second, with a status of eight envs and a step every
second, and counts its CPU time against the same process with nobody looking. The long run has 10,000 steps and 1,040,000
rollouts; its time is the CPU time until the first event of a page and the first list of rollouts are ready.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop

from benchmarks.frame import Effort, Figure
from orchestrator.dispatch.ledger import Ledger
from orchestrator.facts import Status
from orchestrator.service.browse import ArchivedRollouts
from orchestrator.service.page import RunDirectory, live_feed
from orchestrator.views.http import build_app, serve_http
from orchestrator.views.metrics import render_metrics
from tests.support.recorded_run import add_steps, write_journal, write_many_rollouts
from tests.support.sample_status import env_status, sample_status
from tests.support.step_records import step_record

PAGES = 50
SCRAPES_PER_S = 100
ENVS = tuple(f"env{place}" for place in range(8))


async def serve(run_dir: Path, seconds: float) -> None:
    """Be looked at for so long; prints the address, then the CPU time that it took."""
    import sqlite3

    step = 100

    def status() -> Status:
        return sample_status(step=step, trained=step - 1, envs={name: env_status() for name in ENVS})

    app = build_app(status=status, metrics=lambda: render_metrics(status, Ledger()), token=None)
    feed = live_feed(run_dir, status)
    feed.add_to(app)
    connection = sqlite3.connect(run_dir / "journal" / "journal.sqlite3", isolation_level=None)
    async with serve_http(app, host="127.0.0.1", port=0) as address:
        print(address, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        began = time.process_time()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await asyncio.sleep(1.0)
            step += 1
            add_steps(connection, [step_record(step, envs=ENVS)])
        print(time.process_time() - began, flush=True)
        feed.close()
    connection.close()


async def look(address: str, pages: int, scrapes_per_s: int, ready: asyncio.Event) -> None:
    """Open pages and scrape, until cancelled."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
        opened = 0

        async def read() -> None:
            nonlocal opened
            async with session.get(f"{address}/api/events", timeout=aiohttp.ClientTimeout(None)) as reply:
                await reply.content.readany()
                opened += 1
                if opened == pages:
                    ready.set()
                async for _ in reply.content.iter_any():
                    pass

        async def scrape() -> None:
            while True:
                began = time.monotonic()
                async with session.get(f"{address}/metrics") as reply:
                    await reply.read()
                await asyncio.sleep(max(0.0, 10 / scrapes_per_s - (time.monotonic() - began)))

        for _ in range(pages):
            group.create_task(read())
        for _ in range(10 if scrapes_per_s else 0):
            group.create_task(scrape())
        if not pages:
            ready.set()


async def measure(pages: int, scrapes_per_s: int, seconds: float) -> float:
    """Share of a core that the process took."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        write_journal(run_dir, (step_record(step, envs=ENVS) for step in range(1, 101)))
        server = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.page", str(run_dir), str(seconds),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert server.stdout is not None
        assert server.stdin is not None
        address = (await server.stdout.readline()).decode().strip()
        ready = asyncio.Event()
        looking = asyncio.create_task(look(address, pages, scrapes_per_s, ready))  # noqa: TID251  ended below
        await ready.wait()
        server.stdin.write(b"\n")
        taken = float(await server.stdout.readline())
        looking.cancel()
        await asyncio.wait([looking])
        await server.wait()
    return taken / seconds


def open_long_run(steps: int) -> tuple[float, float, int]:
    """CPU seconds until a page's first event and until its first list of rollouts, and the event's bytes."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        write_journal(run_dir, (step_record(step) for step in range(1, steps + 1)))
        write_many_rollouts(run_dir, steps=steps, groups_per_step=13, group_size=8)
        run = RunDirectory(run_dir)
        began = time.process_time()
        size = len(msgspec.json.encode(run.snapshot()))
        shown = time.process_time()
        json.dumps(ArchivedRollouts(run_dir).find({}))
        return shown - began, time.process_time() - shown, size


def figures(effort: Effort) -> list[Figure]:
    """See the module's docstring."""
    steps = effort.pick(10_000, 10_000, 50)
    seconds = effort.pick(30.0, 10.0, 1.0)

    async def both() -> tuple[float, float]:
        return await measure(0, 0, seconds), await measure(PAGES, SCRAPES_PER_S, seconds)

    with asyncio.Runner() as runner:
        alone, watched = runner.run(both())
    charts, found, size = open_long_run(steps)
    what = f"{PAGES} open pages and {SCRAPES_PER_S} scrapes/s: share of a core"
    more = 100 * (watched - alone)
    return [
        Figure(what, more, "%", goal="at most 5 %", met=more <= 5),
        Figure(
            f"{steps:,} steps, {steps * 104:,} rollouts: first event of a page",
            charts,
            "s",
            goal="under 2 s",
            met=charts < 2,
        ),
        Figure("the same: first list of rollouts", found, "s", goal="under 2 s", met=found < 2),
        Figure("the same: bytes of the first event", size / 1e6, "MB"),
    ]


def _main(arguments: list[str]) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(Path(arguments[0]), float(arguments[1])))


if __name__ == "__main__":
    _main(sys.argv[1:])
