"""A finished group: the unit that is scored, queued, recorded and trained on, never split by accident.

Arrays are concatenated over the group's sequences (9 bytes a token: int32 token, float32 log-probability,
uint8 mask), `lengths` tells them apart; `facts` has a row for each sequence. A group is immutable once made. Its id is
unique in a run, because every position of an environment's task stream is trained on once; the parts of a group that
was split for the sake of an exact batch are told apart by `part`, the place of their first sequence in the whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from envs.rollout import Float32s, Int32s, Uint8s
from orchestrator.tasks.task import TrainTask

FACTS = np.dtype(
    [
        ("version", "<i8"),
        ("version_end", "<i8"),
        ("rollout", "<i4"),
        ("seat", "<i4"),
        ("stop_reason", "<i4"),
        ("temperature", "<f4"),
        ("truncated", "<i4"),
        ("unused", "<i4"),
    ]
)
"""What is known of one sequence, in 40 bytes.

`version` and `version_end` are the policy versions when its rollout was dispatched and when its result arrived; `rollout`
is its rollout's number in the group; `seat` and `stop_reason` are places in the group's `names`; `temperature` is NaN
where it is not known.
"""

Facts = NDArray[Any]


class Details(msgspec.Struct, frozen=True, array_like=True):
    """What the rows of `facts` refer to: names of seats and ends, and the metrics of each rollout (none, where none has any)."""

    names: list[str] = []
    metrics: list[dict[str, float]] = []


_details = msgspec.msgpack.Decoder(Details)
_encoder = msgspec.msgpack.Encoder()


def encode_details(names: Sequence[str], metrics: Sequence[dict[str, float]]) -> bytes:
    """The names and metrics of a group, as it holds and records them."""
    return _encoder.encode((names, metrics if any(metrics) else ()))


def plain_facts(size: int, *, version: int, version_end: int) -> Facts:
    """Rows for sequences of which nothing but a span of versions is known: each is a rollout of its own."""
    facts = np.zeros(size, FACTS)
    facts["version"], facts["version_end"] = version, version_end
    facts["rollout"] = np.arange(size)
    facts["temperature"] = np.nan
    return facts


class Group(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The rollouts of one task, scored together, ready to be trained on.

    `version` is the oldest policy version that sampled any of it, `version_end` the newest.
    `rewards`, `advantages` and `facts` have one entry per sequence; `details` is what the facts refer to (see
    `Details`), undecoded. `digest` is the task's, 0 where no server made one. `transcript` is a msgpack list with one
    entry per rollout (messages, reward, metrics, stop_reason, timings), for people.
    """

    task: TrainTask
    version: int
    version_end: int
    rollouts: int
    lengths: tuple[int, ...]
    tokens: Int32s
    mask: Uint8s
    logprobs: Float32s
    rewards: Float32s
    advantages: Float32s
    facts: Facts
    details: bytes
    digest: int
    transcript: bytes = b""
    part: int = 0

    @property
    def id(self) -> str:
        return f"{self.task.key}+{self.part}" if self.part else self.task.key

    @property
    def env(self) -> str:
        return self.task.env

    @property
    def size(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    def decode_details(self) -> Details:
        """What the facts refer to."""
        return _details.decode(self.details) if self.details else Details()

    def split(self, n: int) -> "tuple[Group, Group]":
        """The first `n` sequences and the rest, as two groups that share the arrays."""
        cut = sum(self.lengths[:n])
        first = replace(
            self,
            lengths=self.lengths[:n],
            tokens=self.tokens[:cut],
            mask=self.mask[:cut],
            logprobs=self.logprobs[:cut],
            rewards=self.rewards[:n],
            advantages=self.advantages[:n],
            facts=self.facts[:n],
        )
        rest = replace(
            self,
            lengths=self.lengths[n:],
            tokens=self.tokens[cut:],
            mask=self.mask[cut:],
            logprobs=self.logprobs[cut:],
            rewards=self.rewards[n:],
            advantages=self.advantages[n:],
            facts=self.facts[n:],
            transcript=b"",
            part=self.part + n,
        )
        return first, rest


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What the trainer gets: whole groups whose sizes sum to exactly the batch size.

    `version` is the policy version the batch is trained on; steps count from 1.
    """

    step: int
    version: int
    groups: tuple[Group, ...]

    @property
    def size(self) -> int:
        return sum(group.size for group in self.groups)
