"""Serves batches to the trainer's ranks, over ZMQ or a shared directory.

A thin shell around `Leases`: it owns the link and one thread in which batches are read back and turned into
frames, because both take longer than the event loop should be held. The last batch of each rank stays encoded
until the rank has acknowledged it.
"""

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol, Self

import structlog

from envs.curve import ServerKeys
from orchestrator.errors import JournalError
from orchestrator.groups.group import Batch
from orchestrator.trainer.filesystem import SCHEME
from orchestrator.trainer.protocol import Missing, Served, ToTrainer, encode
from orchestrator.trainer_link.encoding import encode_batch
from orchestrator.trainer_link.files import FileLink
from orchestrator.trainer_link.leases import Leases, RankStatus, at_once, ignore
from orchestrator.trainer_link.socket import BatchSocket

log = structlog.get_logger("trainer")

Frames = list[bytes | memoryview]


class _Link(Protocol):
    """A way to the ranks."""

    address: str

    def start(
        self, loop: asyncio.AbstractEventLoop, on_message: Callable[[bytes, list[Any]], None]
    ) -> None: ...
    def send(self, peer: bytes, frames: Frames) -> None: ...
    async def aclose(self) -> None: ...


class BatchServer:
    """The trainer link of the service, as an async context manager."""

    def __init__(
        self,
        *,
        bind: str,
        world_size: int,
        run: str = "",
        keep: int = 1,
        last_step: int = 0,
        version: int = 0,
        load: Callable[[int], Batch | None] | None = None,
        on_ack: Callable[[int], None] = ignore,
        on_rank_ack: Callable[[int, int], None] = ignore,
        on_publish: Callable[[int, str | None], None] = ignore,
        on_trained: Callable[[int], None] = ignore,
        on_done: Callable[[], None] = ignore,
        when_durable: Callable[[Callable[[], None]], None] = at_once,
        keys: ServerKeys | None = None,
        probe_s: float = 5.0,
    ) -> None:
        """Serve `world_size` ranks at `bind`, a ZMQ address or `file:///directory`.

        `keep` acknowledged batches stay in memory; `load` reads others back (in a thread). `last_step` and `version`
        are where a resumed run stands. `on_rank_ack(step, rank)` and `on_publish` record, and a rank is answered when
        `when_durable` calls back, so that what it was told holds after a crash; `on_ack(step)` says that every
        rank has acknowledged, `on_trained(step)` that a published version comes from training on a step. With `keys` (CURVE) only trainers that they name are let in. Offer recovered batches
        before entering the context.
        """
        self._world_size = world_size
        self._load = load
        self._on_rank_ack = on_rank_ack
        self._link: _Link
        if bind.startswith(SCHEME):
            self._link = FileLink(
                bind, on_error=lambda error: log.warning("trainer.files_failed", error=error)
            )
        else:
            self._link = BatchSocket(bind, on_lost=self._lost, probe_s=probe_s, keys=keys)
        self._desk = Leases(
            self,
            world_size=world_size,
            run=run,
            keep=keep,
            last_step=last_step,
            version=version,
            can_load=load is not None,
            on_ack=on_ack,
            on_rank_ack=self._rank_acked,
            on_publish=on_publish,
            on_trained=on_trained,
            on_done=on_done,
            when_durable=when_durable,
        )
        self._encoded: dict[int, tuple[int, Frames]] = {}
        self._encoding: set[asyncio.Future[Any]] = set()
        self._told = asyncio.Event()
        self._closed = False

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._desk.on_told = self._told.set
        self._link.start(self._loop, self._desk.receive)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="batch-encoder")
        log.info("trainer.listening", address=self.address, world_size=self._world_size)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._closed = True
        # A batch takes milliseconds to encode, so this wait is short; its frames are then dropped.
        if self._encoding:
            await asyncio.wait(self._encoding)
        self._threads.shutdown()
        await self._link.aclose()

    @property
    def address(self) -> str:
        """Where trainers connect to."""
        return self._link.address

    @property
    def leased(self) -> list[int]:
        """Steps that not every rank has acknowledged."""
        return self._desk.leased

    @property
    def last_step(self) -> int:
        """The newest step that was offered."""
        return self._desk.last_step

    @property
    def ranks(self) -> list[RankStatus]:
        """The ranks that are connected."""
        return self._desk.ranks

    @property
    def version(self) -> int:
        """The newest version that was published."""
        return self._desk.version

    def offer(self, batch: Batch, acked_by: Collection[int] = ()) -> None:
        """Lease a batch that is durable; steps come in order. `acked_by` are ranks that need it no more."""
        self._desk.offer(batch, acked_by)

    def keep(self, batch: Batch) -> None:
        """Put back a batch that every rank had acknowledged before a restart."""
        self._desk.keep(batch)

    def finish(self, reason: str) -> None:
        """There will be no further batch: iteration ends for each rank after the last one."""
        self._desk.finish(reason)

    def publish(self, version: int, path: str | None) -> str:
        """A version came by another way than the link; returns what is odd about it, if anything is."""
        return self._desk.publish(version, path, source="directory")

    async def wait_told(self, timeout_s: float) -> bool:
        """After `finish`: wait until every connected rank knows; False when some do not in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._desk.all_told:
                    self._told.clear()
                    await self._told.wait()
        except TimeoutError:
            return False
        return True

    def send(self, peer: bytes, message: ToTrainer) -> None:
        """Called by the desk."""
        if not self._closed:
            self._link.send(peer, [encode(message)])

    def serve(self, peer: bytes, request_id: int, step: int, rank: int, batch: Batch | None) -> None:
        """Called by the desk: encode in the thread, then send."""
        encoded = self._encoded.get(rank)
        if encoded is not None and encoded[0] == step:
            self._link.send(peer, [encode(Served(request_id, step)), *encoded[1]])
            return
        future = self._loop.run_in_executor(self._threads, self._encode, step, rank, batch)
        self._encoding.add(future)
        future.add_done_callback(lambda done: self._send_encoded(done, peer, request_id, step, rank))

    def _encode(self, step: int, rank: int, batch: Batch | None) -> Frames | None:
        if batch is None:
            batch = self._load(step) if self._load else None
        return None if batch is None else encode_batch(batch, rank, self._world_size)

    def _send_encoded(
        self, future: "asyncio.Future[Frames | None]", peer: bytes, request_id: int, step: int, rank: int
    ) -> None:
        self._encoding.discard(future)
        if self._closed or future.cancelled():
            return
        try:
            frames = future.result()
        except JournalError as error:
            log.warning("trainer.batch_unreadable", step=step, error=str(error))
            frames = None
        if frames is None:
            self.send(peer, Missing(request_id, self._desk.explain_missing(step)))
            return
        self._encoded[rank] = (step, frames)
        self._link.send(peer, [encode(Served(request_id, step)), *frames])

    def _rank_acked(self, step: int, rank: int) -> None:
        if rank in self._encoded and self._encoded[rank][0] <= step:
            del self._encoded[rank]
        self._on_rank_ack(step, rank)

    def _lost(self, peer: bytes) -> None:
        self._desk.lose(peer)
