"""What both clients say to the service, and in which order; how they wait is theirs (`trainer.client`).

Every method is a generator that yields where it has to wait: a number of seconds for the next message, or None where
engines want weights and the trainer's own function is to be called. No method here sleeps, and none knows asyncio.
"""

import os
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from orchestrator.errors import TrainerLinkError
from orchestrator.trainer.batch import TrainingBatch, decode_batch
from orchestrator.trainer.channel import Channel, open_channel
from orchestrator.trainer.protocol import (
    Ack,
    Answer,
    Checkpointed,
    Done,
    Engines,
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
    Updated,
    Updating,
)
from orchestrator.trainer.session import Answered, TrainerSession

T = TypeVar("T")
Waiting = Generator[float | None, None, T]
"""What a client does, yielding how many seconds to wait for the next message whenever it has to; None where engines want weights."""

_MAX_REASON = 1000
"""Characters of an exception that are told."""

_LEFT_S = 5.0
"""Silence after which a service that has said that the run is over is not waited for any more: it has left."""

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


class NothingSentError(Exception):
    """Raised by a trainer in an `updating` block: it has sent nothing to any engine, so they can go on with what they have."""


class _RunOverError(TrainerLinkError):
    """The run is over, and nobody is there any more who could answer."""


class Conversation:
    """What both clients do: every method is a generator that yields where it has to wait."""

    def __init__(
        self,
        address: str,
        *,
        rank: int = 0,
        world_size: int = 1,
        resume_after: int | None = None,
        rewind: bool = False,
        prefetch: bool = False,
        auto_ack: bool = True,
        timeout_s: float = 600.0,
        ping_s: float = 2.0,
        token: str | None = None,
        server_key: bytes | None = None,
        public_key: bytes | None = None,
        secret_key: bytes | None = None,
        on_engines_waiting: Callable[[], object] | None = None,
    ) -> None:
        """Speak to the service at a ZMQ or `file://` address as one of the trainer's ranks.

        `resume_after` is the last step in the trainer's checkpoint: iteration starts behind it, with batches that
        the service still keeps. By default it starts at the first batch that this rank has not acknowledged.
        `rewind`: where the service keeps them no longer, it sets the run back to that step, if its configuration allows it
        (`trainer.allow_rewind`) and every rank asks for the same; the first batch is waited for meanwhile.
        `prefetch` asks for the next batch while the last one is trained on. Without `auto_ack` a batch is acknowledged by
        `ack` alone, for a loop that has several in hand. `timeout_s` is how long the service
        may be silent; a client that waits asks every `ping_s` whether it is there. `token` is for a service that asks
        for one (`trainer.token_env`); when it is not given, the environment variable ORCHESTRATOR_TRAINER_TOKEN
        is used, if it is set. The keys are CURVE keys (Z85); without a pair of its own a client makes one.
        `on_engines_waiting` is called (of an asyncio client: awaited) while a batch is waited for, when engines wait for the
        trainer to send them weights: `updating` with the version that it has.
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
        self._rewind = rewind and resume_after is not None
        self._in_hand: int | None = None
        self._ahead: int | None = None
        self._replies: dict[int, Answered] = {}
        self._heard_at = 0.0
        self._left = False
        self._on_engines_waiting = on_engines_waiting
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
    def rewinds(self) -> int:
        """How often the run was set back: steps that were given up come again under the same numbers."""
        assert self._session.welcome is not None, "the client has not joined"
        return self._session.welcome.rewinds

    @property
    def after(self) -> int:
        """The step behind which iteration goes on."""
        assert self._after is not None, "the client has not joined"
        return self._after

    @property
    def engines_waiting(self) -> int:
        """Engines that wait for the trainer to send them weights (`updating`), as the service said last."""
        return self._session.engines_waiting

    def resume_after(self, step: int, *, rewind: bool = False) -> None:
        """Go on behind another step than the service says; as the arguments of the same names, once joined."""
        self._after = step
        self._rewind = rewind
        self._in_hand = None
        if self._ahead is not None:
            # What was asked for ahead is not what comes next any more.
            self._session.forget(self._ahead)
            self._replies.pop(self._ahead, None)
            self._ahead = None

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
            with suppress(_RunOverError):
                yield from self._ack_in_hand()
        self._channel.send(self._session.goodbye())

    def _next_batch(self) -> Waiting[TrainingBatch | None]:
        try:
            yield from self._ack_in_hand()
            if self._ahead is None:
                self._ahead = self._ask_next()
            reply = yield from self._wait(self._ahead, for_batch=True)
        except _RunOverError:
            self.finished = self._session.over
            return None
        self._ahead = None
        batch = self._batch_of(reply)
        if batch is not None:
            self._after = self._in_hand = batch.step
            self._rewind = False  # it goes on from here
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

    def _publish(
        self, version: int, path: str | None, step: int | None, wait_s: float
    ) -> Waiting[Publication]:
        request = Publish(self._session.next_id(), version, path, self._trained_step(step), float(wait_s))
        return (yield from self._published(request))

    def _trained_step(self, step: int | None) -> int:
        """What a version comes from: a batch that was handed out is the last one trained on, unless the loop asks ahead; then nobody
        knows but its author, and 0 leaves it to the version's number."""
        if step is not None:
            return step
        return (self._after or 0) if self._auto_ack else 0

    def _updating(self, version: int, step: int | None) -> Waiting[list[str]]:
        """Have the engines stand still: their base URLs."""
        request = Updating(self._session.next_id(), version, self._trained_step(step))
        reply = yield from self._request(request)
        match reply.answer:
            case Engines(urls=urls):
                self._session.engines_waiting = 0
                return urls
            case other:
                raise _refusal(other)

    def _updated(self, version: int, step: int | None, wait_s: float) -> Waiting[Publication]:
        request = Updated(self._session.next_id(), version, self._trained_step(step), float(wait_s))
        return (yield from self._published(request))

    def _not_updated(self, version: int, error: BaseException) -> None:
        """Say it and go on: whoever raised it does not wait for an answer."""
        why = f"{type(error).__name__}: {error}"[:_MAX_REASON]
        untouched = isinstance(error, NothingSentError)
        self._session.forget(
            self._ask(Updated(self._session.next_id(), version, failed=why, untouched=untouched))
        )

    def _published(self, request: Publish | Updated) -> Waiting[Publication]:
        version = request.version
        if not request.wait_s:
            return Publication(version, (yield from self._do(request)))
        reply = yield from self._request(request)
        match reply.answer:
            case Published(note=note, engines=engines):
                return Publication(version, note, engines)
            case other:
                raise _refusal(other)

    def _report(self, step: int, metrics: Mapping[str, float]) -> Waiting[None]:
        numbers = {name: float(value) for name, value in metrics.items()}
        yield from self._mention(Report(self._session.next_id(), step, numbers))

    def _checkpointed(self, step: int) -> Waiting[None]:
        yield from self._mention(Checkpointed(self._session.next_id(), step))

    def _done(self) -> Waiting[None]:
        yield from self._mention(Done(self._session.next_id()))

    def _mention(self, request: Request) -> Waiting[None]:
        """Ask for something that is of no use once the run is over: a trainer that saves longer than the service stays has done nothing wrong."""
        with suppress(_RunOverError):
            yield from self._do(request)

    def _do(self, request: Request) -> Waiting[str]:
        """Ask for something that is answered without a batch; returns the answer's note."""
        reply = yield from self._request(request)
        match reply.answer:
            case Ok(note=note):
                return note
            case other:
                raise _refusal(other)

    def _ask_next(self) -> int:
        assert self._after is not None
        return self._ask(Next(self._session.next_id(), self._after, self._rewind))

    def _ask(self, request: Request) -> int:
        for frame in self._session.ask(request):
            self._channel.send(frame)
        return request.id

    def _request(self, request: Request) -> Waiting[Answered]:
        return (yield from self._wait(self._ask(request)))

    def _wait(self, request_id: int, *, for_batch: bool = False) -> Waiting[Answered]:
        # The time spent on training is no silence of the service's.
        self._heard_at = time.monotonic()
        try:
            while request_id not in self._replies:
                yield from self._turn()
                if for_batch and self.engines_waiting and self._on_engines_waiting is not None:
                    self._session.engines_waiting = 0  # said again, if it goes on
                    yield None
                    self._heard_at = time.monotonic()
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
        over = self._session.over
        self._left = bool(over) and (self._left or silent_s > min(_LEFT_S, self._timeout_s))
        if self._left:
            raise _RunOverError(f"the run is over ({over}) and its orchestrator has left {self.address}")
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
            case Ok() | Published() | Engines():
                raise TrainerLinkError("the orchestrator answered a request for a batch without one")


def _refusal(answer: Answer) -> TrainerLinkError:
    """Why what was asked for is not to be had."""
    if isinstance(answer, Missing):
        return TrainerLinkError(answer.reason)
    return TrainerLinkError(f"the orchestrator answered something else than was asked: {answer}")
