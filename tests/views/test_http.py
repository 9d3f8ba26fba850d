"""The HTTP side, over a real port: health, readiness, status, metrics, and what guards them: a token, names, limits."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import pytest
import uvloop
from aiohttp import web

from orchestrator.errors import ConfigError
from orchestrator.facts import Status
from orchestrator.service.front import Front
from orchestrator.views.http import MAX_BODY_BYTES, App, Request, build_app, line, serve_http
from tests.support import late_client
from tests.support.sample_status import sample_status

TOKEN = "open-sesame"


@dataclass
class Site:
    """A served app; `status` is what it shows now."""

    address: str = ""
    status: Status = field(default_factory=sample_status)

    async def get(self, path: str, *, token: str | None = None, method: str = "GET") -> tuple[int, str]:
        headers = {} if token is None else {"Authorization": token}
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, self.address + path, headers=headers) as reply,
        ):
            return reply.status, await reply.text()


@asynccontextmanager
async def serving(token: str | None = None, *, host: str = "127.0.0.1", **limits: Any) -> AsyncIterator[Site]:
    site = Site()
    app = build_app(status=lambda: site.status, metrics=lambda: b"some_metric 1.0\n", token=token)
    async with serve_http(app, host=host, port=0, **limits) as site.address:
        yield site


@asynccontextmanager
async def connected(site: Site) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A bare connection, for what no HTTP client would send."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(site.address.rpartition(":")[2]))
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def everything(reader: asyncio.StreamReader) -> bytes:
    """What comes until the other side closes; a reset closes too."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""


async def test_health_says_that_the_process_answers() -> None:
    """/healthz is fine as long as the event loop turns, whatever the run does."""
    async with serving() as site:
        for state in ("starting", "running", "draining"):
            site.status = sample_status(state=state)
            assert await site.get("/healthz") == (200, "ok\n")


@pytest.mark.parametrize(
    ("state", "code"), [("starting", 503), ("running", 200), ("draining", 503), ("finished", 503)]
)
async def test_readiness_follows_the_run(state: str, code: int) -> None:
    """/readyz is 200 only while the run takes part, and names the state."""
    async with serving() as site:
        site.status = sample_status(state=state)
        assert await site.get("/readyz") == (code, f"{state}\n")


async def test_before_there_is_a_run_it_says_that_it_starts() -> None:
    """A probe gets an answer while environments load: alive, and not ready."""
    front = Front(notes=[], max_steps=3, batch_size=8)
    app = build_app(status=front.status, metrics=front.metrics, token=None)
    async with serve_http(app, host="127.0.0.1", port=0) as address, aiohttp.ClientSession() as session:
        async with session.get(f"{address}/healthz") as reply:
            assert reply.status == 200
        async with session.get(f"{address}/readyz") as reply:
            assert (reply.status, await reply.text()) == (503, "starting\n")
        async with session.get(f"{address}/api/status") as reply:
            assert reply.status == 200
            told = await reply.json()
            assert (told["state"], told["waiting_for"]) == ("starting", "the journal to be read")
        async with session.get(f"{address}/metrics") as reply:
            assert (reply.status, await reply.text()) == (200, "")


def test_when_the_run_is_over_its_last_numbers_stay() -> None:
    """Whoever looks while the servers are stopped sees how it ended, not an empty run."""

    class Told(Front):
        def read(self, driver: Any) -> Status:
            return sample_status(step=driver)

    front = Told(notes=[], max_steps=9, batch_size=8)
    front.enter(7, None, world_size=1)  # type: ignore[arg-type]  # only `read` looks at them
    assert front.status().state == "running"
    front.leave()
    status = front.status()
    assert (status.state, status.step, status.waits, status.buffer) == ("finished", 7, [], "the run is over")
    assert list(status.envs) == ["math"]


async def test_the_status_is_the_facts_of_the_moment() -> None:
    """/api/status is read anew for every request, and decodes to what it was made from."""
    async with serving() as site:
        for step in (5, 6):
            site.status = sample_status(step=step)
            code, body = await site.get("/api/status")
            assert code == 200
            assert msgspec.json.decode(body, type=Status) == site.status


async def test_metrics_are_served_as_prometheus_text() -> None:
    """The content type is the exposition format's."""
    async with (
        serving() as site,
        aiohttp.ClientSession() as session,
        session.get(site.address + "/metrics") as reply,
    ):
        assert reply.status == 200
        assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert await reply.text() == "some_metric 1.0\n"


async def test_many_scrapers_cost_one_rendering_a_second() -> None:
    """Those that come within a second get the same text, later ones a new one."""
    moments, texts = [10.0], iter([b"first 1.0\n", b"second 1.0\n"])
    app = build_app(status=sample_status, metrics=lambda: next(texts), token=None, clock=lambda: moments[-1])
    async with serve_http(app, host="127.0.0.1", port=0) as address:
        site = Site(address)
        for moment, text in ((10.0, "first"), (10.5, "first"), (10.99, "first"), (11.0, "second")):
            moments.append(moment)
            assert await site.get("/metrics") == (200, f"{text} 1.0\n")


async def test_what_is_not_there_is_not_found() -> None:
    """Unknown paths and methods are refused."""
    async with serving() as site:
        assert (await site.get("/nothing"))[0] == 404
        assert (await site.get("/api/status", method="POST"))[0] == 405


@pytest.mark.parametrize("path", ["//", "//healthz", "///api/status", "/healthz//", "/x//y"])
async def test_a_slash_too_many_is_not_found(path: str) -> None:
    """Whoever may not ask is told no more of it than of any other path."""
    for token, status in ((None, 404), (TOKEN, 401)):
        async with serving(token) as site, connected(site) as (reader, writer):
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            assert (await reader.readline()).split()[1] == str(status).encode()


@pytest.mark.parametrize("given", [None, "Bearer wrong", TOKEN, "Bearer ", f"Bearer {TOKEN}x", "Bearer café"])
async def test_without_the_token_everything_is_refused(given: str | None) -> None:
    """401, even for paths that are not there."""
    async with serving(TOKEN) as site:
        for path in ("/readyz", "/metrics", "/api/status", "/nothing"):
            assert await site.get(path, token=given) == (401, "a bearer token is needed\n")


async def test_with_the_token_everything_is_open() -> None:
    """The right bearer gets what others do not."""
    async with serving(TOKEN) as site:
        for path in ("/readyz", "/metrics", "/api/status"):
            assert (await site.get(path, token=f"Bearer {TOKEN}"))[0] == 200


async def test_health_needs_no_token() -> None:
    """A supervisor's probe carries none, and learns nothing."""
    async with serving(TOKEN) as site:
        assert (await site.get("/healthz"))[0] == 200


async def test_nothing_listens_after_the_block() -> None:
    """Leaving it closes the port."""
    async with serving() as site:
        pass
    with pytest.raises(aiohttp.ClientConnectionError):
        await site.get("/healthz")


async def test_an_idle_connection_does_not_hold_the_end_up() -> None:
    """A client that keeps its connection open is disconnected."""
    async with aiohttp.ClientSession() as session:
        async with serving() as site, session.get(site.address + "/healthz") as reply:
            assert await reply.text() == "ok\n"
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get(site.address + "/healthz")


@pytest.mark.parametrize("turns", late_client.TURNS)
async def test_a_client_that_comes_while_it_closes_is_let_go(turns: int) -> None:
    """Whenever it comes: no connection is left over that nobody serves."""
    assert await late_client.is_let_go(serve_http(App(token=None), host="127.0.0.1", port=0), turns)


async def test_a_port_in_use_is_a_mistake_with_a_remedy() -> None:
    """The user is told which setting to change."""
    async with serving() as site:
        port = int(site.address.rpartition(":")[2])
        app = build_app(status=sample_status, metrics=bytes, token=None)
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*set http\.port"):
            async with serve_http(app, host="127.0.0.1", port=port):
                pass


async def test_an_address_that_is_not_ours_is_a_mistake_too() -> None:
    """A host name that does not resolve ends in the same one line."""
    app = build_app(status=sample_status, metrics=bytes, token=None)
    with pytest.raises(ConfigError, match="cannot listen on no such host:0"):
        async with serve_http(app, host="no such host", port=0):
            pass


async def test_an_error_of_the_block_passes_through_unchanged() -> None:
    """The server stops, and the error is not wrapped into a group."""
    with pytest.raises(ZeroDivisionError):
        async with serving():
            raise ZeroDivisionError


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("localhost", 200),
        ("LOCALHOST:8600", 200),
        ("grafana.localhost", 200),
        ("127.0.0.1:8600", 200),
        ("127.9.9.9", 200),
        ("[::1]:8600", 200),
        ("evil.example", 403),
        ("evil.example:8600", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("10.0.0.7", 403),
        ("", 403),
    ],
)
async def test_on_loopback_only_names_of_this_machine_are_answered(name: str, code: int) -> None:
    """A web page whose name was pointed at this machine gets nothing, not even the paths that need no token."""
    async with serving() as site, aiohttp.ClientSession() as session:
        for path in ("/api/status", "/healthz"):
            async with session.get(site.address + path, headers={"Host": name}) as reply:
                assert reply.status == code
                text = await reply.text()
                assert code == 200 or (text.count("\n") == 1 and "ask for localhost" in text)


async def test_a_client_without_a_host_header_is_answered() -> None:
    """No browser leaves it out, and old probes do."""
    async with serving() as site, connected(site) as (reader, writer):
        writer.write(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert (await everything(reader)).endswith(b"\r\n\r\nok\n")


async def test_off_loopback_the_token_decides() -> None:
    """There the names of the machine are not known; whoever has the token may ask under any."""
    async with serving(TOKEN, host="0.0.0.0") as site, aiohttp.ClientSession() as session:
        address = site.address.replace("0.0.0.0", "127.0.0.1")
        headers = {"Host": "orchestrator.example", "Authorization": f"Bearer {TOKEN}"}
        async with session.get(f"{address}/readyz", headers=headers) as reply:
            assert reply.status == 200
        async with session.get(f"{address}/readyz", headers={"Host": "orchestrator.example"}) as reply:
            assert reply.status == 401


async def test_a_request_that_fails_is_answered_and_the_next_one_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """500 in one line without a traceback; the service and even the other paths go on."""

    def broken() -> bytes:
        raise ZeroDivisionError("a bug")

    app = build_app(status=sample_status, metrics=broken, token=None)
    async with serve_http(app, host="127.0.0.1", port=0) as address, aiohttp.ClientSession() as session:
        for accept in ("*/*", "text/html"):
            async with session.get(f"{address}/metrics", headers={"Accept": accept}) as reply:
                assert (reply.status, reply.content_type) == (500, "text/plain")
                assert await reply.text() == "internal server error\n"
        async with session.get(f"{address}/readyz") as reply:
            assert reply.status == 200
    assert "http.failed" in capsys.readouterr().out


@pytest.mark.parametrize(("path", "method"), [("/nothing", "GET"), ("/api/status", "POST")])
async def test_errors_are_one_line_of_plain_text(path: str, method: str) -> None:
    """Whatever the client would rather have."""
    async with (
        serving() as site,
        aiohttp.ClientSession(headers={"Accept": "text/html"}) as session,
        session.request(method, site.address + path) as reply,
    ):
        text = await reply.text()
        assert reply.content_type == "text/plain"
        assert (text.count("\n"), text[-1]) == (1, "\n")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nno colon here\r\n\r\n",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["tls", "header", "length"],
)
async def test_what_is_no_request_is_refused_in_one_line(sent: bytes) -> None:
    """Noise on the port is answered with 400 and the connection is closed."""
    async with serving() as site, connected(site) as (reader, writer):
        writer.write(sent)
        head, _, body = (await everything(reader)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.")
        assert b" 400 " in head.splitlines()[0]
        assert body == b"bad request\n"
        assert (await site.get("/healthz"))[0] == 200


async def test_head_is_answered_without_a_body() -> None:
    """Some probes ask so."""
    async with serving() as site:
        assert await site.get("/healthz", method="HEAD") == (200, "")


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: "])
async def test_who_does_not_finish_a_request_is_disconnected(sent: bytes) -> None:
    """Silence and headers that never end hold a connection for the idle time, not for ever."""
    async with serving(idle_s=0.05) as site, connected(site) as (reader, writer):
        writer.write(sent)
        assert await everything(reader) == b""


async def test_a_connection_that_is_kept_alive_is_closed_when_nothing_comes() -> None:
    """After an answer the idle time begins anew."""
    async with serving(idle_s=1.0) as site, connected(site) as (reader, writer):
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await everything(reader)).endswith(b"ok\n")


async def test_a_client_that_never_reads_is_disconnected() -> None:
    """An answer that nobody takes does not hold its connection: the rest of it never comes."""
    large = b"x" * 50_000_000
    app = build_app(status=sample_status, metrics=lambda: large, token=None)
    async with serve_http(app, host="127.0.0.1", port=0, max_connections=1, idle_s=1.0) as address:
        site = Site(address)
        async with connected(site) as (reader, writer):
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readexactly(100)
            # Nothing more is read; the only place becomes free when the server has given this client up.
            await answered(site)
            assert len(await everything(reader)) < len(large)


async def answered(site: Site) -> None:
    """Wait until there is room for another connection."""
    while True:
        with suppress(aiohttp.ClientConnectionError):
            assert (await site.get("/healthz"))[0] == 200
            return


async def test_connections_are_bounded_and_those_beyond_are_closed() -> None:
    """The bound is exact, however fast they come, and room that becomes free is given again."""
    async with serving(max_connections=3) as site, AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(connected(site)) for _ in range(10)]
        for _, writer in streams:
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answers = [await _head(reader) for reader, _ in streams]
        assert sum(answer.endswith(b"ok\n") for answer in answers) == 3
        assert answers.count(b"") == 7
        for _, writer in streams:
            writer.close()
        await answered(site)


async def _head(reader: asyncio.StreamReader) -> bytes:
    """One answer of /healthz, or nothing where the connection was closed."""
    try:
        return await reader.readuntil(b"\r\n\r\nok\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


async def echo(request: Request) -> web.Response:
    return line(200, f"{request.method} {request.path} {len(await request.read())}")


@asynccontextmanager
async def serving_app(app: App, **limits: Any) -> AsyncIterator[Site]:
    async with serve_http(app, host="127.0.0.1", port=0, **limits) as address:
        yield Site(address)


async def test_a_method_and_a_path_have_a_handler_of_their_own() -> None:
    """What one of them answers says nothing about the other, and the refusal names what there is."""
    app = App(token=None)
    app.add("POST", "/api/pause", echo)
    app.add("GET", "/api/pause", echo)
    async with serving_app(app) as site:
        assert await site.get("/api/pause") == (200, "GET /api/pause 0\n")
        assert await site.get("/api/pause", method="POST") == (200, "POST /api/pause 0\n")
        assert await site.get("/api/pause", method="PUT") == (405, "only POST and GET is answered\n")


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/api/rollouts/", 200),
        ("/api/rollouts/7", 200),
        ("/api/rollouts/7/8", 200),
        ("/api/rollouts", 404),
        ("/api/rollout", 404),
        ("/", 200),
        ("/elsewhere", 404),
    ],
)
async def test_a_path_that_ends_with_a_slash_stands_for_all_below_it(path: str, code: int) -> None:
    """But `/` is one page, not everything."""
    app = App(token=None)
    app.add("GET", "/api/rollouts/", echo)
    app.add("GET", "/", echo)
    async with serving_app(app) as site:
        assert (await site.get(path))[0] == code


async def test_a_body_has_a_bounded_size() -> None:
    """What is larger is refused in one line, and the service goes on."""
    app = App(token=None)
    app.add("POST", "/api/ask", echo)
    async with serving_app(app) as site, aiohttp.ClientSession() as session:
        for size, code in ((MAX_BODY_BYTES, 200), (MAX_BODY_BYTES + 1, 413)):
            async with session.post(f"{site.address}/api/ask", data=b"x" * size) as reply:
                assert reply.status == code
                assert (await reply.text()).count("\n") == 1


@pytest.mark.parametrize(
    ("origin", "code"),
    [(None, 200), ("own", 200), ("http://evil.example", 403), ("null", 403), ("http://localhost", 403)],
)
async def test_a_page_from_elsewhere_may_not_send_anything(origin: str | None, code: int) -> None:
    """A browser lets any page post to this machine; its own page is told by the origin."""
    app = App(token=None)
    app.add("POST", "/api/pause", echo)
    async with serving_app(app) as site, aiohttp.ClientSession() as session:
        headers = {} if origin is None else {"Origin": site.address if origin == "own" else origin}
        async with session.post(f"{site.address}/api/pause", headers=headers) as reply:
            assert reply.status == code


async def test_paths_that_are_open_to_all_need_no_token() -> None:
    """The others still do."""
    app = App(token=TOKEN)
    app.add("GET", "/", echo, open_to_all=True)
    app.add("GET", "/api/status", echo)
    async with serving_app(app) as site:
        assert (await site.get("/"))[0] == 200
        assert (await site.get("/api/status"))[0] == 401


async def _count_slowly(request: Request) -> web.StreamResponse:
    """A stream without an end."""
    response = web.StreamResponse()
    await response.prepare(request)
    with suppress(ConnectionError):
        for i in range(1_000_000):
            if request.is_read:
                request.stay_open()
            await response.write(b"%d\n" % i)
            await asyncio.sleep(0.05)
    return response


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_answer_that_is_read_outlives_the_idle_time(new_loop: Any) -> None:
    """What is written piece by piece goes on for as long as somebody reads it."""

    async def read() -> None:
        app = App(token=None)
        app.add("GET", "/api/events", _count_slowly)
        async with (
            serving_app(app, idle_s=1.5) as site,
            aiohttp.ClientSession() as session,
            session.get(f"{site.address}/api/events") as reply,
        ):
            async for piece in reply.content:
                if int(piece) == 40:  # two seconds and more
                    break

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(read())


async def test_an_answer_that_nobody_reads_ends_with_the_idle_time() -> None:
    """What was written stays bounded, and the connection becomes free."""
    written = 0

    async def flood(request: Request) -> web.StreamResponse:
        nonlocal written
        response = web.StreamResponse()
        await response.prepare(request)
        with suppress(ConnectionError):
            while True:
                if request.is_read:
                    request.stay_open()
                await response.write(b"x" * 100_000)
                written += 100_000
                await asyncio.sleep(0)
        return response

    app = App(token=None)
    app.add("GET", "/api/events", flood)
    app.add("GET", "/healthz", echo)
    async with serving_app(app, max_connections=1, idle_s=0.5) as site, connected(site) as (reader, writer):
        writer.write(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readexactly(100)
        await answered(site)
    assert written < 50_000_000
