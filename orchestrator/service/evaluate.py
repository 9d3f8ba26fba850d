"""Evaluations alone: `orchestrator eval CONFIG` runs them once against the configured inference servers.

The same environments, dispatch core and scoring as in a run, without training, journal or trainer.
"""

import asyncio
import json
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from envs.logs import configure_logging
from orchestrator.config import Config
from orchestrator.env_servers.env import side_by_side
from orchestrator.errors import ConfigError
from orchestrator.local.children import LocalChildren
from orchestrator.run.build import build_evaluation
from orchestrator.service import blueprint, env_blueprint, inference_blueprint
from orchestrator.service.driver import Driver


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
        urls = inference_blueprint.inference_urls(config, children)
        pool = await stack.enter_async_context(
            inference_blueprint.build_pool(config, urls, version=0, weights_path=None, train=False)
        )
        envs = env_blueprint.build_eval_envs(config)
        stack.push_async_callback(envs.shutdown)
        await envs.spawn()
        await side_by_side([envs.connect(), pool.wait_ready(config.inference.ready_timeout_s)])
        run = build_evaluation(
            blueprint.eval_settings(config, envs),
            blueprint.build_rules(config),
            ports=envs,
            pool=pool,
            now=time.monotonic(),
        )
        driver = Driver(
            run,
            train={},
            evals=envs,
            on_weights=lambda version, path: None,
            on_evaluation=lambda result: None,
            clock=time.monotonic,
        )
        pool.on_change = driver.wake
        pool.on_lost = lambda endpoint: driver.tell(run.on_endpoint_lost, endpoint)
        for env in envs.values():
            env.on_free = driver.wake
        progress = stack.enter_context(_progress())
        bars = {name: progress.add_task(name, total=env.examples) for name, env in envs.items()}
        run.on_task = lambda name: progress.advance(bars[name])
        stack.callback(driver.close)
        await _until(driver.ended, [driver.drive(), pool.run(), envs.run(), children.watch_server()])
        return run.sink.results


async def _until(ended: "asyncio.Future[str]", parts: Sequence[Coroutine[Any, Any, object]]) -> None:
    """Run the parts until the end; the first that fails raises."""

    async def end() -> None:
        await ended
        raise _Ended

    try:
        async with asyncio.TaskGroup() as group:
            for part in (end(), *parts):
                group.create_task(part)
    except BaseExceptionGroup as errors:
        _, failed = errors.split(_Ended)
        if failed is not None:
            raise failed.exceptions[0] from None


class _Ended(Exception):  # noqa: N818  not an error: it ends the group of parts
    """Every evaluation has its result."""


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
