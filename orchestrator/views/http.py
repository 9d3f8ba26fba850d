"""Status, metrics and health over HTTP, in the service's own event loop.

Everything is read from the facts at the moment of the request. Off loopback every path but `/healthz` needs a bearer
token. Nothing here changes the run.
"""

import asyncio
import contextlib
import hmac
import socket
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from orchestrator.errors import ConfigError
from orchestrator.facts import Status

OPEN_PATHS = frozenset({"/healthz"})


class BearerToken:
    """Refuses requests without the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                refusal = PlainTextResponse("a bearer token is needed\n", 401, {"WWW-Authenticate": "Bearer"})
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


def build_app(
    *, status: Callable[[], Status | None], metrics: Callable[[], bytes], token: str | None
) -> Starlette:
    """The routes. There is no status while environments and inference servers are still waited for."""

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        now = status()
        state = "starting" if now is None else now.state
        return PlainTextResponse(f"{state}\n", 200 if state == "running" else 503)

    async def api_status(request: Request) -> Response:
        now = status()
        body = msgspec.json.encode({"state": "starting"} if now is None else now)
        return Response(body, 503 if now is None else 200, media_type="application/json")

    async def prometheus(request: Request) -> Response:
        return Response(metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    routes = [
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/metrics", prometheus),
        Route("/api/status", api_status),
    ]
    return Starlette(routes=routes, middleware=[Middleware(BearerToken, token=token)] if token else [])


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: the service owns signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serve_http(app: Starlette, *, host: str, port: int) -> AsyncIterator[str]:
    """Serve until the block is left; yields the address."""
    listener = _listen(host, port)
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=2,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    try:
        bound = listener.getsockname()
        name = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        yield f"http://{name}:{bound[1]}"
    finally:
        # Not a task group: it would wrap an error of the block, which is not ours, into a group.
        server.should_exit = True
        await serving


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(
            f"http: cannot listen on {host}:{port}: {error.strerror or error}; set http.port to another one, or 0 for any"
        ) from None
    listener.setblocking(False)
    return listener
