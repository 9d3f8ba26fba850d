"""Versions that the trainer sends to the inference servers itself: who is at it, and what happens when the word is not kept.

One version is sent at a time, by one client: it begins, the servers stand still, and it says that it is done or that it
failed. A client that failed, is gone, or has said nothing in `timeout_s` is given up: the servers that stood still for it may have a part of
the version, and wait for the next. Only where it says that it sent nothing do they go on with what they have. What is asked is done in the order in which it came, by one task. Whoever asks a second time, because
the answer was lost on the way, gets the same answer.
"""

import asyncio
from dataclasses import dataclass

import structlog

from orchestrator.inference import InferencePool, WeightUpdateError
from orchestrator.inference.weights import sent_by
from orchestrator.run.run import Run
from orchestrator.service.driver import Driver
from orchestrator.service.weights import WeightLoader
from orchestrator.trainer_link.publications import Began, Ended

log = structlog.get_logger()

_MAX_ASKED = 64


@dataclass(frozen=True, slots=True)
class _Begin:
    client: str
    version: int
    then: Began


@dataclass(frozen=True, slots=True)
class _End:
    client: str
    version: int
    failed: str
    untouched: bool
    then: Ended


@dataclass(frozen=True, slots=True)
class _Gone:
    client: str


class TrainerUpdates:
    """Between the trainer's link and the inference servers."""

    def __init__(
        self, pool: InferencePool, loader: WeightLoader, *, mode: str, timeout_s: float, life: str
    ) -> None:
        """`mode` is how weights are updated, for those who ask to send where nothing is to be sent; `life` names the run, and is
        another after it was set back."""
        self._path = sent_by(life)
        self._pool = pool
        self._loader = loader
        self._mode = mode
        self._timeout_s = timeout_s
        self._asked: asyncio.Queue[_Begin | _End | _Gone] = asyncio.Queue()
        self._client = ""
        self._ends_at = 0.0
        self._last: tuple[str, int, str] | None = None
        """Client and version of the last update that ended by its client's word, and why it was refused if it was."""

    @property
    def waiting(self) -> int:
        """Inference servers that wait for the trainer to send them weights."""
        return self._pool.sending.waiting if self._pool.sent_by_trainer else 0

    def begin(self, client: str, version: int, then: Began) -> None:
        """A client wants to send a version; `then` is called once, with a refusal or the servers that stand still for it."""
        if self._asked.qsize() >= _MAX_ASKED:
            then("too much is asked of the inference servers at once; ask again later", [])
        else:
            self._asked.put_nowait(_Begin(client, version, then))

    def end(self, client: str, version: int, failed: str, untouched: bool, then: Ended) -> None:
        """A client has sent a version, or has `failed` to, before anything was sent if the servers are `untouched`; `then` is called once,
        with a refusal or "" and the path to publish."""
        if self._asked.qsize() >= _MAX_ASKED:
            then("too much is asked of the inference servers at once; ask again later", self._path)
        else:
            self._asked.put_nowait(_End(client, version, failed, untouched, then))

    def gone(self, client: str) -> None:
        """A client will not say anything more."""
        if self._pool.sent_by_trainer:
            self._asked.put_nowait(_Gone(client))

    async def run(self, driver: Driver[Run]) -> None:
        """Do what is asked until cancelled."""
        while True:
            asked = await self._next()
            match asked:
                case None:
                    late = f"the trainer has not said within {self._timeout_s:g} s that it was done"
                    await self._give_up(driver, late)
                case _Gone(client):
                    if self._pool.sending.version is not None and client == self._client:
                        await self._give_up(driver, "the trainer is gone")
                case _Begin():
                    await self._begin(driver, asked)
                case _End():
                    await self._end(driver, asked)

    async def _next(self) -> _Begin | _End | _Gone | None:
        """What is asked next; None when the time of the one that is at it is over."""
        if self._pool.sending.version is None:
            return await self._asked.get()
        try:
            async with asyncio.timeout_at(self._ends_at):
                return await self._asked.get()
        except TimeoutError:
            return None

    async def _begin(self, driver: Driver[Run], asked: _Begin) -> None:
        sending = self._pool.sending
        if (asked.client, asked.version) == (self._client, sending.version):
            asked.then("", sending.engines)
            return
        if refusal := self._refusal(driver.run, asked):
            asked.then(refusal, [])
            return
        try:
            await sending.begin(asked.version)
        except WeightUpdateError as error:
            asked.then(str(error), [])
            return
        if self._last is not None and self._last[:2] == (asked.client, asked.version):
            self._last = None  # what became of that one says nothing of this one
        self._client = asked.client
        self._ends_at = asyncio.get_running_loop().time() + self._timeout_s
        self._tell(driver, asked.version)
        asked.then("", sending.engines)

    def _refusal(self, run: Run, asked: _Begin) -> str:
        if not self._pool.sent_by_trainer:
            return (
                f'version {asked.version} cannot be sent: inference.weight_update is "{self._mode}"; '
                'publish(version, path=…), or set it to "trainer"'
            )
        if self._pool.sending.version is not None:
            return f"version {self._pool.sending.version} is being sent already; end that first"
        if asked.version < run.weights.newest:
            return f"version {asked.version} is older than the published {run.weights.newest}; send that one again, or a later one"
        return ""

    async def _end(self, driver: Driver[Run], asked: _End) -> None:
        sending = self._pool.sending
        if (asked.client, asked.version) != (self._client, sending.version):
            if self._last is not None and self._last[:2] == (asked.client, asked.version):
                asked.then(self._last[2], self._path)
                return
            reason = (
                f"version {asked.version} is not being sent: it was given up, or the orchestrator was restarted meanwhile; "
                f"send it again"
            )
            asked.then(reason, self._path)
            return
        refused = ""
        if asked.failed and asked.untouched:
            log.error("weights.not_sent", version=asked.version, reason=asked.failed)
            await sending.take_back()
        elif asked.failed:
            await self._give_up(driver, f"the trainer failed ({asked.failed})")
        else:
            try:
                await sending.finish(self._path)
            except WeightUpdateError as error:
                refused = str(error)
        self._last = asked.client, asked.version, refused
        self._tell(driver, None)
        if not asked.failed and not refused and asked.version == driver.run.weights.newest:
            self._loader.load(asked.version, self._path)  # sent again, for those who had lost it
        asked.then(refused, self._path)

    async def _give_up(self, driver: Driver[Run], why: str) -> None:
        sending = self._pool.sending
        reason = f"{why} while version {sending.version} was sent: nobody knows which weights it has"
        log.error("weights.given_up", version=sending.version, reason=why)
        await sending.give_up(reason)
        self._tell(driver, None)

    def _tell(self, driver: Driver[Run], version: int | None) -> None:
        left_s = self._ends_at - asyncio.get_running_loop().time()
        driver.tell(driver.run.on_sending, version, driver.clock() + left_s)
