"""Who gets which batch: what ranks ask for and are told, without any I/O.

Invariants: a batch is leased from `offer` until every rank has acknowledged it (`held`); a rank is served in step order and gets the same batch whenever it asks for the same step; a rank has one
connection, the newest; an answer to an acknowledgement or a publication is given only after it is recorded. A
transport feeds it messages with `receive`, which raises for nothing that a peer sends, and carries out what it says
through `send` and `serve`. Recovered batches are restored before the first message comes in, so that a step which a
trainer has seen is never unknown.

A rank that stays away holds its leases, however long. They do not grow without bound, because dispatch forms a
bounded number of batches ahead of what was trained on; nothing else is kept for a rank that is not connected.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from orchestrator.groups.group import Batch
from orchestrator.trainer.protocol import (
    PROTOCOL,
    Ack,
    Checkpointed,
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
    Report,
    ToServer,
    ToTrainer,
    Unknown,
    Updated,
    Updating,
    Welcome,
    decode_to_server,
)
from orchestrator.trainer_link.announcements import Announcements
from orchestrator.trainer_link.given_up import explain_unserved
from orchestrator.trainer_link.held import Acknowledged, HeldBatches
from orchestrator.trainer_link.publications import CheckVersion, OnPublish, Publications, Updates, WaitLoaded
from orchestrator.trainer_link.ranks import Rank, Ranks
from orchestrator.trainer_link.rewinds import Begin, Rewinds
from orchestrator.trainer_link.thinning import Thinned

log = structlog.get_logger("trainer")


class Transport(Protocol):
    """What `Leases` needs done."""

    def send(self, peer: bytes, message: ToTrainer) -> None:
        """Send a message, or drop it when the peer is gone."""

    def serve(self, rank: Rank, request_id: int, step: int, batch: Batch | None) -> None:
        """Send a batch's frames for a rank; None is a batch that must be loaded first."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """How a rank is doing, for people."""

    rank: int
    host: str
    pid: int
    waiting: bool
    last_acknowledged: int


class Leases:
    """Hands out batches over some transport."""

    def __init__(
        self,
        transport: Transport,
        *,
        world_size: int,
        run: str,
        rewound: Sequence[int],
        token: str | None,
        keep: int,
        last_step: int,
        newest_version: Callable[[], int],
        can_load: bool,
        check_version: CheckVersion,
        wait_loaded: WaitLoaded,
        updates: Updates,
        on_ack: Callable[[int], None],
        on_rank_ack: Callable[[int, int], None],
        on_publish: OnPublish,
        on_trained: Callable[[int], None],
        on_report: Callable[[int, Mapping[str, float]], str],
        on_checkpoint: Callable[[int], None],
        on_done: Callable[[], None],
        begin_rewind: Begin | None,
        on_told: Callable[[], None],
        when_durable: Callable[[Callable[[], None]], None],
    ) -> None:
        self._transport = transport
        self._world_size = world_size
        self._run = run
        self._rewound = rewound
        self._can_load = can_load
        self._held = HeldBatches(world_size=world_size, keep=keep, last_step=last_step)
        self.explain_missing = self._held.explain_missing
        self._done = False
        self._finished: str | None = None
        self._on_ack = on_ack
        self._on_rank_ack = on_rank_ack
        self._on_report = on_report
        self._on_checkpoint = on_checkpoint
        self._on_done = on_done
        self._on_told = on_told
        self._when_durable = when_durable
        self._updates = updates
        self._ranks = Ranks(
            world_size=world_size,
            token=token,
            rewound=rewound,
            send=transport.send,
            on_gone=self._gone,
        )
        self._rewinds = (
            None
            if begin_rewind is None
            else Rewinds(world_size=world_size, send=transport.send, begin=begin_rewind)
        )
        self._newest_version = newest_version
        self._publications = Publications(newest=newest_version, check=check_version, on_publish=on_publish)
        self._announcements = Announcements(
            self._publications,
            send=transport.send,
            updates=updates,
            wait_loaded=wait_loaded,
            on_trained=on_trained,
            when_durable=when_durable,
        )
        self._acknowledged: dict[int, int] = {}
        self._malformed = Thinned()

    @property
    def leased(self) -> list[int]:
        """Steps that not every rank has acknowledged."""
        return self._held.leased

    @property
    def last_step(self) -> int:
        """The newest batch that there was."""
        return self._held.last_step

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
    def peers(self) -> list[bytes]:
        """The connections of the ranks."""
        return [rank.peer for rank in self._ranks]

    @property
    def malformed(self) -> int:
        """Messages that could not be understood."""
        return self._malformed.count

    @property
    def all_told(self) -> bool:
        """Whether every connected rank knows that the run is over."""
        return all(rank.told for rank in self._ranks)

    def offer(self, batch: Batch) -> None:
        """Lease a durable batch; steps come in order."""
        self._held.offer(batch)
        for rank in self._ranks:
            if rank.waiting is not None:
                request, rank.waiting = rank.waiting, None
                self._serve_step(rank, request, batch.step)

    def restore(self, batch: Batch, acked_by: Collection[int]) -> None:
        """Lease a batch of an earlier process again; any rank may have it, and those of `acked_by` need it no more."""
        if self._held.restore(batch, acked_by):
            self._complete(batch.step)

    def keep(self, batch: Batch) -> None:
        """Put back a batch that every rank had acknowledged before a restart."""
        self._held.keep(batch)

    def finish(self, reason: str) -> None:
        """There will be no further batch; ranks are told when they have had the last one."""
        if self._finished is None:
            self._finished = reason
            for rank in self._ranks:
                if rank.waiting is not None:
                    self._tell_finished(rank, rank.waiting)
                else:
                    self._transport.send(rank.peer, self._pong())

    def receive(self, peer: bytes, frames: list[Any]) -> None:
        """Take a message in."""
        try:
            if len(frames) != 1:
                raise ProtocolError(f"a message has one frame, got {len(frames)}")
            message = decode_to_server(frames[0])
        except ProtocolError as error:
            if self._malformed.is_worth_a_line():
                log.warning("trainer.message_malformed", error=str(error), count=self._malformed.count)
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
        self._on_told()

    def publish(self, version: int, path: str | None) -> None:
        """A version appeared in the directory that is watched."""
        self._publications.publish(version, path, step=0, source="directory", then=lambda decision: None)

    def _gone(self, rank: Rank) -> None:
        """What a rank asked for that nobody waits for any more."""
        self._updates.gone(rank.client)
        if self._rewinds is not None:
            self._rewinds.lose(rank.number)

    def _join(self, peer: bytes, join: Join) -> None:
        rank = self._ranks.join(peer, join)
        if rank is not None:
            after = self._held.done_by(rank.number)
            version = max(0, self._newest_version())
            about = Welcome(
                join.protocol, self._run, self._world_size, after, version, rewinds=len(self._rewound)
            )
            self._transport.send(peer, about)

    def _handle(self, rank: Rank, message: ToServer) -> None:
        unserved = explain_unserved(self._held, self._rewound, rank.number, message)
        if unserved is not None:
            self._transport.send(rank.peer, unserved)
            return
        match message:
            case Next():
                self._next(rank, message)
            case Get():
                self._serve_step(rank, message.id, message.step)
            case Ack():
                self._ack(rank, message)
            case Publish():
                self._announcements.publish(rank, message)
            case Updating():
                self._announcements.updating(rank, message)
            case Updated():
                self._announcements.updated(rank, message)
            case Report():
                self._report(rank, message)
            case Checkpointed():
                self._checkpointed(rank, message)
            case Done():
                if not self._done:
                    self._done = True
                    log.info("trainer.done", rank=rank.number)
                    self._on_done()
                self._reply_when_durable(rank, Ok(message.id))
            case Ping():
                self._transport.send(rank.peer, self._pong())
            case Leave():
                self._ranks.leave(rank)
                self._on_told()

    def _next(self, rank: Rank, message: Next) -> None:
        rank.rewinding = message.id if message.rewind else None
        if self._rewinds is not None and not message.rewind:
            self._rewinds.went_on(rank.number, message.after)
        if message.after < self.last_step:
            self._serve_step(rank, message.id, message.after + 1)
        elif message.after > self.last_step:
            reason = (
                f"rank {rank.number} asks for step {message.after + 1}, but the run's last batch is step {self.last_step}; "
                "does the trainer's checkpoint belong to another run, or was the run set back?"
            )
            self._transport.send(rank.peer, Missing(message.id, reason))
        elif self._finished is not None:
            self._tell_finished(rank, message.id)
        else:
            rank.waiting = message.id

    def _serve_step(self, rank: Rank, request_id: int, step: int) -> None:
        batch = self._held.serve(step, rank.number)
        if batch is not None or (self._can_load and 0 < step <= self.last_step):
            self._transport.serve(rank, request_id, step, batch)
        else:
            self.miss(rank, request_id, step)

    def miss(self, rank: Rank, request_id: int, step: int) -> None:
        """A batch that a rank asked for is not there: the run is set back for it, or it is told why not."""
        if self._rewinds is not None and rank.rewinding == request_id and 1 < step <= self.last_step:
            self._rewinds.ask(rank, request_id, step - 1)
        else:
            self._transport.send(rank.peer, Missing(request_id, self.explain_missing(step)))

    def _ack(self, rank: Rank, message: Ack) -> None:
        step, note = message.step, ""
        if step > self.last_step or step < 1:
            self._transport.send(rank.peer, Missing(message.id, self.explain_missing(step)))
            return
        acknowledged = self._held.acknowledge(step, rank.number)
        if acknowledged is Acknowledged.NEVER_SERVED:
            reason = (
                f"rank {rank.number} acknowledges step {step}, which it was never served; "
                "does the trainer's checkpoint belong to another run?"
            )
            self._transport.send(rank.peer, Missing(message.id, reason))
            return
        if acknowledged is Acknowledged.BEFORE:
            note = f"step {step} was acknowledged before"
        else:
            self._acknowledged[rank.number] = max(step, self._acknowledged.get(rank.number, 0))
            self._on_rank_ack(step, rank.number)
            if acknowledged is Acknowledged.LAST:
                self._complete(step)
        self._reply_when_durable(rank, Ok(message.id, note))

    def _report(self, rank: Rank, message: Report) -> None:
        problem = (
            self.explain_missing(message.step)
            if message.step > self.last_step
            else self._on_report(message.step, message.metrics)
        )
        self._transport.send(rank.peer, Missing(message.id, problem) if problem else Ok(message.id))

    def _checkpointed(self, rank: Rank, message: Checkpointed) -> None:
        if message.step > self.last_step:
            self._transport.send(rank.peer, Missing(message.id, self.explain_missing(message.step)))
            return
        self._on_checkpoint(message.step)
        self._reply_when_durable(rank, Ok(message.id))

    def _complete(self, step: int) -> None:
        self._held.complete(step)
        self._on_ack(step)

    def _pong(self) -> Pong:
        return Pong(self._updates.waiting, self._finished or "")

    def _tell_finished(self, rank: Rank, request_id: int) -> None:
        assert self._finished is not None
        rank.waiting, rank.told = None, True
        self._transport.send(rank.peer, Finished(request_id, self._finished))
        self._on_told()

    def _reply_when_durable(self, rank: Rank, message: Ok) -> None:
        self._when_durable(lambda: self._transport.send(rank.peer, message))
