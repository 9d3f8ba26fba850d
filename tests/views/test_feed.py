"""The page over a real port: its policy, its events, what a page that comes back is sent, and who is given up."""

import asyncio
import json
import threading
import time
import tomllib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from orchestrator.errors import JournalError
from orchestrator.facts import Status, StepRecord
from orchestrator.views.document import SCRIPTS, page_file, report_page, served_page
from orchestrator.views.feed import Feed
from orchestrator.views.http import build_app, serve_http
from orchestrator.views.recorded import Recorded, RecordedRun
from tests.support.sample_status import sample_status
from tests.support.step_records import step_record

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


class Shelf:
    """Rollouts that are asked for."""

    def __init__(self) -> None:
        self.wanted: list[dict[str, str]] = []

    def find(self, wanted: Mapping[str, str]) -> dict[str, Any]:
        self.wanted.append(dict(wanted))
        if wanted.get("step") == "x":
            raise ValueError("step: 'x' is not a whole number")
        return {"groups": [], "next": None}

    def group(self, key: str) -> dict[str, Any] | None:
        return {"seq": 7, "text": HOSTILE} if key == "7" else None

    def failures(self) -> list[dict[str, Any]]:
        raise JournalError("rollouts.sqlite: cannot be read")


@dataclass
class Site:
    """A run that is shown; `last` steps are in its journal."""

    address: str = ""
    last: int = 3
    run_id: str = "run"
    reads: list[tuple[int, int]] = field(default_factory=list)
    rendered: int = 0
    shelf: Shelf = field(default_factory=Shelf)
    trouble: str = ""
    note: str = "a note"
    threads: set[int] = field(default_factory=set)
    """Those in which what pages draw was put together."""
    records: list[StepRecord] = field(default_factory=lambda: [step_record(n) for n in range(1, 101)])

    def read(self, step: int, evals: int) -> Recorded:
        self.reads.append((step, evals))
        if self.trouble:
            raise JournalError(self.trouble)
        results: list[Mapping[str, Any]] = [{"env": "held", "step": 1, "avg@4": 0.5}]
        return Recorded(self.run_id, self.records[step : self.last], results[evals:])

    def status(self) -> Status:
        self.rendered += 1
        return sample_status(step=self.last, notes=[self.note])


class WatchedRun(RecordedRun):
    """Notes in which threads its parts are put together."""

    def __init__(self, read: Callable[[int, int], Recorded], threads: set[int]) -> None:
        super().__init__(read)
        self.threads = threads

    def parts(self, since: int = 1) -> dict[str, Any]:
        self.threads.add(threading.get_ident())
        return super().parts(since)


@asynccontextmanager
async def showing(*, token: str | None = None, tick_s: float = 0.02, **limits: Any) -> AsyncIterator[Site]:
    site = Site()
    app = build_app(status=sample_status, metrics=bytes, token=token)
    feed = Feed(
        name="a run",
        status=site.status,
        recorded=WatchedRun(site.read, site.threads),
        rollouts=site.shelf,
        moment=lambda: (site.last, site.run_id, site.trouble),
        tick_s=tick_s,
    )
    feed.add_to(app)
    async with serve_http(app, host="127.0.0.1", port=0, **limits) as site.address:
        try:
            yield site
        finally:
            feed.close()


@asynccontextmanager
async def page_of(site: Site, query: str = "") -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """The events that an open page gets."""

    async def frames(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
        while line := await content.readuntil(b"\n\n"):
            yield json.loads(line.removeprefix(b"data: "))

    async with (
        aiohttp.ClientSession(read_bufsize=2**24) as session,
        session.get(f"{site.address}/api/events{query}") as reply,
    ):
        assert reply.content_type == "text/event-stream"
        yield frames(reply.content)


async def test_the_page_is_one_document_that_loads_nothing() -> None:
    """Scripts and styles stand in it, and the policy lets nothing else run."""
    async with (
        showing() as site,
        aiohttp.ClientSession() as session,
        session.get(site.address) as reply,
    ):
        policy, html = reply.headers["Content-Security-Policy"], await reply.text()
    assert reply.content_type == "text/html"
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert policy.count("'sha256-") == len(SCRIPTS) + 1
    assert html.encode() == served_page().html
    for place in ("http://", "https://", " src=", "@import", "url("):
        assert place not in html.replace("http://www.w3.org/2000/svg", "")


def test_no_script_of_the_page_makes_html_of_text() -> None:
    """What a run says is put in as text, everywhere."""
    for name in SCRIPTS:
        script = page_file(name)
        for way in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "DOMParser",
        ):
            assert way not in script, f"{name} has {way}"


def test_the_data_of_a_report_cannot_end_its_block() -> None:
    """Whatever a run says, the document has the scripts of the page and a block of data, and no more."""
    page = report_page(json.dumps({"runs": [{"name": HOSTILE + "<!--"}]}).encode())
    html = page.html.decode()
    assert html.count("<script") == len(SCRIPTS) + 1
    start = html.index('id="data">') + len('id="data">')
    assert json.loads(html[start : html.index("</script>", start)])["runs"][0]["name"] == HOSTILE + "<!--"
    assert "connect-src 'none'" in page.policy


async def test_an_open_page_is_told_everything_at_first_and_then_what_is_new() -> None:
    """A step that is recorded arrives by itself, and nothing is sent twice."""
    async with showing() as site, page_of(site) as frames:
        first = await anext(frames)
        assert (first["name"], first["run"], first["status"]["step"]) == ("a run", "run", 3)
        assert first["series"]["steps"] == [1, 2, 3]
        assert first["evals"] == [{"env": "held", "step": 1, "avg@4": 0.5}]
        assert "series" not in await anext(frames)
        site.last = 5
        news = [frame async for frame in until_news(frames)][-1]
        assert (news["series"]["from"], news["series"]["steps"]) == (3, [4, 5])
        assert len(news["evals"]) == 1


async def until_news(frames: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    """Frames up to the first with new columns."""
    async for frame in frames:
        yield frame
        if "series" in frame:
            return


async def test_a_page_that_lost_its_connection_gets_what_it_missed() -> None:
    """It says what it has; only the last steps are sent again, because reports come late."""
    async with showing() as site:
        site.last = 100
        at = f"&at={site.records[89].at}"
        async with page_of(site, f"?run=run&step=90&width=1{at}") as frames:
            told = (await anext(frames))["series"]
            assert 50 < told["from"] < 90
            assert told["steps"][-1] == 100
        for query in (
            f"?run=other&step=90&width=1{at}",
            f"?run=run&step=90&width=2{at}",
            f"?run=run&step=x&width=1{at}",
            "?run=run&step=90&width=1&at=1.5",
        ):
            async with page_of(site, query) as frames:
                assert (await anext(frames))["series"]["from"] == 0


async def test_a_run_that_is_started_over_begins_anew_on_an_open_page() -> None:
    """The columns of the run before are not mixed with the new ones."""
    async with showing() as site, page_of(site) as frames:
        await anext(frames)
        site.run_id, site.last = "other", 2
        told = [frame async for frame in until_news(frames)][-1]
        assert (told["run"], told["series"]["from"], told["series"]["steps"]) == ("other", 0, [1, 2])
        assert len(told["evals"]) == 1


async def test_a_run_that_was_set_back_begins_anew_on_an_open_page() -> None:
    """Steps that were formed again take the place of those before; none of the old ones stays."""
    async with showing() as site, page_of(site) as frames:
        site.last = 60
        await anext(frames)
        while (await anext(frames)).get("series", {}).get("last") != 60:
            continue
        for record in site.records[40:]:
            record.at += 1000.0
        site.last = 61
        told = [frame async for frame in until_news(frames)][-1]
        assert (told["series"]["from"], told["series"]["last"]) == (0, 61)
        assert told["series"]["run"]["at"][40] == site.records[40].at


async def test_one_rendering_serves_all_pages_and_none_is_made_for_nobody() -> None:
    """The status is read once a tick, however many look; the journal only when there is more."""
    async with showing(tick_s=0.2) as site:
        assert site.rendered == 0
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:

            async def look() -> None:
                async with page_of(site) as frames:
                    for _ in range(3):
                        await anext(frames)

            for _ in range(20):
                group.create_task(look())
        # It is rendered anew after half a tick at the earliest; each page for itself would be sixty times.
        assert site.rendered <= 1 + (time.monotonic() - began) / 0.1
        assert site.reads == [(0, 0)]


async def test_what_a_page_draws_is_not_put_together_on_the_event_loop() -> None:
    """It grows with the run: neither all of it, nor what is new, may hold up what else goes on."""
    async with showing() as site, page_of(site) as frames:
        assert (await anext(frames))["series"]["last"] == 3
        site.last = 5
        *_, news = [frame async for frame in until_news(frames)]
        assert news["series"]["last"] == 5
        assert site.threads
        assert threading.get_ident() not in site.threads


async def test_a_journal_that_cannot_be_read_is_said_on_the_page() -> None:
    """The status goes on being shown, and the columns come once they can be read."""
    async with showing() as site:
        site.trouble = "no journal yet"
        async with page_of(site) as frames:
            assert (await anext(frames))["trouble"] == "no journal yet"
            site.trouble = ""
            async for frame in frames:
                if frame.get("series", {}).get("steps"):
                    assert (frame["trouble"], frame["series"]["steps"]) == ("", [1, 2, 3])
                    break


async def test_a_page_that_is_not_read_does_not_grow_and_is_given_up() -> None:
    """It is sent nothing more while it does not read, and its connection ends with the idle time."""
    async with showing(tick_s=0.01, idle_s=1.0, max_connections=1) as site:
        site.last, site.note = 100, "x" * 300_000
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", int(site.address.rpartition(":")[2]), limit=1024
        )
        try:
            writer.write(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readexactly(100)
            # Nothing more is read; the only place becomes free when the server has given this page up.
            while not await _is_answered(site):
                continue
        finally:
            writer.close()


async def _is_answered(site: Site) -> bool:
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{site.address}/healthz") as reply:
            return reply.status == 200
    except aiohttp.ClientConnectionError:
        return False


async def test_streams_end_with_the_service() -> None:
    """An open page does not hold the end of a run up, and is told by the end of its stream."""
    async with aiohttp.ClientSession() as session:
        async with showing(tick_s=60.0) as site:
            reply = await session.get(f"{site.address}/api/events")
            await reply.content.readuntil(b"\n\n")
        assert await reply.content.read() == b""
        reply.close()


async def test_without_the_token_only_the_empty_page_is_served() -> None:
    """It tells nothing about the run; everything that does needs the token."""
    async with showing(token="open-sesame") as site, aiohttp.ClientSession() as session:
        async with session.get(site.address) as reply:
            assert (reply.status, await reply.read()) == (200, served_page().html)
        for path in ("/api/events", "/api/rollouts", "/api/rollouts/7", "/api/failures"):
            async with session.get(site.address + path) as reply:
                assert reply.status == 401
            if path != "/api/events":
                async with session.get(
                    site.address + path, headers={"Authorization": "Bearer open-sesame"}
                ) as reply:
                    assert reply.status != 401


@pytest.mark.parametrize(
    ("path", "code", "said"),
    [
        ("/api/rollouts?env=math&step=3", 200, "groups"),
        ("/api/rollouts?step=x", 400, "step: 'x' is not a whole number"),
        ("/api/rollouts/7", 200, "seq"),
        ("/api/rollouts/8", 404, "there is no such rollout"),
        ("/api/failures", 503, "cannot be read"),
    ],
)
async def test_rollouts_are_asked_for_over_http(path: str, code: int, said: str) -> None:
    """Answers are JSON; a question that makes no sense and a file that cannot be read are one line."""
    async with (
        showing() as site,
        aiohttp.ClientSession() as session,
        session.get(site.address + path) as reply,
    ):
        text = await reply.text()
        assert (reply.status, said in text) == (code, True)
        assert reply.content_type == ("application/json" if code == 200 else "text/plain")
        if "env=" in path:
            assert site.shelf.wanted == [{"env": "math", "step": "3"}]


def test_the_files_of_the_page_are_in_the_package() -> None:
    """Whoever installs the package has them; every file is used."""
    root = Path(__file__).parent.parent.parent
    there = {path.name for path in (root / "orchestrator" / "views" / "page").iterdir()}
    patterns = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
        "package-data"
    ]
    assert there == {"page.html", "style.css", *SCRIPTS}
    for name in there:
        assert any(fnmatch(f"views/page/{name}", pattern) for pattern in patterns["orchestrator"])
