"""The near end of a bridge: takes batches ahead of the foreign trainer, and acknowledges them when it is done with them.

There is one connection and one coroutine that uses it, so a wait for the next batch is interrupted to say that one is done;
the client goes on with that wait afterwards. A version is published before its batch is acknowledged, as every trainer should.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

import structlog

from orchestrator.errors import TrainerLinkError
from orchestrator.trainer import AsyncTrainerClient, TrainingBatch

log = structlog.get_logger("bridge")

AHEAD = 2
"""Batches that are held and not done with, where the foreign trainer takes one at a time."""


class Intake:
    """Feeds a bridge. `on_batch` is awaited for each batch, in order; `on_end` is called behind the last one."""

    def __init__(
        self,
        trainer: AsyncTrainerClient,
        *,
        on_batch: Callable[[TrainingBatch], Awaitable[None]],
        on_end: Callable[[], None],
        ahead: int = AHEAD,
        rewind: bool = False,
    ) -> None:
        """The client must have been made with `auto_ack=False`. So many batches as `ahead` are held and not done with. With `rewind`, whoever is set back has the run set back if need be."""
        self._trainer = trainer
        self._on_batch = on_batch
        self._on_end = on_end
        self._ahead = ahead
        self._rewind = rewind
        self._held: deque[int] = deque()
        self._done: deque[tuple[int, bool, str | None]] = deque()
        self._wake = asyncio.Event()
        self._published: int | None = None
        self._back: int | None = None

    def done(self, step: int, *, publish: bool = True, path: str | None = None) -> None:
        """The foreign trainer is done with a step. With `publish`, weights came of it, at `path` if it says so."""
        self._done.append((step, publish, path))
        self._wake.set()

    def set_back(self, step: int) -> None:
        """The foreign trainer goes on behind an earlier step: its batches come again, and what was taken is forgotten."""
        self._back = step
        self._wake.set()

    async def run(self) -> None:
        """Until the run is over and everything is acknowledged."""
        ended = False
        while True:
            await self._acknowledge()
            if self._back is not None:
                self._trainer.resume_after(self._back, rewind=self._rewind)
                self._published = self._back
                self._back, ended = None, False
                self._held.clear()
            if ended and not self._held:
                return
            if ended or len(self._held) >= self._ahead:
                await self._wake.wait()
                continue
            woken, batch = await self._next_unless_woken()
            if self._back is not None:
                continue  # whatever came was asked for before
            if batch is not None:
                self._held.append(batch.step)
                await self._on_batch(batch)
            elif not woken:
                ended = True
                log.info("bridge.run_over", reason=self._trainer.finished)
                self._on_end()

    async def publish(self, version: int, path: str | None) -> None:
        """A version, which comes of the step of its number, can be sampled from; one that is refused is a line in the log, because nobody
        else listens."""
        if self._published is not None and version <= self._published:
            return
        self._published = version
        try:
            told = await self._trainer.publish(version, path, step=version)
        except TrainerLinkError as error:
            log.warning("bridge.version_refused", version=version, path=path, reason=str(error))
        else:
            log.info("bridge.version_published", version=version, path=path, note=told.note)

    async def _acknowledge(self) -> None:
        self._wake.clear()
        while self._done:
            step, publish, path = self._done[0]
            if publish:
                await self.publish(step, path)
            await self._trainer.ack(step)
            self._done.popleft()
            while self._held and self._held[0] <= step:
                self._held.popleft()
            log.info("bridge.step_done", step=step)

    async def _next_unless_woken(self) -> tuple[bool, TrainingBatch | None]:
        asked = asyncio.create_task(self._trainer.next_batch())  # noqa: TID251  ended and awaited below
        woken = asyncio.create_task(self._wake.wait())  # noqa: TID251  same
        try:
            await asyncio.wait([asked, woken], return_when=asyncio.FIRST_COMPLETED)
            return (False, asked.result()) if asked.done() else (True, None)
        finally:
            for task in (asked, woken):
                task.cancel()
            await asyncio.wait([asked, woken])
