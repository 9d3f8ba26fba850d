"""Serves batches to the trainer's ranks, over ZMQ or a shared directory.

A thin shell around `Leases`: it owns the link and one thread in which batches are read back and turned into
frames, because both take longer than the event loop should be held. A batch is read and cut once for all ranks. The
last share of each rank stays encoded until the rank has acknowledged it. A batch that cannot be read or encoded is an answer to the rank, with the reason,
and a line in the log.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol, Self

import structlog

from envs.curve import ServerKeys
from orchestrator.groups.group import Batch
from orchestrator.trainer.filesystem import SCHEME
from orchestrator.trainer.protocol import Missing, Served, ToTrainer, encode
from orchestrator.trainer_link.encoding import CutBatch
from orchestrator.trainer_link.files import FileLink
from orchestrator.trainer_link.leases import Leases, RankStatus
from orchestrator.trainer_link.publications import CheckVersion, OnPublish, Updates, WaitLoaded
from orchestrator.trainer_link.ranks import Rank
from orchestrator.trainer_link.socket import BatchSocket

log = structlog.get_logger("trainer")

Frames = list[bytes | memoryview]

PROBE_S = 5.0
"""How often ranks are probed: one whose connection is gone is noticed in this time."""

_MAX_ASKED = 8
"""Requests for batches of one rank that may wait for the encoder; a client has at most two."""

_MAX_CUT = 2
"""Batches that are kept as they were cut: that of the ranks that are behind, and that of those that are ahead."""


class Link(Protocol):
    """A way to the ranks. It is open from its making to `aclose`, and delivers messages from `start` on."""

    address: str

    def start(
        self,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[bytes, list[Any]], None],
        *,
        peers: Callable[[], Iterable[bytes]],
        on_lost: Callable[[bytes], None],
    ) -> None: ...
    def send(self, peer: bytes, frames: Frames) -> None: ...
    async def aclose(self) -> None: ...


def open_link(bind: str, *, keys: ServerKeys | None, probe_s: float) -> Link:
    """Listen at a ZMQ address or `file:///directory`; TrainerLinkError if that cannot be.

    With `keys` (CURVE) only trainers that they name are let in.
    """
    if bind.startswith(SCHEME):
        return FileLink(bind, on_error=lambda error: log.warning("trainer.files_failed", error=error))
    return BatchSocket(bind, probe_s=probe_s, keys=keys)


class BatchServer:
    """The trainer link of the service, as an async context manager."""

    def __init__(
        self,
        *,
        link: Link,
        world_size: int,
        run: str,
        rewound: Sequence[int],
        keep: int,
        last_step: int,
        newest_version: Callable[[], int],
        load: Callable[[int], Batch | None] | None,
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
        find_obstacle: Callable[[int], str] | None,
        on_rewind: Callable[[int], None],
        when_durable: Callable[[Callable[[], None]], None],
        token: str | None,
    ) -> None:
        """Serve `world_size` ranks over `link`, which is closed with this; `rewound` are the steps that the run was set back to.

        `keep` acknowledged batches stay in memory; `load` reads others back (in a thread). `last_step`
        is where a resumed run stands, `newest_version` asks for the newest published version, -1 while version 0 itself
        may be published. `check_version(version, path, decided)` calls `decided` once, with the reason why
        a newer version cannot be loaded, or ""; `wait_loaded(version, seconds, then)` calls `then` when the engines have a
        published version, or will not; `updates` are versions that the trainer sends itself. `on_rank_ack(step, rank)` and `on_publish` record, and a rank is
        answered when `when_durable` calls back, so that what it was told holds after a crash; `on_ack(step)` says that
        every rank has acknowledged, `on_trained(step)` that a published version comes from training on a step.
        `on_report` takes the trainer's own numbers of a step, and returns why they are refused, if they are; `on_checkpoint`
        records that the trainer can go on from behind a step. `find_obstacle(step)` says (in a thread) why the run cannot be set
        back to a step, if it cannot, and `on_rewind` sets it back; None where trainers may not ask for it.

        With `token` only trainers that present it are let in. Restore recovered batches before entering the context.
        """
        self._world_size = world_size
        self._load = load
        self._check_version = check_version
        self._on_rank_ack = on_rank_ack
        self._find_obstacle = find_obstacle
        self._on_rewind = on_rewind
        self._told = asyncio.Event()
        self._link = link
        self._leases = Leases(
            self,
            world_size=world_size,
            run=run,
            rewound=rewound,
            token=token,
            keep=keep,
            last_step=last_step,
            newest_version=newest_version,
            can_load=load is not None,
            check_version=self._check,
            wait_loaded=wait_loaded,
            updates=updates,
            on_ack=on_ack,
            on_rank_ack=self._rank_acked,
            on_publish=on_publish,
            on_trained=on_trained,
            on_report=on_report,
            on_checkpoint=on_checkpoint,
            on_done=on_done,
            begin_rewind=None if find_obstacle is None else self._begin_rewind,
            on_told=self._told.set,
            when_durable=when_durable,
        )
        self._encoded: dict[int, tuple[tuple[int, int], Frames]] = {}
        self._cut: OrderedDict[int, CutBatch] = OrderedDict()
        self._encoding: dict[asyncio.Future[Frames | None], int] = {}
        self._closed = False

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._link.start(
            self._loop, self._leases.receive, peers=lambda: self._leases.peers, on_lost=self._lost
        )
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
        return self._leases.leased

    @property
    def ranks(self) -> list[RankStatus]:
        """The ranks that are connected."""
        return self._leases.ranks

    def offer(self, batch: Batch) -> None:
        """Lease a batch that is durable; steps come in order."""
        self._leases.offer(batch)

    def restore(self, batch: Batch, acked_by: Collection[int]) -> None:
        """Lease a batch of an earlier process again; ranks of `acked_by` need it no more."""
        self._leases.restore(batch, acked_by)

    def keep(self, batch: Batch) -> None:
        """Put back a batch that every rank had acknowledged before a restart."""
        self._leases.keep(batch)

    def finish(self, reason: str) -> None:
        """There will be no further batch: iteration ends for each rank after the last one."""
        self._leases.finish(reason)

    def publish(self, version: int, path: str | None) -> None:
        """A version appeared in the directory that is watched."""
        self._leases.publish(version, path)

    async def wait_told(self, timeout_s: float) -> bool:
        """After `finish`: wait until every connected rank knows; False when some do not in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._leases.all_told:
                    self._told.clear()
                    await self._told.wait()
        except TimeoutError:
            return False
        return True

    def send(self, peer: bytes, message: ToTrainer) -> None:
        """Called by `Leases`."""
        if not self._closed:
            self._link.send(peer, [encode(message)])

    def serve(self, rank: Rank, request_id: int, step: int, batch: Batch | None) -> None:
        """Called by `Leases`: encode in the thread, then send."""
        if self._closed:
            return
        number, peer = rank.number, rank.peer
        encoded = self._encoded.get(number)
        if encoded is not None and encoded[0] == (step, rank.protocol):
            self._link.send(peer, [encode(Served(request_id, step)), *encoded[1]])
            return
        if sum(asker == number for asker in self._encoding.values()) >= _MAX_ASKED:
            reason = (
                f"rank {number} has asked for {_MAX_ASKED} batches that it has not got yet; ask again later"
            )
            self.send(peer, Missing(request_id, reason))
            return
        future = self._loop.run_in_executor(self._threads, self._encode, step, rank, batch)
        self._encoding[future] = number
        future.add_done_callback(lambda done: self._send_encoded(done, rank, request_id, step))

    def _encode(self, step: int, rank: Rank, batch: Batch | None) -> Frames | None:
        """In the thread, which has `_cut` to itself. A step has the same content as long as this server lives."""
        cut = self._cut.get(step)
        if cut is None:
            if batch is None:
                batch = self._load(step) if self._load else None
            if batch is None:
                return None
            cut = self._cut[step] = CutBatch(batch, self._world_size)
            while len(self._cut) > _MAX_CUT:
                self._cut.popitem(last=False)
        return cut.frames(rank.number, rank.protocol)

    def _send_encoded(
        self, future: "asyncio.Future[Frames | None]", rank: Rank, request_id: int, step: int
    ) -> None:
        del self._encoding[future]
        if self._closed or future.cancelled():
            return
        number, peer = rank.number, rank.peer
        try:
            frames = future.result()
        except Exception as error:
            # Whatever it was, the rank waits for an answer, and somebody must be able to find out.
            log.exception("trainer.batch_failed", step=step, rank=number)
            reason = (
                f"the batch of step {step} cannot be served to rank {number} of {self._world_size}: {error}"
            )
            self.send(peer, Missing(request_id, reason))
            return
        if frames is None:
            self._leases.miss(rank, request_id, step)
            return
        self._encoded[number] = ((step, rank.protocol), frames)
        self._link.send(peer, [encode(Served(request_id, step)), *frames])

    def _begin_rewind(self, step: int, decide: Callable[[str], bool]) -> None:
        """Look in the thread whether it can be done, so that nothing is stopped in vain."""
        assert self._find_obstacle is not None

        def looked(future: "asyncio.Future[str]") -> None:
            if self._closed or future.cancelled():
                return
            try:
                obstacle = future.result()
            except Exception as error:
                # Whatever it was, the ranks wait for an answer, and somebody must be able to find out.
                log.exception("trainer.rewind_failed", to_step=step)
                obstacle = f"the run cannot be set back to step {step}: {error}"
            if decide(obstacle):
                self._on_rewind(step)

        self._loop.run_in_executor(self._threads, self._find_obstacle, step).add_done_callback(looked)

    def _check(self, version: int, path: str | None, decided: Callable[[str], None]) -> None:
        def while_open(reason: str) -> None:
            # After the end there is nobody to tell and nothing to record it in.
            if not self._closed:
                decided(reason)

        self._check_version(version, path, while_open)

    def _rank_acked(self, step: int, rank: int) -> None:
        if rank in self._encoded and self._encoded[rank][0][0] <= step:
            del self._encoded[rank]
        self._on_rank_ack(step, rank)

    def _lost(self, peer: bytes) -> None:
        self._leases.lose(peer)
