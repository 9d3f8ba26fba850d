"""What a trainer imports: a client that hands out batches, acknowledges them and publishes versions.

    with TrainerClient("tcp://127.0.0.1:5555", rank=0, world_size=1) as trainer:
        for batch in trainer:
            ...
            trainer.publish(version=batch.step, path="ckpt/step_12")

A batch is acknowledged when the next one is asked for, and when the `with` block is left without an exception; a
process that dies before gets the same batch again. The service may restart at any time: the client waits for
it, up to `timeout_s` of silence, and carries on. Needs pyzmq, msgspec and numpy; a client belongs to one thread.
"""

from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Self, TypeVar, cast

from orchestrator.trainer.batch import TrainingBatch
from orchestrator.trainer.conversation import Conversation, Publication, Waiting

T = TypeVar("T")


class TrainerClient(Conversation):
    """The synchronous client; Ctrl-C interrupts every wait. `finished` says why iteration ended."""

    def __enter__(self) -> Self:
        self._channel = self._open()
        try:
            self._drive(self._join())
        except BaseException:
            self._channel.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            self._drive(self._leave(well=error is None))
        finally:
            self._channel.close()

    def __iter__(self) -> Iterator[TrainingBatch]:
        return self

    def __next__(self) -> TrainingBatch:
        batch = self.next_batch()
        if batch is None:
            raise StopIteration
        return batch

    def next_batch(self) -> TrainingBatch | None:
        """Acknowledge the batch in hand (see `auto_ack`) and wait for the next one; None when the run is over."""
        return self._drive(self._next_batch())

    def get(self, step: int) -> TrainingBatch:
        """The batch of a step again, as long as the service keeps it."""
        return self._drive(self._get(step))

    def ack(self, step: int) -> None:
        """This rank is done with a batch; returns once the service has recorded it."""
        self._drive(self._ack(step))

    def publish(
        self, version: int, path: str | None = None, *, step: int | None = None, wait_s: float = 0.0
    ) -> Publication:
        """A version can be sampled from, at `path`; TrainerLinkError with the reason when it cannot be loaded.

        With `wait_s` it returns when every inference server has loaded the version or is out of service, at the latest after
        that time, and the answer says which have it. Repeating a version or going back changes nothing; the note says so.
        `step` is the last one that the version was trained on: by default the batch in hand. Say it where `auto_ack` is off, because
        then several may be; without it version *s* counts as that of step *s*.
        """
        return self._drive(self._publish(version, path, step, wait_s))

    @contextmanager
    def updating(self, version: int, *, step: int | None = None, wait_s: float = 0.0) -> Iterator[list[str]]:
        """Send a version to the engines yourself: within the block they stand still, and what it gives are their base URLs.

        When it is left the version counts, as one that was published. After an exception it does not, and nobody knows how much of it the
        engines have: they do nothing until a whole version is sent. After a NothingSentError they go on with what they have. TrainerLinkError when it cannot be sent now, or no engine has it afterwards. `step` and
        `wait_s` as in `publish`.
        """
        engines = self._drive(self._updating(version, step))
        try:
            yield engines
        except BaseException as error:
            self._not_updated(version, error)
            raise
        self._drive(self._updated(version, step, wait_s))

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers of a step for people, such as loss or logprob_mismatch; TrainerLinkError when they are refused."""
        self._drive(self._report(step, metrics))

    def checkpointed(self, step: int) -> None:
        """The trainer can go on from behind a step, whatever happens to it; returns once that is recorded.

        With `trainer.keep_batches = "checkpoint"` the batches behind that step are kept, and those up to it given back.
        """
        self._drive(self._checkpointed(step))

    def done(self) -> None:
        """No more batches are wanted: the run ends."""
        self._drive(self._done())

    def _drive(self, doing: Waiting[T]) -> T:
        try:
            while True:
                timeout_s = next(doing)
                if timeout_s is not None:
                    self._channel.wait(timeout_s)
                elif self._on_engines_waiting is not None:
                    self._on_engines_waiting()
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            doing.close()


class AsyncTrainerClient(Conversation):
    """The same for asyncio; one coroutine at a time may use it."""

    async def __aenter__(self) -> Self:
        self._channel = self._open()
        try:
            await self._drive(self._join())
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            await self._drive(self._leave(well=error is None))
        finally:
            await self._close()

    def __aiter__(self) -> AsyncIterator[TrainingBatch]:
        return self

    async def __anext__(self) -> TrainingBatch:
        batch = await self.next_batch()
        if batch is None:
            raise StopAsyncIteration
        return batch

    async def next_batch(self) -> TrainingBatch | None:
        """Acknowledge the batch in hand (see `auto_ack`) and wait for the next one; None when the run is over."""
        return await self._drive(self._next_batch())

    async def get(self, step: int) -> TrainingBatch:
        """The batch of a step again, as long as the service keeps it."""
        return await self._drive(self._get(step))

    async def ack(self, step: int) -> None:
        """This rank is done with a batch; returns once the service has recorded it."""
        await self._drive(self._ack(step))

    async def publish(
        self, version: int, path: str | None = None, *, step: int | None = None, wait_s: float = 0.0
    ) -> Publication:
        """A version can be sampled from, at `path`; TrainerLinkError with the reason when it cannot be loaded.

        With `wait_s` it returns when every inference server has loaded the version or is out of service, at the latest after
        that time, and the answer says which have it. Repeating a version or going back changes nothing; the note says so.
        `step` is the last one that the version was trained on: by default the batch in hand. Say it where `auto_ack` is off, because
        then several may be; without it version *s* counts as that of step *s*.
        """
        return await self._drive(self._publish(version, path, step, wait_s))

    @asynccontextmanager
    async def updating(
        self, version: int, *, step: int | None = None, wait_s: float = 0.0
    ) -> AsyncIterator[list[str]]:
        """Send a version to the engines yourself: within the block they stand still, and what it gives are their base URLs.

        When it is left the version counts, as one that was published. After an exception it does not, and nobody knows how much of it the
        engines have: they do nothing until a whole version is sent. After a NothingSentError they go on with what they have. TrainerLinkError when it cannot be sent now, or no engine has it afterwards. `step` and
        `wait_s` as in `publish`.
        """
        engines = await self._drive(self._updating(version, step))
        try:
            yield engines
        except BaseException as error:
            self._not_updated(version, error)
            raise
        await self._drive(self._updated(version, step, wait_s))

    async def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers of a step for people, such as loss or logprob_mismatch; TrainerLinkError when they are refused."""
        await self._drive(self._report(step, metrics))

    async def checkpointed(self, step: int) -> None:
        """The trainer can go on from behind a step, whatever happens to it; returns once that is recorded.

        With `trainer.keep_batches = "checkpoint"` the batches behind that step are kept, and those up to it given back.
        """
        await self._drive(self._checkpointed(step))

    async def done(self) -> None:
        """No more batches are wanted: the run ends."""
        await self._drive(self._done())

    async def _drive(self, doing: Waiting[T]) -> T:
        try:
            while True:
                timeout_s = next(doing)
                if timeout_s is not None:
                    await self._channel.wait_async(timeout_s)
                elif self._on_engines_waiting is not None:
                    await cast("Awaitable[object]", self._on_engines_waiting())
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            doing.close()

    async def _close(self) -> None:
        import asyncio

        # Closing may wait for what is still to be sent.
        await asyncio.to_thread(self._channel.close)
