"""A trainer that writes down what it was given: `python -m tests.integration.recording_trainer SPEC`.

One line of JSON per batch before it is acknowledged and one after, each on disk before it goes on, so that the record
holds whatever the process dies of. It can be told to die by SIGKILL at one exact moment. `TrainerRecord` reads the
records of all ranks and all lives, and proves from them what a trainer may rely on.
"""

import asyncio
import hashlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.trainer import AsyncTrainerClient, TrainerClient, TrainingBatch


class TrainerSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What a recording trainer does.

    `die_at` is a step, before or after whose acknowledgement it kills itself. `trigger` is a file in which `arm` tells
    it whom else to kill, and when. `weights` is a folder that rank 0 publishes as every version.
    """

    address: str
    record: str
    trigger: str
    rank: int = 0
    world_size: int = 1
    think_s: float = 0.0
    die_at: int = 0
    die: str = ""
    weights: str | None = None


def describe(batch: TrainingBatch) -> dict[str, Any]:
    """A batch as one line of the record; the digest covers every byte of it."""
    digest = hashlib.sha256()
    for array in (
        batch.lengths,
        batch.rewards,
        batch.sequence_advantages,
        batch.tokens,
        batch.logprobs,
        batch.mask,
    ):
        digest.update(array.tobytes())
    groups: Counter[str] = Counter()
    indices: dict[str, int] = {}
    marks = []
    ages = []
    for sequence in batch.sequences:
        groups[sequence.group_id] += 1
        indices[sequence.group_id] = int(sequence.tokens[0])
        marks.append(int(sequence.tokens[1]))
        ages.append(batch.version - sequence.version)
        digest.update(f"{sequence.group_id} {sequence.version} {sequence.version_end}\n".encode())
    return {
        "step": batch.step,
        "rank": batch.rank,
        "version": batch.version,
        "size": len(batch),
        "batch_size": batch.batch_size,
        "groups": dict(groups),
        "indices": indices,
        "marks": marks,
        "oldest": max(ages),
        "sha256": digest.hexdigest(),
    }


@dataclass(slots=True)
class TrainerRecord:
    """What the ranks of a trainer were given and what they acknowledged, over all their lives."""

    batches: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    """By step and rank."""
    served: Counter[tuple[int, int]] = field(default_factory=Counter)
    """How often each was given."""
    acknowledged: set[tuple[int, int]] = field(default_factory=set)

    def note(self, line: dict[str, Any]) -> None:
        """Take a line in; a step that differs from what was given before is an error at once."""
        key = line["step"], line["rank"]
        if "acked" in line:
            self.acknowledged.add(key)
            return
        first = self.batches.setdefault(key, line)
        assert first == line, f"step {key[0]} was served differently to rank {key[1]}"
        self.served[key] += 1

    @property
    def last_step(self) -> int:
        """The newest step that any rank was given."""
        return max((step for step, _ in self.batches), default=0)

    @property
    def oldest(self) -> int:
        """The largest age, in versions, of any sequence that was given."""
        return max(int(line["oldest"]) for line in self.batches.values())

    def groups(self) -> Counter[str]:
        """The groups that were given to any rank, each with the number of steps it was in."""
        steps: set[tuple[int, str]] = set()
        for (step, _), line in self.batches.items():
            steps.update((step, group) for group in line["groups"])
        return Counter(group for _, group in steps)

    def check(self, *, world_size: int, batch_size: int) -> None:
        """No step is missing, none is short, none came out of order or was acknowledged unseen; no group came twice."""
        for rank in range(world_size):
            steps = sorted(step for step, of in self.batches if of == rank)
            assert steps == list(range(1, len(steps) + 1)), f"rank {rank} missed a step"
        for step in range(1, self.last_step + 1):
            shares = [self.batches.get((step, rank)) for rank in range(world_size)]
            if None not in shares:
                lines = [share for share in shares if share is not None]
                assert sum(line["size"] for line in lines) == batch_size
                assert {line["size"] for line in lines} == {batch_size // world_size}
                assert len({line["version"] for line in lines}) == 1
        assert self.acknowledged <= set(self.batches), "a step was acknowledged without having been given"
        assert {group for group, times in self.groups().items() if times > 1} == set(), (
            "a group was trained on twice"
        )


def read_records(paths: Iterable[Path]) -> TrainerRecord:
    """The record of all ranks so far; a line cut short by a kill was never acted on."""
    record = TrainerRecord()
    for path in paths:
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
                if line.endswith("\n"):
                    record.note(json.loads(line))
    return record


async def _at_once(step: int) -> None:
    pass


async def train_here(
    address: str,
    record: TrainerRecord,
    *,
    rank: int = 0,
    world_size: int = 1,
    think_s: float = 0.0,
    before_publishing: Callable[[int], Awaitable[None]] = _at_once,
) -> None:
    """A rank in this event loop, until there are no more batches."""
    async with AsyncTrainerClient(address, rank=rank, world_size=world_size) as trainer:
        async for batch in trainer:
            record.note(describe(batch))
            await asyncio.sleep(think_s)
            await before_publishing(batch.step)
            if rank == 0:
                await trainer.publish(batch.step)


def arm(trigger: str, moment: str, pid: int) -> None:
    """Have a trainer kill a process at the next moment of a kind: received, published, acknowledged."""
    part = Path(f"{trigger}.part")
    part.write_text(f"{moment} {pid}", encoding="utf-8")
    part.replace(trigger)


def _strike(trigger: Path, moment: str) -> None:
    if trigger.exists():
        wanted, pid = trigger.read_text(encoding="utf-8").split()
        if wanted == moment:
            trigger.unlink()
            os.kill(int(pid), signal.SIGKILL)


def _write(file: Any, line: dict[str, Any]) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()
    os.fsync(file.fileno())


def main(spec: TrainerSpec) -> None:
    """Train until there are no more batches."""
    trigger = Path(spec.trigger)
    with (
        Path(spec.record).open("a", encoding="utf-8") as file,
        TrainerClient(spec.address, rank=spec.rank, world_size=spec.world_size, timeout_s=300.0) as trainer,
    ):
        while (batch := trainer.next_batch()) is not None:
            _strike(trigger, "received")
            _write(file, describe(batch))
            time.sleep(spec.think_s)
            if spec.rank == 0:
                trainer.publish(batch.step, spec.weights)
                _strike(trigger, "published")
            if (batch.step, spec.die) == (spec.die_at, "before_ack"):
                os.kill(os.getpid(), signal.SIGKILL)
            trainer.ack(batch.step)
            _strike(trigger, "acknowledged")
            _write(file, {"acked": True, "step": batch.step, "rank": batch.rank})
            if (batch.step, spec.die) == (spec.die_at, "after_ack"):
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=TrainerSpec))
