"""The HTTP side, in the service's own event loop: who may ask, and which handler answers.

Off loopback every path but `/healthz` and those that are open to all needs a bearer token; on loopback a request must
name this machine, so that a web page which has its own name point here (DNS rebinding) reads nothing, and nowhere may
a page from elsewhere send anything but GET. Connections are bounded in number and in idle time, bodies in size. An answer
that is written piece by piece keeps its connection for as long as its client reads; who does not is disconnected.
Errors are one line of plain text; a request that fails is answered with 500, logged, and harms nobody else.
Handlers change a run only where another module adds one that does.
"""

import asyncio
import hmac
import ipaddress
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import msgspec
import structlog
from aiohttp import web

from envs.listening import stop_listening
from orchestrator.errors import ConfigError
from orchestrator.facts import Status
from orchestrator.run.commands import RUN_HEADER

MAX_CONNECTIONS = 256
"""Probes, scrapers and people; what comes on top is closed at once."""
MAX_BODY_BYTES = 64 * 1024
IDLE_S = 60.0
"""A connection without a whole request for so long is closed, whether it is silent, slow to ask or slow to read."""
METRICS_S = 1.0
"""Scrapers that come within so long of each other get the same text: making it costs milliseconds of the event loop."""
_SHUTDOWN_S = 2.0

Handler = Callable[["Request"], Awaitable[web.StreamResponse]]

log = structlog.get_logger()


class Request(web.BaseRequest):
    """A request whose answer may be written piece by piece."""

    @property
    def is_read(self) -> bool:
        """Whether the client has taken all that was written so far."""
        return self.transport is not None and self.transport.get_write_buffer_size() == 0

    def stay_open(self) -> None:
        """The idle time begins anew; call it before a piece, if what came before it was read."""
        if isinstance(self.protocol, _Connection):
            self.protocol.postpone_deadline()


class App:
    """The paths, what each answers, and who may ask."""

    def __init__(self, *, token: str | None) -> None:
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._routes: dict[tuple[str, str], Handler] = {}
        self._open: set[str] = set()

    def add(self, method: str, path: str, handler: Handler, *, open_to_all: bool = False) -> None:
        """Have a handler answer a path, or all paths below it where it ends with a slash (but for `/` itself).

        GET answers HEAD too. `open_to_all`: without the token, so it must tell nothing about the run.
        """
        self._routes[method, path] = handler
        if open_to_all:
            self._open.add(path)

    async def answer(self, request: Request) -> web.StreamResponse:
        """Without the token it does not even say which paths there are."""
        path = self._path_of(request)
        if path not in self._open and not self._may_ask(request):
            return line(401, "a bearer token is needed", {"WWW-Authenticate": "Bearer"})
        methods = [method for method, there in self._routes if there == path]
        if not methods:
            known = ", ".join(dict.fromkeys(path for _, path in self._routes))
            return line(404, f"there is nothing here; there are: {known}")
        method = "GET" if request.method == "HEAD" else request.method
        if method not in methods:
            allowed = [*methods, "HEAD"] if "GET" in methods else methods
            return line(405, f"only {' and '.join(methods)} is answered", {"Allow": ", ".join(allowed)})
        if method != "GET" and not _is_from_here(request):
            return line(403, "a page from elsewhere may not send this")
        try:
            return await self._routes[method, path](request)
        except web.HTTPException as error:
            return line(error.status, HTTPStatus(error.status).phrase.lower())

    def _path_of(self, request: Request) -> str:
        """The route that stands for the request's path: the path itself, or the longest prefix of it."""
        known = {path for _, path in self._routes}
        path = request.path
        if path in known:
            return path
        above = [
            prefix for prefix in known if prefix.endswith("/") and prefix != "/" and path.startswith(prefix)
        ]
        return max(above, key=len, default=path)

    def _may_ask(self, request: Request) -> bool:
        if self._expected is None:
            return True
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        return hmac.compare_digest(given, self._expected)


def build_app(
    *,
    status: Callable[[], Status],
    metrics: Callable[[], bytes],
    token: str | None,
    run_id: str = "",
    clock: Callable[[], float] = time.monotonic,
) -> App:
    """What probes, scrapers and `orchestrator status` ask for."""
    named = {RUN_HEADER: run_id} if run_id else None
    scraped: tuple[float, bytes] = (float("-inf"), b"")

    async def healthz(_: Request) -> web.Response:
        return line(200, "ok")

    async def readyz(_: Request) -> web.Response:
        state = status().state
        return line(200 if state == "running" else 503, state)

    async def api_status(_: Request) -> web.Response:
        return web.Response(
            body=msgspec.json.encode(status()), content_type="application/json", headers=named
        )

    async def prometheus(_: Request) -> web.Response:
        nonlocal scraped
        if clock() - scraped[0] >= METRICS_S:
            scraped = (clock(), metrics())
        return web.Response(
            body=scraped[1], headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    app = App(token=token)
    app.add("GET", "/healthz", healthz, open_to_all=True)
    app.add("GET", "/readyz", readyz)
    app.add("GET", "/metrics", prometheus)
    app.add("GET", "/api/status", api_status)
    return app


def line(status: int, text: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """An answer of one line; what it quotes from elsewhere may not add another."""
    return web.Response(status=status, text=f"{' '.join(text.splitlines())}\n", headers=headers)


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
        await stop_listening(accepting)
        server.pre_shutdown()
        await server.shutdown(_SHUTDOWN_S)


class _Server(web.Server):
    """All connections: at most so many, and each closed when no request has come for too long."""

    def __init__(self, app: App, *, host: str, max_connections: int, idle_s: float) -> None:
        # What is left of a body that no handler wanted is not waited for.
        self._settings: dict[str, Any] = {"access_log": None, "lingering_time": 0.0}
        super().__init__(self._answer, request_factory=self._build_request, **self._settings)  # type: ignore[arg-type]
        self._app = app
        self._host = host
        self._max_connections = max_connections
        self._idle_s = idle_s

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, idle_s=self._idle_s, loop=self._loop, **self._settings)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self.connections) > self._max_connections:
            # Not before its task has begun to wait for a request, and before any request is read.
            self._loop.call_soon(transport.abort)
        elif isinstance(handler, _Connection):
            handler.postpone_deadline()

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        if isinstance(handler, _Connection):
            handler.cancel_deadline()

    async def _answer(self, request: Request) -> web.StreamResponse:
        if isinstance(request.protocol, _Connection):
            request.protocol.postpone_deadline()
        asked_for = request.headers.get("Host")
        if asked_for is not None and _is_loopback(self._host) and not self._is_own_name(_name_in(asked_for)):
            return line(403, "this service answers to the names of this machine alone; ask for localhost")
        return await self._app.answer(request)

    def _build_request(self, *parts: Any) -> Request:
        return Request(*(*parts, self._loop), client_max_size=MAX_BODY_BYTES)

    def _is_own_name(self, name: str) -> bool:
        return _is_loopback(name) or name == self._host.lower()


class _Connection(web.RequestHandler):
    """One connection; it ends with its idle time, and its errors are one line, whoever asks."""

    __slots__ = ("_deadline", "_idle_s")

    def __init__(self, manager: web.Server, *, idle_s: float, **settings: Any) -> None:
        super().__init__(manager, **settings)
        self._idle_s = idle_s
        self._deadline: asyncio.TimerHandle | None = None

    def postpone_deadline(self) -> None:
        """The idle time begins anew."""
        self.cancel_deadline()
        if self.transport is not None:
            self._deadline = self._loop.call_later(self._idle_s, self.transport.abort)

    def cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            log.error("http.failed", path=request.path, exc_info=exc)
        response = line(status, HTTPStatus(status).phrase.lower())
        response.force_close()
        return response


def _is_from_here(request: Request) -> bool:
    """Whether the request comes from a page of this very service, or from no page at all."""
    origin = request.headers.get("Origin")
    return origin is None or urlsplit(origin).netloc.lower() == request.headers.get("Host", "").lower()


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
