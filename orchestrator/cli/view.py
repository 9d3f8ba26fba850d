"""`orchestrator view` and `orchestrator report`: the page of a run that is over, crashed, or runs elsewhere."""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import ConfigError

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

SAMPLE_GROUPS = 120
SAMPLE_BYTES = 6_000_000
"""Of a report's conversations, over all of its runs."""


def register(commands: "Commands") -> None:
    """Add the commands."""
    text = "look at a run in a browser: its charts and its rollouts, while it runs or afterwards"
    view = commands.add_parser("view", help=text, description=text)
    view.add_argument("run_dir", type=Path, help="run directory")
    view.add_argument("--port", type=int, default=0, help="port on loopback; any free one by default")
    view.set_defaults(run=view_command)
    text = "write one HTML file about one or several runs, with their curves over each other"
    report = commands.add_parser("report", help=text, description=text)
    report.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="run directory")
    report.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), help="the file; report.html by default"
    )
    report.set_defaults(run=report_command)


def view_command(arguments: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    from orchestrator.cli.run import run_loop
    from orchestrator.service.page import RunDirectory

    if not 0 <= arguments.port < 65536:
        raise ConfigError(f"--port {arguments.port}: a port is a number from 0 to 65535")
    run = RunDirectory(arguments.run_dir)

    async def serve() -> int:
        import asyncio

        from orchestrator.views.http import build_app, serve_http

        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        app = build_app(status=run.status, metrics=bytes, token=None)
        feed = run.feed()
        feed.add_to(app)
        async with serve_http(app, host="127.0.0.1", port=arguments.port) as address:
            print(f"{run.name}: {address} (Ctrl-C ends)", flush=True)
            await stop.wait()
            feed.close()
        return 0

    return run_loop(serve)


def report_command(arguments: argparse.Namespace) -> int:
    """Write the file, whole or not at all."""
    html = build_report(arguments.run_dirs)
    path: Path = arguments.output
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(html)
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    print(f"{path}: {len(html) / 1e6:.1f} MB", file=sys.stderr)
    return 0


def build_report(run_dirs: Sequence[Path]) -> bytes:
    """One document with everything that the page needs."""
    import msgspec

    from orchestrator.service.page import RunDirectory
    from orchestrator.views.document import report_page

    runs = []
    for run in [RunDirectory(run_dir) for run_dir in run_dirs]:
        told = run.snapshot()
        sample = run.rollouts.sample(
            run.recorded.series.last,
            groups=max(8, SAMPLE_GROUPS // len(run_dirs)),
            max_bytes=SAMPLE_BYTES // len(run_dirs),
        )
        runs.append({**told, **sample})
    _tell_apart(runs, run_dirs)
    return report_page(msgspec.json.encode({"made": time.time(), "runs": runs})).html


def _tell_apart(runs: list[dict[str, object]], run_dirs: Sequence[Path]) -> None:
    """Runs of the same name get as much of their path as tells them apart."""
    names = [run["name"] for run in runs]
    for run, run_dir in zip(runs, run_dirs, strict=True):
        if names.count(run["name"]) > 1:
            run["name"] = str(run_dir)
