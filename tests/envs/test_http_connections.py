"""Connections to inference servers: kept, given up, and what is sent on them."""

import asyncio
import os
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from shutil import which
from typing import Any

import pytest
from yarl import URL

from envs.http_connections import HttpConnections, Target

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def answer_once(_: "Server", writer: asyncio.StreamWriter) -> None:
    """Each request needs a connection of its own."""
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok")


class Server:
    """Answers each request as the test says; keeps the heads and bodies that came, and whose connection each was."""

    def __init__(self, answer: Callable[["Server", asyncio.StreamWriter], None]) -> None:
        self.answer = answer
        self.url = URL()
        self.heads: list[str] = []
        self.bodies: list[bytes] = []
        self.ports: list[int] = []
        self.arrived = asyncio.Event()
        self.left = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
                self.bodies.append(await reader.readexactly(length))
                self.heads.append(head)
                self.ports.append(writer.get_extra_info("peername")[1])
                self.arrived.set()
                self.answer(self, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left.set()
        finally:
            writer.close()


@asynccontextmanager
async def serving(
    answer: Callable[[Server, asyncio.StreamWriter], None] | None = None,
    *,
    host: str = "127.0.0.1",
    certificate: Path | None = None,
) -> AsyncIterator[Server]:
    server = Server(answer or (lambda _, writer: writer.write(ANSWER)))
    context = None
    if certificate is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    listener = await asyncio.start_server(server.serve, host, 0, ssl=context)
    port = listener.sockets[0].getsockname()[1]
    server.url = URL.build(scheme="https" if context else "http", host=host, port=port, path="/v1/x")
    async with listener:
        yield server


@asynccontextmanager
async def connections(*, limit: int = 4, keep_s: float = 60.0) -> AsyncIterator[HttpConnections]:
    opened = HttpConnections(limit=limit, connect_timeout_s=10.0, keep_s=keep_s)
    try:
        yield opened
    finally:
        await opened.aclose()


async def ask(pool: HttpConnections, url: URL, body: bytes = b"{}", **headers: str) -> bytes:
    return (await pool.post(Target(url), headers, body, max_bytes=1 << 20)).body()


async def test_a_connection_carries_one_request_after_the_other() -> None:
    """Neither a handshake nor a port for each."""
    async with serving() as server, connections() as pool:
        for number in range(5):
            assert await ask(pool, server.url, b"%d" % number) == b"ok"
        assert server.bodies == [b"0", b"1", b"2", b"3", b"4"]
        assert len(set(server.ports)) == 1


async def test_a_connection_that_the_server_closed_is_not_used_again() -> None:
    """Whether it said so or not; the next request takes a new one and does not fail."""

    def answer(server: Server, writer: asyncio.StreamWriter) -> None:
        polite = len(server.heads) == 1
        writer.write(ANSWER.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") if polite else ANSWER)
        writer.close()

    async with serving(answer) as server, connections() as pool:
        for _ in range(3):
            assert await ask(pool, server.url) == b"ok"
            for kept in pool._idle.get(Target(server.url).origin, []):
                await kept.ended
        assert len(set(server.ports)) == 3


async def test_a_connection_that_was_idle_for_too_long_is_given_up() -> None:
    """Before the server does it, which would be when the next request is on its way."""
    async with serving() as server, connections(keep_s=0.0) as pool:
        await ask(pool, server.url)
        async with asyncio.timeout(10):
            await server.left.wait()
        await ask(pool, server.url)
        assert len(set(server.ports)) == 2


async def test_a_kept_connection_that_breaks_under_a_request_is_a_broken_connection() -> None:
    """The caller decides whether to ask again: nobody knows how much of it the server did."""

    def answer(server: Server, writer: asyncio.StreamWriter) -> None:
        if len(server.heads) == 1:
            writer.write(ANSWER)
        else:
            writer.transport.abort()

    async with serving(answer) as server, connections() as pool:
        assert await ask(pool, server.url) == b"ok"
        with pytest.raises(ConnectionError):
            await ask(pool, server.url)
        assert len(set(server.ports)) == 1


async def test_an_answer_before_the_request_was_read_costs_the_connection() -> None:
    """What is left of the request must not be taken for the next one."""

    answered, ended = asyncio.Event(), asyncio.Event()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        await answered.wait()
        writer.transport.abort()
        ended.set()

    listener = await asyncio.start_server(refuse, "127.0.0.1", 0)
    url = URL(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/")
    async with connections() as pool:
        answer = await pool.post(Target(url), {}, bytes(50_000_000), max_bytes=1 << 20)
        assert answer.status == 413
        assert not pool._idle
    answered.set()
    await ended.wait()
    listener.close()


async def test_large_requests_arrive_whole() -> None:
    """Long conversations are sent again with every turn."""
    body = bytes(range(256)) * 80_000
    async with serving() as server, connections() as pool:
        assert await ask(pool, server.url, body) == b"ok"
        assert server.bodies == [body]


async def test_credentials_in_the_address_are_sent_as_such_and_come_before_a_key() -> None:
    """As every HTTP client reads `http://user:password@host`."""
    async with serving() as server, connections() as pool:
        url = server.url.with_user("us er").with_password("pass:word")
        await ask(pool, url, Authorization="Bearer key")
        assert "Authorization: Basic dXMgZXI6cGFzczp3b3Jk\r\n" in server.heads[0]
        assert "Bearer" not in server.heads[0]
        assert f"Host: 127.0.0.1:{server.url.port}\r\n" in server.heads[0]
        assert server.heads[0].startswith("POST /v1/x HTTP/1.1\r\n")


@pytest.mark.parametrize("value", ["key\n", "a\r\nX-Other: b", "nul\0"])
async def test_a_header_with_a_line_break_is_never_sent(value: str) -> None:
    """A key that was read from a file ends in one; it would end the header, or begin another."""
    async with serving() as server, connections() as pool:
        with pytest.raises(ValueError, match="api_key_env"):
            await ask(pool, server.url, Authorization=value)
        assert not server.heads


async def test_addresses_may_be_names_and_of_the_sixth_version() -> None:
    """Both are looked up and named to the server as they were written."""
    async with serving() as server, connections() as pool:
        assert await ask(pool, server.url.with_host("localhost")) == b"ok"
        assert f"Host: localhost:{server.url.port}\r\n" in server.heads[0]
    try:
        async with serving(host="::1") as server, connections() as pool:
            assert await ask(pool, server.url) == b"ok"
            assert f"Host: [::1]:{server.url.port}\r\n" in server.heads[0]
    except OSError:
        pytest.skip("this machine has no IPv6")


async def test_what_cannot_be_reached_is_a_broken_connection_that_names_the_address() -> None:
    """A port that nobody listens at, a name that nobody has."""
    async with serving() as server:
        gone = server.url
    async with connections() as pool:
        with pytest.raises(ConnectionError, match=f"127.0.0.1:{gone.port}"):
            await ask(pool, gone)
        with pytest.raises(ConnectionError, match=r"no-such-host.invalid:80"):
            await ask(pool, URL("http://no-such-host.invalid/"))
        with pytest.raises(ConnectionError, match="cannot connect to aaaa"):
            await ask(pool, URL(f"http://{'a' * 70}.invalid/"))


async def test_connections_to_a_name_with_several_addresses_are_spread_over_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each begins with the next address; the name is looked up once for all of them."""
    async with serving() as first, serving() as second, connections() as pool:
        asked: list[str] = []

        async def look_up(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
            asked.append(host)
            return [(2, 1, 6, "", ("127.0.0.1", server.url.port)) for server in (first, second)]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
        url = URL("http://engines.example:8000/v1")
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(ask(pool, url))
        assert (len(set(first.ports)), len(set(second.ports))) == (2, 2)
        assert asked == ["engines.example"]


async def test_a_name_is_looked_up_anew_when_nobody_listens_at_its_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that was started again elsewhere is reached by the next attempt, not after the minute."""
    async with serving() as gone:
        ports = [gone.url.port]
    async with serving() as server, connections() as pool:
        ports.append(server.url.port)

        async def look_up(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
            return [(2, 1, 6, "", ("127.0.0.1", ports.pop(0)))]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
        url = URL("http://engine.example:8000/v1")
        with pytest.raises(ConnectionError):
            await ask(pool, url)
        assert await ask(pool, url) == b"ok"


async def test_closing_ends_the_requests_that_are_under_way() -> None:
    """And nothing can be asked any more."""
    async with serving(lambda *_: None) as server, connections() as pool:
        request = asyncio.create_task(ask(pool, server.url))
        await server.arrived.wait()
        await pool.aclose()
        with pytest.raises(ConnectionError):
            await request
        with pytest.raises(RuntimeError, match="closed"):
            await ask(pool, server.url)


async def test_a_cancelled_request_frees_its_place_and_one_that_waits_for_a_place_can_be_cancelled() -> None:
    """The connection goes, the place does not."""
    async with serving(lambda *_: None) as server, connections(limit=1) as pool:
        first, second = (asyncio.create_task(ask(pool, server.url)) for _ in range(2))
        await server.arrived.wait()
        for request in (second, first):
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
        async with asyncio.timeout(10):
            await server.left.wait()
        server.answer = lambda _, writer: writer.write(ANSWER)
        assert await ask(pool, server.url) == b"ok"


class ClosingLoop(asyncio.SelectorEventLoop):
    """Closes the descriptor below a socket whose connection is cancelled, as uvloop before 0.23 does."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = asyncio.Event()

    async def create_connection(self, *_: Any, sock: socket.socket, **__: Any) -> Any:  # type: ignore[override]
        self.reached.set()
        try:
            await self.create_future()
        finally:
            os.close(sock.fileno())


def test_a_request_that_is_cancelled_while_it_connects_is_cancelled() -> None:
    """And not a broken connection, which would be tried again."""
    loop = ClosingLoop()

    async def cancel() -> None:
        async with serving() as server, connections() as pool:
            request = asyncio.create_task(ask(pool, server.url))
            await loop.reached.wait()
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(cancel())


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """One that nobody trusts who is not told to."""
    if which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    path = tmp_path / "server.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test"
    )
    files = f"-addext subjectAltName=IP:127.0.0.1 -keyout {path.with_suffix('.key')} -out {path}"
    subprocess.run([*command.split(), *files.split()], check=True, capture_output=True)
    return path


@contextmanager
def trusted(monkeypatch: pytest.MonkeyPatch, certificate: Path) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(certificate))
        yield


async def test_only_certificates_that_this_machine_trusts_are_accepted(
    monkeypatch: pytest.MonkeyPatch, certificate: Path
) -> None:
    """Those of `SSL_CERT_FILE` for example; a connection with TLS is kept like another."""
    async with serving(certificate=certificate) as server:
        async with connections() as pool:
            with pytest.raises(ConnectionError, match="certificate"):
                await ask(pool, server.url)
        with trusted(monkeypatch, certificate):
            async with connections() as pool:
                assert await ask(pool, server.url, bytes(1_000_000)) == b"ok"
                assert await ask(pool, server.url) == b"ok"
                assert len(set(server.ports)) == 1


async def test_a_handshake_that_is_cancelled_at_any_moment_leaves_nothing_in_the_way_of_others(
    monkeypatch: pytest.MonkeyPatch, certificate: Path
) -> None:
    """Its descriptor is free for the next connection."""
    with trusted(monkeypatch, certificate):
        async with serving(answer_once, certificate=certificate) as server, connections() as pool:
            assert await ask(pool, server.url) == b"ok"  # the name is looked up
            for turns in range(40):
                request = asyncio.create_task(ask(pool, server.url))
                for _ in range(turns):
                    await asyncio.sleep(0)
                request.cancel()
                with suppress(asyncio.CancelledError):
                    await request
                for _ in range(3):
                    assert await ask(pool, server.url) == b"ok"
