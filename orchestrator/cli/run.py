"""`orchestrator run`, `check` and `eval`: everything that starts from a configuration file.

What a command needs is imported when it runs, so that `orchestrator --help` costs next to nothing; that holds for every
module of this package that adds commands.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.views.terminal import outlive_readers

if TYPE_CHECKING:
    from rich.console import Console

    from orchestrator.config import Config
    from orchestrator.service import Service

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

OVERRIDES = (
    "Any setting can be overridden: --batch.size 64, --train.env.math.ratio 0.5 (an env by its name), or by a variable: "
    "ORCHESTRATOR__BATCH__SIZE=64. docs/configuration.md has all settings."
)


def register(commands: "Commands") -> None:
    """Add the commands."""
    run = _add(
        commands, "run", "run until the steps are done; the same command again continues a run", run_command
    )
    start = run.add_mutually_exclusive_group()
    start.add_argument("--fresh", action="store_true", help="start over: an existing journal is moved aside")
    start.add_argument(
        "--rewind-to",
        type=int,
        metavar="STEP",
        help="set the run back to a step that the trainer has a checkpoint of: later batches are given up, their tasks asked again",
    )
    check = _add(commands, "check", "validate a configuration and say what would be started", check_command)
    check.add_argument(
        "--deep",
        action="store_true",
        help="also load every environment, ask the inference servers for the model, and try keys and ports",
    )
    evaluate = _add(
        commands, "eval", "run the evaluations alone, against the configured inference servers", eval_command
    )
    evaluate.add_argument("--json", action="store_true", help="print the results as JSON lines")


def _add(
    commands: "Commands", name: str, text: str, function: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text, epilog=OVERRIDES)
    parser.add_argument("config", type=Path, metavar="CONFIG", help="configuration file (TOML)")
    parser.set_defaults(run=function, takes_overrides=True)
    return parser


def check_command(arguments: argparse.Namespace) -> int:
    """Print the resolved configuration and what would be started."""
    from orchestrator.config import find_warnings, load_config
    from orchestrator.service.blueprint import describe_start, faulty, verify

    config = load_config(arguments.config, arguments.overrides)
    warnings = [f"{path}: {warning}" for path, warning in find_warnings(config.model_dump())]
    if arguments.deep:
        import asyncio

        from envs.logs import configure_logging
        from orchestrator.service.deep_check import look_deep

        configure_logging("critical")  # what goes wrong is printed here, once
        with asyncio.Runner() as runner:
            found = runner.run(look_deep(config))
        warnings += found.warnings
        if found.problems:
            raise faulty(found.problems)
    verify(config)
    print(json.dumps(config.model_dump(mode="json"), indent=2))
    print("\nwould start:")
    for line in describe_start(config):
        print(f"  {line}")
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def run_command(arguments: argparse.Namespace) -> int:
    """Run the service."""
    from orchestrator.config import load_config
    from orchestrator.track import any_left_behind

    outlive_readers()
    config = load_config(arguments.config, arguments.overrides)
    try:
        return run_loop(lambda: _run(config, fresh=arguments.fresh, rewind_to=arguments.rewind_to))
    finally:
        # What the library of a tracker that hangs has registered for the end of the process would hang too.
        arguments.ends_at_once = any_left_behind()


def eval_command(arguments: argparse.Namespace) -> int:
    """Run the evaluations alone."""
    from orchestrator.config import load_config
    from orchestrator.service.evaluate import evaluate

    outlive_readers()
    config = load_config(arguments.config, arguments.overrides)
    return run_loop(lambda: evaluate(config, as_json=arguments.json))


def run_loop(main: Callable[[], Any]) -> int:
    """Run a coroutine function on uvloop."""
    import asyncio

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return int(runner.run(main()))


async def _run(config: "Config", *, fresh: bool, rewind_to: int | None) -> int:
    import asyncio

    import structlog
    from rich.text import Text

    from envs.logs import configure_logging
    from orchestrator.config import find_warnings
    from orchestrator.service.blueprint import verify
    from orchestrator.service.log_file import note, open_log
    from orchestrator.views.summary import print_summary

    verify(config)  # nothing is written for a configuration that cannot be started
    console, display = _console(config)
    log_file = open_log(config.run_dir)
    if display:
        configure_logging(config.log.level, "json", stream=log_file)
        console.print(Text(f"starting {config.run_dir} (log: {log_file.name})"), soft_wrap=True)
    else:
        configure_logging(config.log.level, config.log.format, copy=log_file)
    log = structlog.get_logger()
    for path, warning in find_warnings(config.model_dump()):
        log.warning("config.warning", path=path, warning=warning)
    signals, shown = Signals(), console if display else None
    try:
        summary, back_to = await _serve(config, signals, shown, fresh=fresh, rewind_to=rewind_to)
        while back_to is not None and not signals.exit_code:
            log.warning("run.restarting", rewind_to=back_to, reason="the trainer asks for it")
            summary, back_to = await _serve(config, signals, shown, fresh=False, rewind_to=back_to)
    except asyncio.CancelledError:
        # A signal during the start cancels this task; what had started has been stopped on the way here.
        if signals.exit_code:
            return signals.exit_code
        raise
    except Exception as error:
        # The terminal gets it as one line, or as the traceback of our bug; the log must have it too.
        note(log_file, "run.failed", error=f"{type(error).__name__}: {error}")
        raise
    print_summary(summary, console)
    return signals.exit_code


async def _serve(
    config: "Config", signals: "Signals", console: "Console | None", *, fresh: bool, rewind_to: int | None
) -> tuple[dict[str, Any], int | None]:
    """A service from its start to its end: the summary, and the step that the run is to be set back to, if the trainer asked for that."""
    from orchestrator.service import build_front, start_service
    from orchestrator.service.health import calm_garbage_collector
    from orchestrator.views.progress import show_progress, show_start

    front = build_front(config)
    async with AsyncExitStack() as stack:
        async with show_start(front.status, console) if console else nullcontext():
            starting = start_service(config, fresh=fresh, rewind_to=rewind_to, front=front)
            service = await stack.enter_async_context(starting)
        signals.attach(service)
        stack.callback(signals.detach)
        calm_garbage_collector()
        beside = [show_progress(service.status, console)] if console else []
        end = await service.serve(*beside)
        return await service.finish(end), service.stop.rewind_to


def _console(config: "Config") -> "tuple[Console, bool]":
    from rich.console import Console

    console = Console()
    display = config.log.progress == "on" or (config.log.progress == "auto" and console.is_terminal)
    return console, display


class Signals:
    """First SIGINT or SIGTERM: drain and save. Second: end at once; child processes die with this one."""

    def __init__(self) -> None:
        import asyncio

        self.exit_code = 0
        self._service: Service | None = None
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._received, number)

    def attach(self, service: "Service") -> None:
        """From now on a signal stops the service gracefully; before, it ended the start."""
        self._service = service
        if self.exit_code:
            service.stop.set()

    def detach(self) -> None:
        """The service has ended; another may be started."""
        self._service = None

    def _received(self, number: int) -> None:
        if self.exit_code:
            os._exit(128 + number)
        self.exit_code = 128 + number
        print(
            f"\n{signal.Signals(number).name}: finishing what runs and saving; once more to end at once",
            file=sys.stderr,
        )
        if self._service is not None:
            self._service.stop.set()
        elif self._task is not None:
            self._task.cancel()
