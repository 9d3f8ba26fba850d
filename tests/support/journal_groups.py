"""Groups and batches for tests of the journal and the trainer link: content is a function of env and position."""

import zlib

import numpy as np

from orchestrator.groups.group import Batch, Group, encode_details, plain_facts
from orchestrator.tasks.task import TrainTask


def make_group(
    position: int, env: str = "math", *, size: int = 4, longest: int = 40, transcript: bytes = b""
) -> Group:
    """A group whose arrays anybody can make again from its env, position and size."""
    rng = np.random.default_rng([position, size, longest, *env.encode()])
    lengths = tuple(int(length) for length in rng.integers(1, longest, size))
    total = sum(lengths)
    numbers = np.arange(size)
    facts = plain_facts(size, version=position, version_end=position + 1)
    facts["rollout"], facts["truncated"] = numbers // 2, numbers % 3 == 0
    facts["seat"], facts["stop_reason"] = numbers % 2, 2
    facts["temperature"] = [0.5 + position % 4] + [np.nan] * (size - 1)
    metrics = [{"correct": float(number), "position": float(position)} for number in range(size)]
    return Group(
        task=TrainTask(env, "train", index=position % 7, epoch=position // 7, position=position),
        version=position,
        version_end=position + 1,
        rollouts=size,
        lengths=lengths,
        facts=facts,
        details=encode_details(["", "white", "stop"], metrics),
        digest=1 + zlib.crc32(f"{env}/{position % 7}".encode()),
        tokens=rng.integers(0, 150_000, total, dtype=np.int32),
        mask=rng.integers(0, 2, total, dtype=np.uint8),
        logprobs=-rng.random(total, dtype=np.float32),
        rewards=rng.random(size, dtype=np.float32),
        advantages=rng.standard_normal(size, dtype=np.float32),
        transcript=transcript or f"transcript of {env}/{position}".encode(),
    )


def make_batch(step: int, groups: int = 2, env: str = "math") -> Batch:
    """The batch of a step: the groups of the positions that follow the earlier steps'."""
    first = (step - 1) * groups
    return Batch(step, step - 1, tuple(make_group(first + n, env) for n in range(groups)))


def facts(group: Group) -> tuple[object, ...]:
    """What every schema of the journal has of a group, in a form that compares."""
    return (
        group.task,
        group.version,
        group.version_end,
        group.rollouts,
        group.lengths,
        group.transcript,
        *(
            (array.dtype.str, array.tobytes())
            for array in (group.tokens, group.mask, group.logprobs, group.rewards, group.advantages)
        ),
    )


def all_facts(group: Group) -> tuple[object, ...]:
    """All of a group in a form that compares."""
    return (*facts(group), group.facts.dtype, group.facts.tobytes(), group.details, group.digest)


def batch_facts(batch: Batch) -> tuple[object, ...]:
    """All of a batch in a form that compares."""
    return batch.step, batch.version, [all_facts(group) for group in batch.groups]
