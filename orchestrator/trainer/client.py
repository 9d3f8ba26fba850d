"""What a trainer imports: a client that hands out batches, acknowledges them and publishes versions.

    with TrainerClient("tcp://127.0.0.1:5555", rank=0, world_size=1) as trainer:
        for batch in trainer:
            ...
            trainer.publish(version=batch.step, path="ckpt/step_12")

A batch is acknowledged when the next one is asked for, and when the `with` block is left without an exception; a
process that dies before gets the same batch again. The service may restart at any time: the client waits for
it, up to `timeout_s` of silence, and carries on. Needs pyzmq, msgspec and numpy; a client belongs to one thread.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

from orchestrator.errors import TrainerLinkError
from orchestrator.trainer.batch import TrainingBatch, decode_batch
from orchestrator.trainer.channel import Channel, open_channel
from orchestrator.trainer.protocol import (
    Ack,
    Checkpointed,
    Done,
    Finished,
    Get,
    Missing,
    Next,
    Ok,
    ProtocolError,
    Publish,
    Published,
    Report,
    Request,
    Served,
)
from orchestrator.trainer.session import Answered, TrainerSession

T = TypeVar("T")
Waiting = Generator[float, None, T]
"""What a client does, yielding how many seconds to wait for the next message whenever it has to."""

TOKEN_VARIABLE = "ORCHESTRATOR_TRAINER_TOKEN"  # noqa: S105  the name of a variable, not a token


@dataclass(frozen=True, slots=True)
class Publication:
    """What became of a version that was published; `note` says what was odd about it, such as a repetition.

    `engines` has an entry for each inference server where the publication waited for them: empty where it has the version, or
    a later one, and else why not. Without waiting there is none.
    """

    version: int
    note: str = ""
    engines: Mapping[str, str] | None = None

    @property
    def loaded_everywhere(self) -> bool:
        """Whether the publication waited, and every inference server has the version."""
        return self.engines is not None and not any(self.engines.values())


class _Conversation:
    """What both clients do: every method is a generator that yields where it has to wait."""

    def __init__(
        self,
        address: str,
        *,
        rank: int = 0,
        world_size: int = 1,
        resume_after: int | None = None,
        prefetch: bool = False,
        auto_ack: bool = True,
        timeout_s: float = 600.0,
        ping_s: float = 2.0,
        token: str | None = None,
        server_key: bytes | None = None,
        public_key: bytes | None = None,
        secret_key: bytes | None = None,
    ) -> None:
        """Speak to the service at a ZMQ or `file://` address as one of the trainer's ranks.

        `resume_after` is the last step in the trainer's checkpoint: iteration starts behind it, with batches that
        the service still keeps. By default it starts at the first batch that this rank has not acknowledged.
        `prefetch` asks for the next batch while the last one is trained on. Without `auto_ack` a batch is acknowledged by
        `ack` alone, for a loop that has several in hand. `timeout_s` is how long the service
        may be silent; a client that waits asks every `ping_s` whether it is there. `token` is for a service that asks
        for one (`trainer.token_env`); when it is not given, the environment variable ORCHESTRATOR_TRAINER_TOKEN
        is used, if it is set. The keys are CURVE keys (Z85); without a pair of its own a client makes one.
        """
        self.address = address
        self.finished: str | None = None
        token = os.environ.get(TOKEN_VARIABLE, "") if token is None else token
        self._session = TrainerSession(rank=rank, world_size=world_size, token=token)
        self._timeout_s = timeout_s
        self._ping_s = min(ping_s, timeout_s / 4)
        self._prefetch = prefetch
        self._auto_ack = auto_ack
        self._after = resume_after
        self._in_hand: int | None = None
        self._ahead: int | None = None
        self._replies: dict[int, Answered] = {}
        self._heard_at = 0.0
        self._keys = {"server_key": server_key, "public_key": public_key, "secret_key": secret_key}
        self._channel: Channel

    @property
    def rank(self) -> int:
        return self._session.rank

    @property
    def world_size(self) -> int:
        return self._session.world_size

    @property
    def run(self) -> str:
        """Which run is served; the same after a restart of the service."""
        assert self._session.welcome is not None, "the client has not joined"
        return self._session.welcome.run

    @property
    def after(self) -> int:
        """The step behind which iteration goes on."""
        assert self._after is not None, "the client has not joined"
        return self._after

    def resume_after(self, step: int) -> None:
        """Go on behind another step than the service says; as the argument of the same name, once joined."""
        self._after = step

    def _open(self) -> Channel:
        return open_channel(self.address, **self._keys)

    def _join(self) -> Waiting[None]:
        self._heard_at = time.monotonic()
        self._channel.send(self._session.hello())
        while self._session.welcome is None:
            yield from self._turn()
        if self._after is None:
            self._after = self._session.welcome.after

    def _leave(self, *, well: bool) -> Waiting[None]:
        if well:
            yield from self._ack_in_hand()
        self._channel.send(self._session.goodbye())

    def _next_batch(self) -> Waiting[TrainingBatch | None]:
        yield from self._ack_in_hand()
        if self._ahead is None:
            self._ahead = self._ask_next()
        reply = yield from self._wait(self._ahead)
        self._ahead = None
        batch = self._batch_of(reply)
        if batch is not None:
            self._after = self._in_hand = batch.step
            if self._prefetch:
                self._ahead = self._ask_next()
        return batch

    def _get(self, step: int) -> Waiting[TrainingBatch]:
        batch = self._batch_of((yield from self._request(Get(self._session.next_id(), step))))
        assert batch is not None
        return batch

    def _ack(self, step: int) -> Waiting[None]:
        yield from self._do(Ack(self._session.next_id(), step))
        if step == self._in_hand:
            self._in_hand = None

    def _ack_in_hand(self) -> Waiting[None]:
        if self._in_hand is not None and self._auto_ack:
            yield from self._ack(self._in_hand)

    def _publish(self, version: int, path: str | None, wait_s: float) -> Waiting[Publication]:
        request = Publish(self._session.next_id(), version, path, self._after or 0, float(wait_s))
        if not wait_s:
            return Publication(version, (yield from self._do(request)))
        reply = yield from self._request(request)
        match reply.answer:
            case Published(note=note, engines=engines):
                return Publication(version, note, engines)
            case Missing(reason=reason):
                raise TrainerLinkError(reason)
            case other:
                raise TrainerLinkError(f"the orchestrator answered something else than was asked: {other}")

    def _report(self, step: int, metrics: Mapping[str, float]) -> Waiting[None]:
        numbers = {name: float(value) for name, value in metrics.items()}
        yield from self._do(Report(self._session.next_id(), step, numbers))

    def _checkpointed(self, step: int) -> Waiting[None]:
        yield from self._do(Checkpointed(self._session.next_id(), step))

    def _done(self) -> Waiting[None]:
        yield from self._do(Done(self._session.next_id()))

    def _do(self, request: Request) -> Waiting[str]:
        """Ask for something that is answered without a batch; returns the answer's note."""
        reply = yield from self._request(request)
        match reply.answer:
            case Ok(note=note):
                return note
            case Missing(reason=reason):
                raise TrainerLinkError(reason)
            case other:
                raise TrainerLinkError(f"the orchestrator answered something else than was asked: {other}")

    def _ask_next(self) -> int:
        assert self._after is not None
        return self._ask(Next(self._session.next_id(), self._after))

    def _ask(self, request: Request) -> int:
        for frame in self._session.ask(request):
            self._channel.send(frame)
        return request.id

    def _request(self, request: Request) -> Waiting[Answered]:
        return (yield from self._wait(self._ask(request)))

    def _wait(self, request_id: int) -> Waiting[Answered]:
        # The time spent on training is no silence of the service's.
        self._heard_at = time.monotonic()
        try:
            while request_id not in self._replies:
                yield from self._turn()
        except BaseException:
            # An interrupted wait for the next batch goes on when it is asked for again.
            if request_id != self._ahead:
                self._session.forget(request_id)
            raise
        return self._replies.pop(request_id)

    def _turn(self) -> Waiting[None]:
        """Take one message in; when there is none, wait, and ask whether anybody is there if none has come then."""
        frames = self._channel.receive()
        if frames is None:
            yield self._patience_s()
            frames = self._channel.receive()
        if frames is None:
            self._channel.send(self._session.silence())
            return
        self._heard_at = time.monotonic()
        out, reply = self._session.receive(frames)
        for frame in out:
            self._channel.send(frame)
        if reply is not None:
            self._replies[reply.answer.id] = reply

    def _patience_s(self) -> float:
        silent_s = time.monotonic() - self._heard_at
        if silent_s > self._timeout_s:
            raise TrainerLinkError(
                f"no orchestrator has answered at {self.address} for {silent_s:.0f} s (rank {self.rank} of "
                f"{self.world_size}); is it running, and are the address and the keys right?"
            )
        return self._ping_s

    def _batch_of(self, reply: Answered) -> TrainingBatch | None:
        match reply.answer:
            case Served(step=step):
                try:
                    return decode_batch(reply.frames)
                except ProtocolError as error:
                    raise TrainerLinkError(f"batch {step}: {error}") from error
            case Finished(reason=reason):
                self.finished = reason
                return None
            case Missing(reason=reason):
                raise TrainerLinkError(reason)
            case Ok() | Published():
                raise TrainerLinkError("the orchestrator answered a request for a batch without one")


class TrainerClient(_Conversation):
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

    def publish(self, version: int, path: str | None = None, *, wait_s: float = 0.0) -> Publication:
        """A version can be sampled from, at `path`; TrainerLinkError with the reason when it cannot be loaded.

        With `wait_s` it returns when every inference server has loaded the version or is out of service, at the latest after
        that time, and the answer says which have it. Repeating a version or going back changes nothing; the note says so.
        """
        return self._drive(self._publish(version, path, wait_s))

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
                self._channel.wait(timeout_s)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            doing.close()


class AsyncTrainerClient(_Conversation):
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

    async def publish(self, version: int, path: str | None = None, *, wait_s: float = 0.0) -> Publication:
        """A version can be sampled from, at `path`; TrainerLinkError with the reason when it cannot be loaded.

        With `wait_s` it returns when every inference server has loaded the version or is out of service, at the latest after
        that time, and the answer says which have it. Repeating a version or going back changes nothing; the note says so.
        """
        return await self._drive(self._publish(version, path, wait_s))

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
                await self._channel.wait_async(timeout_s)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            doing.close()

    async def _close(self) -> None:
        # Closing may wait for what is still to be sent.
        await asyncio.to_thread(self._channel.close)
