"""Status, metrics and health over HTTP, in the service's own event loop.

Everything is read from the facts at the moment of the request, without waiting. Off loopback every path but `/healthz`
needs a bearer token; on loopback a request must name this machine, so that a web page which has its own name point
here (DNS rebinding) reads nothing. Connections are bounded in number and in idle time. Errors are one line of plain
text; a request that fails is answered with 500, logged, and harms nobody else. Nothing here changes the run.
"""

import asyncio
import hmac
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import msgspec
import structlog
from aiohttp import web

from orchestrator.errors import ConfigError
from orchestrator.facts import Status

OPEN_PATHS = frozenset({"/healthz"})
MAX_CONNECTIONS = 256
"""Probes, scrapers and a few people; what comes on top is closed at once."""
IDLE_S = 60.0
"""A connection without a whole request for so long is closed, whether it is silent, slow to ask or slow to read."""
_SHUTDOWN_S = 2.0

log = structlog.get_logger()


class App:
    """The paths, what each answers, and who may ask."""

    def __init__(self, routes: Mapping[str, Callable[[], web.Response]], *, token: str | None) -> None:
        self._routes = routes
        self._expected = None if token is None else f"Bearer {token}".encode()

    def answer(self, request: web.BaseRequest) -> web.Response:
        """Without the token it does not even say which paths there are."""
        if request.path not in OPEN_PATHS and not self._may_ask(request):
            return _line(401, "a bearer token is needed", {"WWW-Authenticate": "Bearer"})
        route = self._routes.get(request.path)
        if route is None:
            return _line(404, f"there is nothing here; there are: {', '.join(self._routes)}")
        if request.method not in ("GET", "HEAD"):
            return _line(405, "only GET is answered", {"Allow": "GET, HEAD"})
        return route()

    def _may_ask(self, request: web.BaseRequest) -> bool:
        if self._expected is None:
            return True
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        return hmac.compare_digest(given, self._expected)


def build_app(*, status: Callable[[], Status], metrics: Callable[[], bytes], token: str | None) -> App:
    """The routes."""

    def healthz() -> web.Response:
        return _line(200, "ok")

    def readyz() -> web.Response:
        state = status().state
        return _line(200 if state == "running" else 503, state)

    def api_status() -> web.Response:
        return web.Response(body=msgspec.json.encode(status()), content_type="application/json")

    def prometheus() -> web.Response:
        return web.Response(
            body=metrics(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    routes = {"/healthz": healthz, "/readyz": readyz, "/metrics": prometheus, "/api/status": api_status}
    return App(routes, token=token)


@asynccontextmanager
async def serve_http(
    app: App, *, host: str, port: int, max_connections: int = MAX_CONNECTIONS, idle_s: float = IDLE_S
) -> AsyncIterator[str]:
    """Serve until the block is left; yields the address."""
    listener = _listen(host, port)
    server = _Server(app, host=host, max_connections=max_connections, idle_s=idle_s)
    accepting = await asyncio.get_running_loop().create_server(server, sock=listener)
    try:
        bound = listener.getsockname()
        name = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        yield f"http://{name}:{bound[1]}"
    finally:
        accepting.close()
        server.pre_shutdown()
        await server.shutdown(_SHUTDOWN_S)


class _Server(web.Server):
    """All connections: at most so many, and each closed when no request has come for too long."""

    def __init__(self, app: App, *, host: str, max_connections: int, idle_s: float) -> None:
        # What is left of a request's body is not waited for: no path takes one.
        self._settings: dict[str, Any] = {"access_log": None, "lingering_time": 0.0}
        super().__init__(self._answer, **self._settings)
        self._app = app
        self._host = host
        self._max_connections = max_connections
        self._idle_s = idle_s
        self._deadlines: dict[web.RequestHandler, asyncio.TimerHandle] = {}

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._settings)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self.connections) > self._max_connections:
            transport.abort()
            return
        self._deadlines[handler] = self._loop.call_later(self._idle_s, transport.abort)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        deadline = self._deadlines.pop(handler, None)
        if deadline is not None:
            deadline.cancel()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self._postpone_deadline(request)
        asked_for = request.headers.get("Host")
        if asked_for is not None and _is_loopback(self._host) and not self._is_own_name(_name_in(asked_for)):
            return _line(403, "this service answers to the names of this machine alone; ask for localhost")
        return self._app.answer(request)

    def _postpone_deadline(self, request: web.BaseRequest) -> None:
        handler, transport = request.protocol, request.transport
        if handler in self._deadlines and transport is not None:
            self._deadlines[handler].cancel()
            self._deadlines[handler] = self._loop.call_later(self._idle_s, transport.abort)

    def _is_own_name(self, name: str) -> bool:
        return _is_loopback(name) or name == self._host.lower()


class _Connection(web.RequestHandler):
    """One connection; its errors are one line, whoever asks."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            log.error("http.failed", path=request.path, exc_info=exc)
        response = _line(status, HTTPStatus(status).phrase.lower())
        response.force_close()
        return response


def _line(status: int, text: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(status=status, text=f"{text}\n", headers=headers)


def _name_in(host: str) -> str:
    """The name or address in a Host header, without its port and brackets."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.rstrip(".").lower()


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


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
