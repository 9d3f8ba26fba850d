"""What the page asks for while it is open: a stream of events, and rollouts when somebody looks for them.

One rendering a second serves every page that is open, and without one nothing is rendered. What is read from disk, and what
grows with the run, is made ready in a thread. A page says what it has (the run, its last step, the width of its points) and gets what changed since; a page
that is not read is sent nothing, and loses its connection after the idle time. Answers about rollouts are bounded in
number and in size. Changes nothing.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

import msgspec
from aiohttp import web

from orchestrator.errors import OrchestratorError
from orchestrator.facts import Status
from orchestrator.views.document import served_page
from orchestrator.views.http import App, Request, line
from orchestrator.views.recorded import OVERLAP, RecordedRun

TICK_S = 1.0


class Rollouts(Protocol):
    """Where rollouts are found; asked in a thread. Raises OrchestratorError and ValueError."""

    def find(self, wanted: Mapping[str, str]) -> dict[str, Any]:
        """Groups that fit, without their conversations."""

    def group(self, key: str) -> dict[str, Any] | None:
        """One group with everything."""

    def failures(self) -> list[dict[str, Any]]:
        """What went wrong, the most frequent first."""


class Feed:
    """Feeds every open page of one run."""

    def __init__(
        self,
        *,
        name: str,
        status: Callable[[], Status],
        recorded: RecordedRun,
        rollouts: Rollouts,
        moment: Callable[[], object],
        tick_s: float = TICK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`moment`: something that changes when there is more to read."""
        self._name = name
        self._status = status
        self._recorded = recorded
        self._rollouts = rollouts
        self._moment = moment
        self._read_at: object = None
        self._tick_s = tick_s
        self._clock = clock
        self._closed = asyncio.Event()
        self._rendering = asyncio.Lock()
        self._rendered_at = float("-inf")
        self._base: dict[str, Any] = {}
        self._frames: dict[int | None, bytes] = {}

    def add_to(self, app: App) -> None:
        """Have an app answer with the page, and with what it asks for."""
        app.add("GET", "/", self.page, open_to_all=True)
        app.add("GET", "/api/events", self.stream)
        app.add("GET", "/api/rollouts", self.find)
        app.add("GET", "/api/rollouts/", self.group)
        app.add("GET", "/api/failures", self.failures)

    def close(self) -> None:
        """End every stream at once."""
        self._closed.set()

    async def page(self, _: Request) -> web.Response:
        """The page itself; it is the same for every run, so that it needs no token."""
        page = served_page()
        headers = {
            "Content-Security-Policy": page.policy,
            "Cache-Control": "no-cache",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        return web.Response(body=page.html, content_type="text/html", charset="utf-8", headers=headers)

    async def stream(self, request: Request) -> web.StreamResponse:
        """Server-sent events: at first all that the page has not got, then once a second what is new."""
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",
            }
        )
        if request.method == "HEAD":
            return response
        await response.prepare(request)
        with suppress(ConnectionError):
            await self._send_frames(request, response)
        return response

    async def _send_frames(self, request: Request, response: web.StreamResponse) -> None:
        await self._render()
        have = self._moment_of_series()
        since: int | None = self._first_step_for(request)
        while not self._closed.is_set() and request.transport is not None:
            # Who has not taken the last frame is sent no other, and gets what it missed once it reads again.
            if request.is_read:
                request.stay_open()
                have = self._moment_of_series()
                await response.write(await self._frame(since))
            await self._wait()
            await self._render()
            since = self._changed_since(have)

    async def _wait(self) -> None:
        """Until the next rendering is due."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.01, self._rendered_at + self._tick_s - self._clock())):
                await self._closed.wait()

    async def _render(self) -> None:
        """Whoever comes first after a tick renders for all."""
        async with self._rendering:
            if self._clock() - self._rendered_at < self._tick_s / 2:
                return
            moment = self._moment()
            trouble = ""
            if moment != self._read_at:
                try:
                    await asyncio.to_thread(self._recorded.refresh)
                    self._read_at = moment
                except OrchestratorError as error:
                    trouble = str(error)
            self._base = {
                "name": self._name,
                "run": self._recorded.run_id,
                "now": time.time(),
                "trouble": trouble,
                "status": self._status(),
            }
            self._frames = {}
            self._rendered_at = self._clock()

    async def _frame(self, since: int | None) -> bytes:
        async with self._rendering:
            frame = self._frames.get(since)
            if frame is None:
                # Half a second's work where a long run has many envs.
                parts = {} if since is None else await asyncio.to_thread(self._encode_parts, since)
                frame = self._frames[since] = (
                    b"data: " + msgspec.json.encode({**self._base, **parts}) + b"\n\n"
                )
            return frame

    def _encode_parts(self, since: int) -> dict[str, msgspec.Raw]:
        parts = self._recorded.parts(since)
        return {name: msgspec.Raw(msgspec.json.encode(part)) for name, part in parts.items()}

    def _first_step_for(self, request: Request) -> int:
        """A page that lost its connection has most of the columns already."""
        asked = (request.query.get("run"), request.query.get("width"))
        if asked != (self._recorded.run_id, str(self._recorded.series.width)):
            return 1
        step = request.query.get("step", "")
        if not (step.isdecimal() and len(step) < 10):
            return 1
        # A run that was set back has other steps in the place of those that the page has.
        same = str(self._recorded.series.formed_at(int(step))) == request.query.get("at")
        return max(1, int(step) - OVERLAP) if same else 1

    def _moment_of_series(self) -> tuple[int, int, int]:
        return self._recorded.generation, self._recorded.series.width, self._recorded.series.revision

    def _changed_since(self, have: tuple[int, int, int]) -> int | None:
        generation, width, revision = have
        same = (generation, width) == (self._recorded.generation, self._recorded.series.width)
        return self._recorded.series.changed_since(revision) if same else 1

    async def find(self, request: Request) -> web.Response:
        """Groups by what is asked for in the query."""
        return await self._ask(lambda: self._rollouts.find(dict(request.query)))

    async def group(self, request: Request) -> web.Response:
        """One group by its number or id."""
        return await self._ask(lambda: self._rollouts.group(request.path.removeprefix("/api/rollouts/")))

    async def failures(self, _: Request) -> web.Response:
        """What went wrong."""
        return await self._ask(self._rollouts.failures)

    async def _ask(self, question: Callable[[], Any]) -> web.Response:
        try:
            answer = await asyncio.to_thread(question)
        except ValueError as error:
            return line(400, str(error))
        except OrchestratorError as error:
            return line(503, str(error))
        if answer is None:
            return line(404, "there is no such rollout; it may have been given up to make room")
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")
