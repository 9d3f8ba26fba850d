"""Who gets which batch: leases, ranks and acknowledgements, without any I/O.

Invariants: a batch is leased from `offer` until every rank has acknowledged it; a rank is served in step order and gets
the same batch whenever it asks for the same step; a rank has one connection, the newest; an answer to an
acknowledgement or a publication is given only after it is recorded. A transport feeds it messages with `receive`
and carries out what it says through `send` and `serve`. Recovered batches are offered before the first
message comes in, so that a step which a trainer has seen is never unknown.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from orchestrator.groups.group import Batch
from orchestrator.trainer.protocol import (
    PROTOCOL,
    Ack,
    Done,
    Finished,
    Get,
    Join,
    Leave,
    Missing,
    Next,
    Ok,
    Ping,
    Pong,
    ProtocolError,
    Publish,
    Refused,
    ToServer,
    ToTrainer,
    Unknown,
    Welcome,
    decode_to_server,
)
from orchestrator.trainer_link.ranks import Rank, Ranks

log = structlog.get_logger("trainer")


class Transport(Protocol):
    """What the desk needs done."""

    def send(self, peer: bytes, message: ToTrainer) -> None:
        """Send a message, or drop it when the peer is gone."""

    def serve(self, peer: bytes, request_id: int, step: int, rank: int, batch: Batch | None) -> None:
        """Send a batch's frames for a rank; None is a batch that must be loaded first."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """How a rank is doing, for people."""

    rank: int
    host: str
    pid: int
    waiting: bool
    last_acknowledged: int


def ignore(*_: object) -> None:
    """The default of every callback."""


def at_once(callback: Callable[[], None]) -> None:
    """The default where nothing needs to be durable."""
    callback()


class Leases:
    """Hands out batches over some transport."""

    def __init__(
        self,
        transport: Transport,
        *,
        world_size: int,
        run: str = "",
        keep: int = 1,
        last_step: int = 0,
        version: int = 0,
        can_load: bool = False,
        on_ack: Callable[[int], None] = ignore,
        on_rank_ack: Callable[[int, int], None] = ignore,
        on_publish: Callable[[int, str | None], None] = ignore,
        on_trained: Callable[[int], None] = ignore,
        on_done: Callable[[], None] = ignore,
        when_durable: Callable[[Callable[[], None]], None] = at_once,
    ) -> None:
        self._transport = transport
        self._world_size = world_size
        self._run = run
        self._keep = keep
        self._can_load = can_load
        self.last_step = last_step
        self.version = version
        self.done = False
        self.finished: str | None = None
        self._on_ack = on_ack
        self._on_rank_ack = on_rank_ack
        self._on_publish = on_publish
        self._on_trained = on_trained
        self._on_done = on_done
        self._when_durable = when_durable
        self._leased: dict[int, tuple[Batch, set[int]]] = {}
        self._kept: OrderedDict[int, Batch] = OrderedDict()
        self._ranks = Ranks(world_size, transport.send)
        self._acknowledged: dict[int, int] = {}
        self.malformed = 0
        self.on_told: Callable[[], None] = ignore

    @property
    def leased(self) -> list[int]:
        """Steps that not every rank has acknowledged."""
        return list(self._leased)

    @property
    def ranks(self) -> list[RankStatus]:
        """The ranks that are connected."""
        acknowledged = self._acknowledged
        return [
            RankStatus(
                rank.number, rank.host, rank.pid, rank.waiting is not None, acknowledged.get(rank.number, 0)
            )
            for rank in self._ranks
        ]

    @property
    def all_told(self) -> bool:
        """Whether every connected rank knows that the run is over."""
        return all(rank.told for rank in self._ranks)

    def offer(self, batch: Batch, acked_by: Collection[int] = ()) -> None:
        """Lease a durable batch; steps come in order. `acked_by` are ranks that need it no more."""
        if self._leased and batch.step <= max(self._leased):
            raise ValueError(f"batch {batch.step} offered after batch {max(self._leased)}")
        self._leased[batch.step] = (batch, set(acked_by))
        self.last_step = max(self.last_step, batch.step)
        if len(acked_by) >= self._world_size:
            self._complete(batch.step)
        for rank in self._ranks:
            if rank.waiting is not None:
                request, rank.waiting = rank.waiting, None
                self._transport.serve(rank.peer, request, batch.step, rank.number, batch)

    def keep(self, batch: Batch) -> None:
        """Put back a batch that every rank had acknowledged before a restart."""
        self.last_step = max(self.last_step, batch.step)
        self._kept[batch.step] = batch
        self._trim()

    def finish(self, reason: str) -> None:
        """There will be no further batch; ranks are told when they have had the last one."""
        if self.finished is None:
            self.finished = reason
            for rank in self._ranks:
                if rank.waiting is not None:
                    self._tell_finished(rank, rank.waiting)

    def receive(self, peer: bytes, frames: list[Any]) -> None:
        """Take a message in."""
        try:
            message = decode_to_server(frames[0] if frames else b"")
        except ProtocolError as error:
            self.malformed += 1
            log.warning("trainer.message_malformed", error=str(error), count=self.malformed)
            reason = (
                f"the message cannot be understood ({error}); this orchestrator speaks protocol {PROTOCOL}"
            )
            self._transport.send(peer, Refused(reason))
            return
        if isinstance(message, Join):
            self._join(peer, message)
            return
        rank = self._ranks.by_peer(peer)
        if rank is None:
            self._transport.send(peer, Unknown())
            return
        self._handle(rank, message)

    def lose(self, peer: bytes) -> None:
        """The connection is gone."""
        self._ranks.lose(peer)
        self.on_told()

    def publish(self, version: int, path: str | None, source: str) -> str:
        """A version can be sampled from; returns what is odd about it, if anything is."""
        if version > self.version:
            self.version = version
            log.info("trainer.version_published", version=version, path=path, source=source)
            self._on_publish(version, path)
            return ""
        before = (
            "was published before"
            if version == self.version
            else f"is older than the published {self.version}"
        )
        note = f"version {version} {before}; nothing changes"
        log.info("trainer.versionignored", version=version, source=source, note=note)
        return note

    def _join(self, peer: bytes, join: Join) -> None:
        rank = self._ranks.join(peer, join)
        if rank is not None:
            unacknowledged = (step for step, (_, acked) in self._leased.items() if rank.number not in acked)
            after = min(unacknowledged, default=self.last_step + 1) - 1
            self._transport.send(peer, Welcome(PROTOCOL, self._run, self._world_size, after, self.version))

    def _handle(self, rank: Rank, message: ToServer) -> None:
        match message:
            case Next():
                self._next(rank, message)
            case Get():
                self._serve_step(rank, message.id, message.step)
            case Ack():
                self._ack(rank, message)
            case Publish():
                note = self.publish(message.version, message.path, source=f"rank {rank.number}")
                if message.step:
                    self._on_trained(message.step)
                self._reply_when_durable(rank, Ok(message.id, note))
            case Done():
                if not self.done:
                    self.done = True
                    log.info("trainer.done", rank=rank.number)
                    self._on_done()
                self._reply_when_durable(rank, Ok(message.id))
            case Ping():
                self._transport.send(rank.peer, Pong())
            case Leave():
                self._ranks.leave(rank)
                self.on_told()

    def _next(self, rank: Rank, message: Next) -> None:
        if message.after < self.last_step:
            self._serve_step(rank, message.id, message.after + 1)
        elif message.after > self.last_step:
            reason = (
                f"rank {rank.number} asks for step {message.after + 1}, but the run's last batch is step {self.last_step}; "
                "does the trainer's checkpoint belong to another run?"
            )
            self._transport.send(rank.peer, Missing(message.id, reason))
        elif self.finished is not None:
            self._tell_finished(rank, message.id)
        else:
            rank.waiting = message.id

    def _serve_step(self, rank: Rank, request_id: int, step: int) -> None:
        lease = self._leased.get(step)
        batch = lease[0] if lease else self._kept.get(step)
        if batch is not None or (self._can_load and 0 < step <= self.last_step):
            self._transport.serve(rank.peer, request_id, step, rank.number, batch)
        else:
            self._transport.send(rank.peer, Missing(request_id, self.explain_missing(step)))

    def explain_missing(self, step: int) -> str:
        """Why a step cannot be served."""
        if step > self.last_step or step < 1:
            return f"there is no batch of step {step}; the last one is step {self.last_step}"
        available = sorted([*self._kept, *self._leased])
        kept = f"steps {available[0]} to {available[-1]} are" if available else "none is"
        return (
            f"the batch of step {step} is no longer kept ({kept}); raise trainer.keep_batches, or resume the trainer from a "
            "later checkpoint"
        )

    def _ack(self, rank: Rank, message: Ack) -> None:
        step, note = message.step, ""
        if step > self.last_step or step < 1:
            self._transport.send(rank.peer, Missing(message.id, self.explain_missing(step)))
            return
        lease = self._leased.get(step)
        if lease is None or rank.number in lease[1]:
            note = f"step {step} was acknowledged before"
        else:
            lease[1].add(rank.number)
            self._acknowledged[rank.number] = max(step, self._acknowledged.get(rank.number, 0))
            self._on_rank_ack(step, rank.number)
            if len(lease[1]) >= self._world_size:
                self._complete(step)
        self._reply_when_durable(rank, Ok(message.id, note))

    def _complete(self, step: int) -> None:
        batch, _ = self._leased.pop(step)
        self._kept[step] = batch
        self._trim()
        self._on_ack(step)

    def _trim(self) -> None:
        while len(self._kept) > self._keep:
            self._kept.popitem(last=False)

    def _tell_finished(self, rank: Rank, request_id: int) -> None:
        assert self.finished is not None
        rank.waiting, rank.told = None, True
        self._transport.send(rank.peer, Finished(request_id, self.finished))
        self.on_told()

    def _reply_when_durable(self, rank: Rank, message: Ok) -> None:
        self._when_durable(lambda: self._transport.send(rank.peer, message))
