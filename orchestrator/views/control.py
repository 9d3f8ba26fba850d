"""Commands over HTTP: POST /api/control with a JSON object; docs/control.md has the contract.

Whoever sends one needs a token, on loopback too: that of the run directory's file, or the one that reading needs off
loopback. The body must be declared as JSON, which no form of a foreign page can do. Every answer is a JSON object with
`ok`, a sentence (`text` or `error`) and what the run is doing now.
"""

import hmac
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from orchestrator.facts import Status
from orchestrator.run.commands import Command, CommandError, parse_command
from orchestrator.views.http import App, Request
from orchestrator.views.lines import sources
from orchestrator.views.terminal import plain

PATH = "/api/control"
_MOST_BY = 100
"""Characters of what a caller says of itself."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a command; `status` is the run after it."""

    code: int
    text: str
    status: Status
    changed: bool = False


Tell = Callable[[Command, str], Awaitable[Answer]]


def add_control(app: App, *, tell: Tell, tokens: Sequence[str]) -> None:
    """Have the app take commands from whoever has one of the tokens."""
    expected = [f"Bearer {token}".encode() for token in tokens]

    async def control(request: Request) -> web.Response:
        if request.content_type != "application/json":
            return _answer(415, error="the body must be JSON: send Content-Type: application/json")
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not any(hmac.compare_digest(given, one) for one in expected):
            missing = "needs a token: that in control.token of the run directory"
            why = "the token is not the right one" if given else missing
            return _answer(401, error=why, headers={"WWW-Authenticate": "Bearer"})
        try:
            said = msgspec.json.decode(await request.read())
            by = said.pop("by", None) if isinstance(said, dict) else None
            command = parse_command(said)
        except (msgspec.DecodeError, CommandError) as error:
            return _answer(400, error=str(error))
        answer = await tell(command, _origin(request, by))
        status = answer.status
        now: dict[str, Any] = {
            "state": status.state,
            "waiting_for": status.waiting_for,
            "paused": next((wait.text for wait in status.waits if wait.kind == "paused"), ""),
            "changes": status.changes,
            "sources": sources(status),
        }
        if answer.code != web.HTTPOk.status_code:
            return _answer(answer.code, error=answer.text, **now)
        return _answer(answer.code, text=answer.text, changed=answer.changed, **now)

    # The handler asks for the token itself: one of two will do.
    app.add("POST", PATH, control, open_to_all=True)


def _origin(request: Request, by: object) -> str:
    """Who sent it: as the caller says, and from where, unless that is this machine."""
    remote = request.remote or "unknown"
    if not isinstance(by, str) or not by:
        return f"http {remote}"
    local = remote in ("127.0.0.1", "::1")
    return plain(by)[:_MOST_BY] if local else f"{plain(by)[:_MOST_BY]} from {remote}"


def _answer(
    code: int, *, error: str = "", headers: dict[str, str] | None = None, **fields: Any
) -> web.Response:
    body: dict[str, Any] = {"ok": not error, **({"error": error} if error else {}), **fields}
    return web.Response(
        status=code, body=msgspec.json.encode(body), content_type="application/json", headers=headers
    )
