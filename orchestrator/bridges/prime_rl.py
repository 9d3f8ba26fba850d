"""Feeds prime-rl's trainer, and follows the weights that it broadcasts.

Batches go over its file transport, to `rollouts/step_N/rank_R.bin` below its output directory, each file whole or not at all; its
trainer reads them by number, so writing one again changes nothing. Or they are published over its ZMQ transport (`prime_rl_zmq`).
Batch N is acknowledged, and version N published, when `broadcasts/step_N/STABLE` is there, over either. A trainer that was set
back to an older step has fewer broadcasts than the orchestrator has acknowledgements, because its launcher deletes the others; it
is fed from there, as long as the orchestrator keeps those batches. Weights of a batch that it was never given (`Given`) are another run's.

Written from what its trainer reads at commit 559b447. A shared disk tells nobody of a new file, so this looks again every `poll_s`.
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import structlog

from orchestrator.bridges.intake import Intake
from orchestrator.bridges.prime_rl_format import encode_shares, share_out
from orchestrator.bridges.prime_rl_zmq import Publisher, write_note
from orchestrator.errors import ConfigError
from orchestrator.trainer import AsyncTrainerClient, TrainingBatch

log = structlog.get_logger("bridge")

T = TypeVar("T")

POLL_S = 1.0
NOTE = "orchestrator_bridge.json"
"""What was sent over ZMQ, in the output directory."""
GIVEN_NOTE = "orchestrator_given.json"
"""What was given over either transport, there too."""
_STEP = re.compile(r"^step_(\d+)$")


class Given(msgspec.Struct, frozen=True):
    """What is on disk: of which run, how often that was set back before, and the last step that the trainer may have been given."""

    run: str
    rewinds: int
    step: int


class Exchange:
    """The output directory that the trainer and this bridge share; its files, where batches go through files."""

    def __init__(self, directory: Path, *, ranks: int, max_tokens: int) -> None:
        self._rollouts = directory / "rollouts"
        # Engines have another working directory than this process.
        self._broadcasts = directory.absolute() / "broadcasts"
        self.note = directory / NOTE
        self._given_note = directory / GIVEN_NOTE
        self.ranks = ranks
        self._max_tokens = max_tokens

    def write(self, batch: TrainingBatch) -> None:
        """A file for every rank, the same however often it is written; blocks."""
        folder = self._rollouts / f"step_{batch.step}"
        folder.mkdir(parents=True, exist_ok=True)
        for rank, share in enumerate(self.share_out(batch)):
            part = folder / f"rank_{rank}.bin.tmp"
            part.write_bytes(share)
            part.replace(folder / f"rank_{rank}.bin")

    def share_out(self, batch: TrainingBatch) -> list[bytes]:
        """What each rank is given; takes long for a large batch."""
        return encode_shares(share_out(batch.sequences, self.ranks, self._max_tokens))

    def has(self, step: int) -> bool:
        """Whether the files of a batch are there; blocks. Its trainer's launcher deletes them when it goes back."""
        folder = self._rollouts / f"step_{step}"
        return all((folder / f"rank_{rank}.bin").exists() for rank in range(self.ranks))

    def last_given(self, run: str, rewinds: int) -> int:
        """The last step of this run, as it is since it was set back, that the trainer may have been given; blocks."""
        try:
            given = msgspec.json.decode(self._given_note.read_bytes(), type=Given)
        except (FileNotFoundError, msgspec.MsgspecError):
            return 0
        return given.step if (given.run, given.rewinds) == (run, rewinds) else 0

    def note_given(self, run: str, rewinds: int, step: int) -> None:
        """The trainer is about to be given a step, maybe for a second time; blocks."""
        if step > self.last_given(run, rewinds):
            write_note(self._given_note, Given(run, rewinds, step))

    def newest_weights(self) -> tuple[int, Path] | None:
        """The last step whose weights are whole, and where they are; blocks."""
        try:
            found = [
                (int(match[1]), path)
                for path in self._broadcasts.iterdir()
                if (match := _STEP.match(path.name)) and (path / "STABLE").exists()
            ]
        except FileNotFoundError:
            return None
        return max(found, default=None)


class Delivery(Protocol):
    """How batches reach the trainer's ranks."""

    async def give(self, batch: TrainingBatch) -> None:
        """Hand a batch over, or make it ready to be."""

    async def look(self, trained: int, given: Sequence[TrainingBatch]) -> None:
        """The trainer is done with a step, and has or needs those that were given since: see that it gets them."""

    def set_back(self) -> None:
        """The trainer was set back to an earlier step; batches are given again."""


class Files:
    """Batches as files, which the trainer finds by their number."""

    def __init__(self, exchange: Exchange, *, poll_s: float) -> None:
        self._exchange = exchange
        self._poll_s = poll_s

    async def give(self, batch: TrainingBatch) -> None:
        # The trainer's launcher may delete the folder meanwhile, and a shared disk comes and goes.
        await _until_it_can(partial(self._exchange.write, batch), self._poll_s)
        log.info("bridge.handed_over", step=batch.step, sequences=len(batch))

    async def look(self, trained: int, given: Sequence[TrainingBatch]) -> None:
        for batch in list(given):
            if not await _until_it_can(partial(self._exchange.has, batch.step), self._poll_s):
                # The trainer's launcher has deleted it, because the trainer goes on from a checkpoint.
                await self.give(batch)

    def set_back(self) -> None:
        pass


class Messages:
    """Batches as messages, which the trainer counts."""

    def __init__(self, exchange: Exchange, publisher: Publisher) -> None:
        self._exchange = exchange
        self._publisher = publisher

    async def give(self, batch: TrainingBatch) -> None:
        self._publisher.hold(batch.step, await asyncio.to_thread(self._exchange.share_out, batch))

    async def look(self, trained: int, given: Sequence[TrainingBatch]) -> None:
        self._publisher.look(trained)

    def set_back(self) -> None:
        self._publisher.forget()


async def run_bridge(
    trainer: AsyncTrainerClient,
    exchange: Exchange,
    *,
    listen: tuple[str, int] | None = None,
    rewind: bool = False,
    poll_s: float = POLL_S,
) -> None:
    """Give and follow until the run is over and its last batch is done with; `listen` is where batches are published, if they are.

    With `rewind`, the run is set back where the trainer goes back further than batches are kept, if that is allowed.
    """
    wake = asyncio.Event()
    async with trainer:
        if listen is None:
            await _Feed(
                trainer, exchange, Files(exchange, poll_s=poll_s), wake, rewind=rewind, poll_s=poll_s
            ).run()
            return
        publisher = Publisher(
            *listen, ranks=exchange.ranks, note=exchange.note, run=trainer.run, on_change=wake.set
        )
        try:
            await _Feed(
                trainer, exchange, Messages(exchange, publisher), wake, rewind=rewind, poll_s=poll_s
            ).run()
        finally:
            await publisher.aclose()


class _Feed:
    """Takes batches, gives them, and follows the trainer's broadcasts."""

    def __init__(
        self,
        trainer: AsyncTrainerClient,
        exchange: Exchange,
        delivery: Delivery,
        wake: asyncio.Event,
        *,
        rewind: bool,
        poll_s: float,
    ) -> None:
        self._trainer = trainer
        self._exchange = exchange
        self._delivery = delivery
        self._wake = wake
        self._poll_s = poll_s
        self._rewind = rewind
        self._intake = Intake(trainer, on_batch=self._take, on_end=lambda: None, rewind=rewind)
        self._given: list[TrainingBatch] = []
        self._done = 0
        self._set_back = 0

    async def run(self) -> None:
        await self._begin()
        self._done = self._trainer.after
        following = asyncio.create_task(self._follow())  # noqa: TID251  ended and awaited below
        running = asyncio.create_task(self._intake.run())  # noqa: TID251  same
        try:
            await asyncio.wait([following, running], return_when=asyncio.FIRST_COMPLETED)
            await (running if running.done() else following)
        finally:
            for task in (following, running):
                task.cancel()
            await asyncio.wait([following, running])

    async def _begin(self) -> None:
        """Find out where the trainer stands. A run that has steps behind it waits for its first broadcast to know."""
        trainer, said = self._trainer, False
        while (newest := await self._newest()) is None and trainer.after:
            if not said:
                said = True
                log.info("bridge.waiting", what="the trainer's first broadcast, which says where it stands")
            await asyncio.sleep(self._poll_s)
        if newest is None:
            return
        step, path = newest
        if step < trainer.after:
            log.warning("bridge.trainer_set_back", to_step=step, acknowledged=trainer.after)
            trainer.resume_after(step, rewind=self._rewind)
        elif step == trainer.after:
            await self._intake.publish(step, str(path))

    async def _take(self, batch: TrainingBatch) -> None:
        times = self._set_back
        newest = await self._newest()
        life = self._trainer.run, self._trainer.rewinds
        if newest is None or newest[0] < batch.step:
            # Noted first: weights that are there later may come of it.
            await _until_it_can(partial(self._exchange.note_given, *life, batch.step), self._poll_s)
            await self._delivery.give(batch)
        elif await _until_it_can(partial(self._exchange.last_given, *life), self._poll_s) < batch.step:
            step, path = newest
            raise ConfigError(
                f"{path} has weights of step {step}, and the trainer was never given batch {batch.step} of this run: they come of another "
                f"run, or of steps that were given up; delete what is beyond step {batch.step - 1} in {path.parent}, as the trainer's launcher does "
                "when it starts, or choose another --out"
            )
        if times == self._set_back:
            self._given.append(batch)
            self._wake.set()

    async def _follow(self) -> None:
        while True:
            self._wake.clear()
            newest = await self._newest()
            # A trainer that has started meanwhile may stand elsewhere than what was just read: it is read again first.
            if newest is not None and not self._wake.is_set():
                await self._look(*newest)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):
                    await self._wake.wait()

    async def _look(self, step: int, path: Path) -> None:
        if step < self._done:
            log.warning("bridge.trainer_set_back", to_step=step, acknowledged=self._done)
            self._set_back += 1
            self._given.clear()
            self._delivery.set_back()
            self._done = step
            self._intake.set_back(step)
        while self._given and self._given[0].step <= step:
            self._done = self._given.pop(0).step
            # Where several are done with, those of the last one count; older ones may be gone already.
            self._intake.done(self._done, publish=self._done == step, path=str(path))
        await self._delivery.look(step, self._given)

    async def _newest(self) -> tuple[int, Path] | None:
        return await _until_it_can(self._exchange.newest_weights, self._poll_s)


async def _until_it_can(look: Callable[[], T], poll_s: float) -> T:
    """What blocks and needs the shared disk, again and again while that cannot be used."""
    said = ""
    while True:
        try:
            return await asyncio.to_thread(look)
        except OSError as error:
            if str(error) != said:
                said = str(error)
                log.warning("bridge.directory_unusable", error=said)
        await asyncio.sleep(poll_s)
