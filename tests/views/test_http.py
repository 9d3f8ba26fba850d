"""The HTTP side, over a real port: health, readiness, status, metrics, and the token that guards them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import msgspec
import pytest

from orchestrator.errors import ConfigError
from orchestrator.facts import Status
from orchestrator.views.http import build_app, serve_http
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
async def serving(token: str | None = None) -> AsyncIterator[Site]:
    site = Site()
    app = build_app(status=lambda: site.status, metrics=lambda: b"some_metric 1.0\n", token=token)
    async with serve_http(app, host="127.0.0.1", port=0) as site.address:
        yield site


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
    app = build_app(status=lambda: None, metrics=bytes, token=None)
    async with serve_http(app, host="127.0.0.1", port=0) as address, aiohttp.ClientSession() as session:
        async with session.get(f"{address}/healthz") as reply:
            assert reply.status == 200
        async with session.get(f"{address}/readyz") as reply:
            assert (reply.status, await reply.text()) == (503, "starting\n")
        async with session.get(f"{address}/api/status") as reply:
            assert (reply.status, await reply.json()) == (503, {"state": "starting"})
        async with session.get(f"{address}/metrics") as reply:
            assert (reply.status, await reply.text()) == (200, "")


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


async def test_what_is_not_there_is_not_found() -> None:
    """Unknown paths and methods are refused."""
    async with serving() as site:
        assert (await site.get("/nothing"))[0] == 404
        assert (await site.get("/api/status", method="POST"))[0] == 405


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
