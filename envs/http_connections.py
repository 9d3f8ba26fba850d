"""HTTP/1.1 connections to inference servers: kept open, one request at a time on each, the answer whole.

At most `limit` requests are under way; the others wait for their turn, in order. A connection that has carried its
answer is kept for a few seconds, the last one first, and is given up when the server closes it, when anything was odd
about the answer, or when whoever asked does not wait any longer. Redirects are not followed and proxies of
the environment not asked. Names are looked up once a minute, and after a connection that was not made; of several addresses each connection begins with the next.
Raises OSError (TimeoutError included) when the connection fails, and the errors of `envs.http_answers`.

Written for one kind of request because a rollout of a few tokens spends half of its CPU time in a general client.
"""

import asyncio
import base64
import collections
import contextlib
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Any, cast

import aiohappyeyeballs
from yarl import URL

from envs.http_answers import AnswerReader, BadAnswerError, TooLargeError
from envs.vanished import watchful_socket

_NAMES_KEPT_S = 60.0
_NEXT_ADDRESS_AFTER_S = 0.25

Address = tuple[int, int, int, str, tuple[Any, ...]]


class Target:
    """Where requests go: what is the same in all of them, computed once."""

    __slots__ = ("credentials", "head", "host", "origin", "port", "tls", "url")

    def __init__(self, url: URL) -> None:
        assert url.raw_host is not None
        assert url.port is not None
        self.url = url
        self.host, self.port = url.raw_host, url.port
        self.tls = url.scheme == "https"
        self.origin = (self.host, self.port, self.tls)
        self.credentials = ""
        if url.user is not None or url.password is not None:
            words = f"{url.user or ''}:{url.password or ''}"
            self.credentials = f"Basic {base64.b64encode(words.encode()).decode()}"
        self.head = f"POST {url.raw_path_qs} HTTP/1.1\r\nHost: {url.host_port_subcomponent}\r\nAccept-Encoding: identity\r\n"


class HttpConnections:
    """The connections of one client; used and closed inside one event loop."""

    def __init__(self, *, limit: int, connect_timeout_s: float, keep_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._keep_s = keep_s
        self._places = asyncio.Semaphore(limit)
        self._idle: dict[tuple[str, int, bool], list[_Connection]] = {}
        self._busy: set[_Connection] = set()
        self._names: dict[tuple[str, int], tuple[float, collections.deque[Address]]] = {}
        self._lookups: dict[tuple[str, int], asyncio.Lock] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._tls: ssl.SSLContext | None = None
        self._closed = False

    async def post(
        self, target: Target, headers: Mapping[str, str], body: bytes, *, max_bytes: int
    ) -> AnswerReader:
        """Send a request and wait for the whole answer, of which at most `max_bytes` are read."""
        head = _head(target, headers, len(body))
        async with self._places:
            connection = self._take(target) or await self._connect(target)
            self._busy.add(connection)
            try:
                answer = await connection.ask(head, body, max_bytes)
            except BaseException:
                connection.close()
                raise
            finally:
                self._busy.discard(connection)
            if answer.keep and not self._closed and connection.kept():
                self._idle.setdefault(target.origin, []).append(connection)
                if self._sweep is None:
                    self._sweep = asyncio.get_running_loop().call_later(self._keep_s, self._give_up_old)
            else:
                connection.close()
            return answer

    async def aclose(self) -> None:
        """Close every connection; requests under way fail."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        connections = [*self._busy, *(one for idle in self._idle.values() for one in idle)]
        self._idle.clear()
        for connection in connections:
            connection.close()
        for connection in connections:
            await connection.ended

    def _take(self, target: Target) -> "_Connection | None":
        """A connection that is open and idle, the last used one first."""
        if self._closed:
            raise RuntimeError("the client is closed")
        idle = self._idle.get(target.origin)
        oldest = time.monotonic() - self._keep_s
        while idle:
            connection = idle.pop()
            if connection.is_open and connection.idle_since > oldest:
                return connection
            connection.close()
        return None

    def _give_up_old(self) -> None:
        """Close what nobody has used for a while; a server would do it at the moment of the next request."""
        self._sweep = None
        oldest = time.monotonic() - self._keep_s
        for origin, idle in list(self._idle.items()):
            young = []
            for connection in idle:
                if connection.is_open and connection.idle_since > oldest:
                    young.append(connection)
                else:
                    connection.close()
            if young:
                self._idle[origin] = young
            else:
                del self._idle[origin]
        if self._idle:
            self._sweep = asyncio.get_running_loop().call_later(self._keep_s, self._give_up_old)

    async def _connect(self, target: Target) -> "_Connection":
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                context = self._tls_context() if target.tls else None
                addresses = await self._look_up(target.host, target.port)
                sock = await aiohappyeyeballs.start_connection(
                    addresses,
                    happy_eyeballs_delay=_NEXT_ADDRESS_AFTER_S,
                    interleave=1,
                    loop=loop,
                    socket_factory=watchful_socket,
                )
                try:
                    _, connection = await loop.create_connection(lambda: _Connection(loop), sock=sock)
                except BaseException:
                    # uvloop before 0.23 has closed the descriptor: the error must not take the place of a cancellation.
                    with contextlib.suppress(OSError):
                        sock.close()
                    raise
                if context is not None:
                    await connection.encrypt(context, target.host.rstrip("."))
        except TimeoutError:
            self._forget(target)
            raise TimeoutError(
                f"no connection to {target.host}:{target.port} in {self._connect_timeout_s:g} s"
            ) from None
        except (OSError, UnicodeError) as error:  # the latter for a name that no name server could have
            self._forget(target)
            raise ConnectionError(f"cannot connect to {target.host}:{target.port}: {error}") from error
        return connection

    def _forget(self, target: Target) -> None:
        """Have the name looked up anew: a server that was started again may have another address."""
        self._names.pop((target.host, target.port), None)

    async def _look_up(self, host: str, port: int) -> list[Address]:
        """The addresses of a host, each time beginning with the next; looked up once for all who wait."""
        async with self._lookups.setdefault((host, port), asyncio.Lock()):
            until, addresses = self._names.get((host, port), (0.0, collections.deque[Address]()))
            if time.monotonic() >= until:
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
                addresses = collections.deque(cast("list[Address]", found))
                self._names[host, port] = (time.monotonic() + _NAMES_KEPT_S, addresses)
        order = list(addresses)
        addresses.rotate(-1)
        return order

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])
        return self._tls


class _Connection(asyncio.Protocol):
    """One connection; whoever took it is the only one to use it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._answer: AnswerReader | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self.ended: asyncio.Future[None] = loop.create_future()
        self.is_open = False
        self.idle_since = 0.0

    async def encrypt(self, context: ssl.SSLContext, name: str) -> None:
        """Go on over TLS, if the server can show that this is its name; else the connection is closed.

        Not while the connection is made: asyncio's own loop does not always close one whose handshake is cancelled, and
        whoever closes its socket instead leaves a transport behind that keeps the descriptor's next owner from its own.
        """
        assert self._transport is not None
        if self._transport.is_closing():
            raise ConnectionResetError("the server closed the connection")
        try:
            encrypted = await self._loop.start_tls(self._transport, self, context, server_hostname=name)
        except BaseException:
            self.close()
            raise
        self._transport = encrypted

    async def ask(self, head: bytes, body: bytes, max_bytes: int) -> AnswerReader:
        """Send a request and wait for its answer."""
        if self._transport is None or not self.is_open:
            raise ConnectionResetError("the server closed the connection")
        self._answer = answer = AnswerReader(max_bytes)
        self._waiter = self._loop.create_future()
        self._transport.writelines((head, body))
        try:
            await self._waiter
        finally:
            self._answer = self._waiter = None
        if self._error is not None:
            raise self._error
        return answer

    def kept(self) -> bool:
        """Whether another request can be sent; not when the server answered before it had read this one."""
        assert self._transport is not None
        self.idle_since = time.monotonic()
        return self.is_open and not self._transport.get_write_buffer_size()

    def close(self) -> None:
        """Close at once: what is left of a request is not sent."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None or answer.done:
            self.close()  # nobody asked: the connection is not to be trusted
            return
        try:
            answer.feed(data)
        except (BadAnswerError, TooLargeError) as error:
            self._wake(error)
            return
        if answer.done:
            self._wake(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if not self.ended.done():
            self.ended.set_result(None)
        if self._answer is None:
            return
        try:
            self._answer.end()
        except ConnectionResetError as early:
            self._wake(exc if isinstance(exc, OSError) else early)
        else:
            self._wake(None)

    def _wake(self, error: Exception | None) -> None:
        """Let `ask` go on. The error is kept beside: one that is set on the future of a cancelled task is complained about."""
        if self._waiter is not None and not self._waiter.done():
            self._error = error
            self._waiter.set_result(None)


def _head(target: Target, headers: Mapping[str, str], length: int) -> bytes:
    """The head of a request; ValueError for a header that would end before it should."""
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    if target.credentials:
        lines = [line for line in lines if not line.lower().startswith("authorization:")]
        lines.append(f"Authorization: {target.credentials}\r\n")
    text = "".join(lines)
    if text.count("\n") != len(lines) or text.count("\r") != len(lines) or "\0" in text:
        raise ValueError(
            "a header of a request holds a line break; look at the variable that api_key_env names"
        )
    return f"{target.head}{text}Content-Length: {length}\r\n\r\n".encode()
