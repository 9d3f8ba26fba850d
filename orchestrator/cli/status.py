"""`orchestrator status`: what a running service is doing and why it waits, read from its HTTP side.

Of a run that nobody runs now it says how far it came and how it ended, read from the run directory; exit code 1 then.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import ConfigError, OrchestratorError
from orchestrator.views.terminal import plain, plain_lines

if TYPE_CHECKING:
    from rich.console import Console

    from orchestrator.views.past import Past

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def register(commands: "Commands") -> None:
    """Add the command."""
    parser = commands.add_parser(
        "status",
        help="show what a running service does and what it waits for, or how a run ended",
        description="Show what a running service does and what it waits for, asked over its HTTP side. Of a run that is not running,"
        " show how far it came and how it ended, from its directory; the exit code is 1 then.",
    )
    parser.add_argument("run_dir", type=Path, nargs="?", help="run directory of the service")
    parser.add_argument("--url", help="address of the service's HTTP side, instead of a run directory")
    parser.add_argument("--token-env", help="name of the environment variable that holds the bearer token")
    parser.add_argument("--json", action="store_true", help="print the raw status")
    parser.set_defaults(run=status_command)


def status_command(arguments: argparse.Namespace) -> int:
    """Fetch and print."""
    if arguments.url is None and arguments.run_dir is None:
        raise ConfigError("status needs a run directory or --url")
    run_dir: Path | None = None if arguments.url else arguments.run_dir
    try:
        url = arguments.url or address_of(arguments.run_dir)
        run = "" if run_dir is None else str(_addresses(run_dir).get("run", ""))
        body = _fetch(f"{url.rstrip('/')}/api/status", arguments.token_env, run)
    except (_NobodyThereError, _NoHttpError) as nobody:
        past = None if run_dir is None else _read_past(run_dir)
        if past is None:
            raise
        _show_past(past, nobody, as_json=arguments.json)
        return 0 if past.state == "busy" else 1
    if arguments.json:
        # JSON has no raw control characters; whatever else answers must not steer the terminal.
        print(plain_lines(body.decode("utf-8", "replace")))
        return 0
    _show(body, url, run_dir)
    return 0


class _NobodyThereError(OrchestratorError):
    """No service answers."""


class _NoHttpError(ConfigError):
    """The run serves no HTTP."""


def _show(body: bytes, url: str, run_dir: Path | None) -> None:
    import msgspec
    from rich.console import Console
    from rich.text import Text

    from orchestrator.facts import Status
    from orchestrator.views.lines import sources
    from orchestrator.views.progress import render

    try:
        status = msgspec.json.decode(body, type=Status)
    except msgspec.DecodeError as error:
        raise OrchestratorError(
            f"{url}: what answers is not the service, or another version: {error}"
        ) from None
    console = Console()
    console.print(render(status))
    console.print(Text(plain(f"state: {status.state}; batch: {status.buffer}")))
    if status.kept_batches:
        kept = (
            f"{status.kept_batches} batches that the trainer can ask for again, {status.kept_bytes >> 20} MiB"
        )
        console.print(Text(plain(f"kept: {kept}")))
    for name, env in status.envs.items():
        if env.nodes:
            where = ", ".join(f"{server} on {node}" for server, node in env.nodes.items())
            console.print(Text(plain(f"servers of {name}: {where}")))
    for line in sources(status):
        console.print(Text(plain(f"source: {line}")))
    for what, n in status.failures.items():
        said = status.failure_reasons.get(what)
        console.print(Text(plain(f"failed: {what} ({n} rollouts){f', the last: {said}' if said else ''}")))
    if status.state == "starting" and run_dir is not None:
        _show_progress_so_far(run_dir, console)


def _show_progress_so_far(run_dir: Path, console: "Console") -> None:
    """What earlier processes of a run that starts again have done."""
    from orchestrator.views.past import render_progress

    past = _read_past(run_dir)
    if past is not None and past.step:
        console.print("so far:")
        for line in render_progress(past, time.time(), console.width, bars=_bars(console)):
            console.print(line)


def _read_past(run_dir: Path) -> "Past | None":
    """What the directory of a run tells, if it has a journal."""
    from orchestrator.errors import JournalError
    from orchestrator.views.past import read_past

    try:
        return read_past(run_dir)
    except JournalError:
        return None


def _show_past(past: "Past", nobody: OrchestratorError, *, as_json: bool) -> None:
    import msgspec
    from rich.console import Console
    from rich.text import Text

    from orchestrator.views.past import render_past

    if as_json:
        print(msgspec.json.encode(past).decode())
        return
    console = Console()
    for part in render_past(past, time.time(), console.width, bars=_bars(console)):
        console.print(part)
    if past.state == "busy":
        console.print(Text(plain(str(nobody)), style="yellow"))


def _bars(console: "Console") -> str:
    from orchestrator.views.numbers import BARS, PLAIN_BARS

    return PLAIN_BARS if console.options.ascii_only else BARS


def _address_of(run_dir: Path | None) -> str:
    if run_dir is None:
        raise ConfigError("status needs a run directory or --url")
    return address_of(run_dir)


def address_of(run_dir: Path) -> str:
    """Where the service of a run directory serves HTTP; ConfigError if it does not, or if there is no run."""
    address = _addresses(run_dir)["http"]
    if address is None:
        raise _NoHttpError(
            f"{run_dir}: this run does not serve HTTP (http.enabled = false); set http.enabled = true and start it again"
        )
    return str(address)


def _addresses(run_dir: Path) -> dict[str, Any]:
    """What the last process of the run noted about where it is; "http" is among it."""
    path = run_dir / "addresses.json"
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
        return {**noted, "http": noted["http"]}
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; is {run_dir} the directory of a run?") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def _fetch(url: str, token_env: str | None, run: str) -> bytes:
    """The status; `run` names the run that is asked for, where that is known."""
    import http.client
    import urllib.error
    import urllib.request

    from orchestrator.run.commands import RUN_HEADER

    headers = {}
    if token_env:
        headers["Authorization"] = f"Bearer {os.environ.get(token_env, '')}"
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url}: not an http:// or https:// address")
    request = urllib.request.Request(url, headers=headers)  # noqa: S310  the user names the address
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:  # noqa: S310  same
            body, answers = bytes(reply.read()), reply.headers.get(RUN_HEADER, run)
    except urllib.error.HTTPError as error:
        raise OrchestratorError(f"{url}: {error.code} {error.reason}") from None
    except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
        raise _NobodyThereError(f"{url}: nothing answers ({error}); is the service running?") from None
    if run and answers != run:
        raise _NobodyThereError(f"{url}: another run answers there by now; this one is not running")
    return body
