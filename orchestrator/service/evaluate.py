"""Evaluations alone: `orchestrator eval CONFIG` runs them once against the configured inference servers.

The same environments, dispatch core and scoring as in a run, without training, journal or trainer.
"""

import asyncio
import json
import time
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from envs.logs import configure_logging
from orchestrator.config import Config
from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.dispatch.ledger import Ledger
from orchestrator.dispatch.staleness import Staleness
from orchestrator.dispatch.work import PendingGroup
from orchestrator.env_servers.env import side_by_side
from orchestrator.errors import ConfigError
from orchestrator.local.children import LocalChildren
from orchestrator.service import blueprint
from orchestrator.service.driver import Driver
from orchestrator.sinks.eval_sink import Evals
from orchestrator.tasks.task import TrainTask


class _NoTraining:
    """The training side of dispatch, when there is none."""

    def try_next_task(self, eligible: Collection[str] | None = None) -> TrainTask | None:
        return None

    def retry(self, task: TrainTask) -> None: ...
    def on_dispatch(self, env: str, n: int, *, now: float) -> None: ...
    def on_finish(self, env: str, n: int, accepted: int, *, now: float) -> None: ...
    def on_cancel(self, env: str, n: int, *, now: float) -> None: ...


class _Results:
    """Gathers finished evaluations and advances the bar."""

    def __init__(self, evals: Evals, progress: Progress) -> None:
        self._evals = evals
        self._progress = progress
        self._bars = {
            run.plan.env: progress.add_task(run.plan.env, total=run.plan.num_examples) for run in evals.active
        }
        self.done = asyncio.Event()

    def completed(self, pending: PendingGroup, now: float) -> None:
        self._evals.finished(pending, now)
        self._progress.advance(self._bars[pending.env])
        if not self._evals.active:
            self.done.set()

    def dropped(self, pending: PendingGroup, reason: str, *, again: bool, now: float) -> None:
        self.completed(pending, now)


async def evaluate(config: Config, *, as_json: bool) -> int:
    """Run every evaluation once and print the results."""
    if not config.eval.env:
        raise ConfigError("eval.env: there is nothing to evaluate; add an [[eval.env]]")
    configure_logging("warning" if config.log.level == "info" else config.log.level, config.log.format)
    results = await _evaluate(config)
    if as_json:
        for result in results:
            print(json.dumps(result))
    else:
        print_results(results, Console())
    return 0


async def _evaluate(config: Config) -> list[dict[str, Any]]:
    async with AsyncExitStack() as stack:
        children = await stack.enter_async_context(LocalChildren(config.run_dir))
        urls = blueprint.inference_urls(config, children)
        pool = await stack.enter_async_context(
            blueprint.build_pool(config, urls, version=0, weights_path=None)
        )
        envs = blueprint.build_eval_envs(config)
        stack.push_async_callback(envs.shutdown)
        await envs.spawn()
        await side_by_side([envs.connect(), pool.wait_ready(config.inference.ready_timeout_s)])
        evals = Evals(blueprint.build_plans(envs))
        evals.trigger(0, 0, time.monotonic())
        nothing = _NoTraining()
        core = Dispatcher(
            train={},
            evals=envs,
            rules=blueprint.build_rules(config),
            source=nothing,
            eval_source=evals,
            mix=nothing,
            placement=pool,
            staleness=Staleness(batch_size=1, max_versions=0, mode="drop"),
            ledger=Ledger(),
            queued=lambda: 0,
            starved=lambda: (),
            expected_size=lambda env: 1,
            now=time.monotonic(),
        )
        progress = stack.enter_context(_progress())
        sink = _Results(evals, progress)
        driver = Driver(
            core,
            train={},
            evals=envs,
            sink=sink,
            rollout_timeout_s=config.dispatch.rollout_timeout_s,
            pool=pool,
            clock=time.monotonic,
        )
        pool.on_change = driver.wake
        for env in envs.values():
            env.on_free = driver.wake
        parts = [
            asyncio.create_task(part)  # noqa: TID251  `_until` ends and awaits them
            for part in (driver.run(), pool.run(), envs.run(), children.watch_server())
        ]
        await _until(sink.done, parts)
        return evals.results


async def _until(done: asyncio.Event, parts: Sequence["asyncio.Task[None]"]) -> None:
    """Wait for the event while the parts run; a part that fails raises."""
    finished = asyncio.create_task(done.wait())  # noqa: TID251  ended and awaited below
    waiting: set[asyncio.Task[Any]] = {finished, *parts}
    try:
        while not finished.done():
            ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for part in ended:
                part.result()
    finally:
        for part in (finished, *parts):
            part.cancel()
        await asyncio.wait([finished, *parts])


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )


def print_results(results: Sequence[dict[str, Any]], console: Console) -> None:
    """A table with one row per env; failures apart."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("env", "tasks", "avg@k", "pass@k", "failures", "seconds"):
        table.add_column(heading, justify="left" if heading == "env" else "right")
    for result in results:
        k = result["k"]
        passes = "  ".join(
            f"@{name[5:]} {_with_error(result, name)}"
            for name in result
            if name.startswith("pass@") and not name.endswith("_stderr")
        )
        failures = ", ".join(f"{n} {kind}" for kind, n in result["failure_kinds"].items()) or "0"
        table.add_row(
            result["env"].removeprefix("eval-"),
            str(result["tasks"]),
            f"@{k} {_with_error(result, f'avg@{k}')}",
            passes,
            failures,
            f"{result['seconds']:.1f}",
        )
    console.print(table)


def _with_error(result: dict[str, Any], name: str) -> str:
    value, error = result[name], result[f"{name}_stderr"]
    if value is None:
        return "–"
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"
