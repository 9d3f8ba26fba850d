"""`orchestrator ctl`: changes a run while it goes on, over its HTTP side; docs/control.md tells what each command does."""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.cli.status import address_of
from orchestrator.errors import ConfigError, OrchestratorError
from orchestrator.views.terminal import plain, plain_lines

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

TOKEN_VARIABLE = "ORCHESTRATOR_TOKEN"  # noqa: S105  the name of a variable

ANSWER_S = 30
REFUSED = (400, 409)
"""Codes of an answer by which a command has changed nothing."""

USAGE = {
    "pause": "",
    "resume": "",
    "drain": "",
    "ratio": "ENV=NUMBER …",
    "quarantine": "ENV",
    "restore": "ENV",
    "eval": "[ENV]",
    "max-inflight": "N",
    "endpoint": "add|remove URL",
}
TELLS = {
    "pause": "open no new groups; what is open ends, formed batches are served",
    "resume": "go on after a pause",
    "drain": "let open groups end, save, exit 0, as after SIGTERM",
    "ratio": "other shares of the mix, in the sense of `ratio` in the configuration",
    "quarantine": "give an env no rollouts and no probes until it is restored",
    "restore": "take an env back, whoever left it out",
    "eval": "evaluate an env now, or all of them",
    "max-inflight": "how many rollouts may be in flight",
    "endpoint": "one inference server more or less",
}


def register(commands: "Commands") -> None:
    """Add the command."""
    listed = "\n".join(f"  {f'{name} {USAGE[name]}':<26}{TELLS[name]}" for name in USAGE)
    parser = commands.add_parser(
        "ctl",
        help="change a run while it goes on: pause, ratio, quarantine, …",
        description="Change a run while it goes on.",
        epilog=f"commands:\n{listed}\n\nRatios, max-inflight, quarantines and endpoints last over a restart.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", metavar="RUN_DIR|URL", help="run directory, or address of the HTTP side")
    parser.add_argument("order", metavar="COMMAND", choices=list(USAGE), help=", ".join(USAGE))
    parser.add_argument("arguments", metavar="ARGUMENT", nargs="*", help="what the command needs")
    parser.add_argument(
        "--token-env",
        metavar="NAME",
        help=f"variable that holds the token; else that of the run directory, or {TOKEN_VARIABLE} for a URL",
    )
    parser.add_argument("--json", action="store_true", help="print the answer as it came")
    parser.set_defaults(run=ctl_command)


def ctl_command(arguments: argparse.Namespace) -> int:
    """Send a command and print what came of it."""
    command = build_command(arguments.order, arguments.arguments)
    command["by"] = f"cli uid {os.getuid()} pid {os.getpid()}"
    remote = arguments.target.startswith(("http://", "https://"))
    run_dir = None if remote else Path(arguments.target)
    url = arguments.target.rstrip("/") if run_dir is None else address_of(run_dir)
    code, body = _post(f"{url}/api/control", command, _token(run_dir, arguments.token_env), run_dir)
    try:
        answer = json.loads(body)
        ok = bool(answer["ok"])
    except (ValueError, LookupError, TypeError):
        said = plain(body.decode("utf-8", "replace"))[:200]
        raise OrchestratorError(f"{url}: what answers is not the service: {code} {said}") from None
    if arguments.json:
        print(plain_lines(body.decode("utf-8", "replace")))
        return 0 if ok else 1
    if not ok:
        refused = "refused: " if code in REFUSED else ""
        raise OrchestratorError(f"{refused}{answer.get('error', '')}")
    print(plain(f"{answer.get('text', '')}"))
    print(plain(f"state: {answer.get('state')}; waits for {answer.get('waiting_for') or 'nothing'}"))
    for line in answer.get("changes", ()):
        print(plain(f"differs from the configuration: {line}"))
    for line in answer.get("sources", ()):
        print(plain(f"source: {line}"))
    return 0


def build_command(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The command as the service takes it; ConfigError that shows how it is written."""
    wrong = ConfigError(f"ctl {name}: write: orchestrator ctl RUN_DIR {name} {USAGE[name]}".rstrip())
    match name, list(arguments):
        case (("pause" | "resume" | "drain" | "eval"), []):
            return {"command": name}
        case (("quarantine" | "restore" | "eval"), [env]):
            return {"command": name, "env": env}
        case "max-inflight", [text]:
            try:
                return {"command": name, "value": int(text)}
            except ValueError:
                raise wrong from None
        case "endpoint", [("add" | "remove") as action, url]:
            return {"command": name, "action": action, "url": url}
        case "ratio", [_, *_]:
            try:
                envs = {env: float(text) for env, _, text in (pair.rpartition("=") for pair in arguments)}
            except ValueError:
                raise wrong from None
            if "" not in envs and len(envs) == len(arguments):
                return {"command": name, "envs": envs}
    raise wrong


def _token(run_dir: Path | None, token_env: str | None) -> str:
    """The token to send; ConfigError that says where one could come from."""
    if token_env is not None or run_dir is None:
        name = token_env or TOKEN_VARIABLE
        token = os.environ.get(name, "")
        if not token:
            raise ConfigError(
                f"ctl needs a token: the variable {name} is not set; it is in control.token of the run directory"
            )
        return token
    from orchestrator.run.commands import TOKEN_FILE

    path = run_dir / TOKEN_FILE
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise OrchestratorError(f"{run_dir}: the run is not running{_last_words(run_dir)}") from None
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); only the owner of the run may change it"
        ) from None


def _last_words(run_dir: Path) -> str:
    """How the run of a directory ended, if it has said so."""
    try:
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        return f": it ended after step {summary['steps']} ({summary['end']}, {summary['finished_at']})"
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def _post(url: str, command: dict[str, Any], token: str, run_dir: Path | None) -> tuple[int, bytes]:
    """Code and body of whatever answer there was."""
    import http.client
    import urllib.error
    import urllib.request

    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(  # noqa: S310  the user names the address
        url, data=json.dumps(command, allow_nan=True).encode(), headers=headers, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:  # noqa: S310  same
            return reply.status, bytes(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, bytes(error.read())
    except ValueError as error:
        raise ConfigError(f"{url}: {error}") from None
    except TimeoutError:
        raise OrchestratorError(
            f"{url}: no answer within {ANSWER_S} s; what has changed, `orchestrator status` says"
        ) from None
    except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
        ended = "" if run_dir is None else _last_words(run_dir)
        raise OrchestratorError(f"{url}: nothing answers ({error}); the run is not running{ended}") from None
