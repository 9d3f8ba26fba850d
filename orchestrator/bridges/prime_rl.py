"""Feeds prime-rl's trainer over its file transport, and follows the weights that it broadcasts.

Batches go to `rollouts/step_N/rank_R.bin` below its output directory, each file whole or not at all; its trainer reads them by
number, so writing one again changes nothing. Batch N is acknowledged, and version N published, when `broadcasts/step_N/STABLE` is
there. So everything that a restarted bridge has to know is in that directory. A trainer that was set back to an older step has
fewer broadcasts than the orchestrator has acknowledgements; it is fed from there, as long as the orchestrator keeps those batches.

Written from what its trainer reads at commit 559b447. A shared disk tells nobody of a new file, so this looks again every `poll_s`.
"""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog

from orchestrator.bridges.intake import Intake
from orchestrator.trainer import AsyncTrainerClient, TrainingBatch, TrainingSequence, micro_batches

log = structlog.get_logger("bridge")

POLL_S = 1.0
_STEP = re.compile(r"^step_(\d+)$")
_RESERVED = "all"
"""A name that an env must not have there."""


class MicroBatch(msgspec.Struct, frozen=True, array_like=True):
    """Packed sequences; the order of the fields is the format, and positions are those of the tokens."""

    input_ids: list[int]
    loss_mask: list[bool]
    advantages: list[float]
    inference_logprobs: list[float]
    position_ids: list[int]
    sequence_lengths: list[int]
    temperatures: list[float]
    env_names: list[str]
    seq_lens: list[int]


class Exchange:
    """The output directory that the trainer and this bridge share."""

    def __init__(self, directory: Path, *, ranks: int, max_tokens: int) -> None:
        self._rollouts = directory / "rollouts"
        self._broadcasts = directory / "broadcasts"
        self._ranks = ranks
        self._max_tokens = max_tokens

    def write(self, batch: TrainingBatch) -> None:
        """A file for every rank, the same however often it is written; blocks."""
        folder = self._rollouts / f"step_{batch.step}"
        folder.mkdir(parents=True, exist_ok=True)
        for rank, share in enumerate(share_out(batch.sequences, self._ranks, self._max_tokens)):
            part = folder / f"rank_{rank}.bin.tmp"
            part.write_bytes(msgspec.msgpack.encode(share))
            part.replace(folder / f"rank_{rank}.bin")

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


def share_out(sequences: Sequence[TrainingSequence], ranks: int, max_tokens: int) -> list[list[MicroBatch]]:
    """As many micro-batches for every rank; where they do not go round, one comes again that trains nothing."""
    parts = micro_batches(sequences, max_tokens, at_least=min(ranks, len(sequences)))
    parts.sort(key=lambda part: -sum(map(len, part)))
    filled = [_pack(part) for part in parts]
    missing = -len(filled) % ranks
    if missing:
        shortest = filled[-1]
        nothing = msgspec.structs.replace(
            shortest,
            loss_mask=[False] * len(shortest.input_ids),
            advantages=[0.0] * len(shortest.input_ids),
        )
        filled += [nothing] * missing
    return [filled[rank::ranks] for rank in range(ranks)]


def _pack(part: Sequence[TrainingSequence]) -> MicroBatch:
    lengths = [len(sequence) for sequence in part]
    return MicroBatch(
        input_ids=[token for sequence in part for token in sequence.tokens.tolist()],
        loss_mask=[sampled for sequence in part for sampled in (sequence.mask != 0).tolist()],
        advantages=[value for sequence in part for value in sequence.advantages.tolist()],
        inference_logprobs=[value for sequence in part for value in sequence.logprobs.tolist()],
        position_ids=[place for length in lengths for place in range(length)],
        sequence_lengths=lengths,
        temperatures=[heat for sequence in part for heat in [_heat(sequence)] * len(sequence)],
        env_names=[name for sequence in part for name in [_name(sequence)] * len(sequence)],
        seq_lens=lengths,
    )


def _heat(sequence: TrainingSequence) -> float:
    return 1.0 if sequence.temperature is None else sequence.temperature


def _name(sequence: TrainingSequence) -> str:
    return f"{sequence.env}_" if sequence.env == _RESERVED else sequence.env


async def run_bridge(trainer: AsyncTrainerClient, exchange: Exchange, *, poll_s: float = POLL_S) -> None:
    """Write and follow until the run is over and its last batch is done with."""
    async with trainer:
        given: list[int] = []

        async def on_batch(batch: TrainingBatch) -> None:
            newest = await asyncio.to_thread(exchange.newest_weights)
            if newest is None or newest[0] < batch.step:
                await asyncio.to_thread(exchange.write, batch)
                log.info("bridge.handed_over", step=batch.step, sequences=len(batch))
            given.append(batch.step)

        async def follow() -> None:
            while True:
                newest = await asyncio.to_thread(exchange.newest_weights)
                while newest is not None and given and given[0] <= newest[0]:
                    step = given.pop(0)
                    # Where several are done with, those of the last one count; older ones may be gone already.
                    intake.done(step, publish=newest[0] == step, path=str(newest[1].absolute()))
                await asyncio.sleep(poll_s)

        intake = Intake(trainer, on_batch=on_batch, on_end=lambda: None)
        await _begin(trainer, exchange, intake, poll_s)
        following = asyncio.create_task(follow())  # noqa: TID251  ended and awaited below
        running = asyncio.create_task(intake.run())  # noqa: TID251  same
        try:
            await asyncio.wait([following, running], return_when=asyncio.FIRST_COMPLETED)
            await (running if running.done() else following)
        finally:
            for task in (following, running):
                task.cancel()
            await asyncio.wait([following, running])


async def _begin(trainer: AsyncTrainerClient, exchange: Exchange, intake: Intake, poll_s: float) -> None:
    """Find out where the trainer stands. A run that has steps behind it waits for its first broadcast to know."""
    said = False
    while (newest := await asyncio.to_thread(exchange.newest_weights)) is None and trainer.after:
        if not said:
            said = True
            log.info("bridge.waiting", what="the trainer's first broadcast, which says where it stands")
        await asyncio.sleep(poll_s)
    if newest is None:
        return
    step, path = newest
    if step < trainer.after:
        log.warning("bridge.trainer_set_back", to_step=step, acknowledged=trainer.after)
        trainer.resume_after(step)
    elif step == trainer.after:
        await intake.publish(step, str(path.absolute()))
