"""A finished group: the unit that is scored, queued, recorded and trained on, never split by accident.

Arrays are concatenated over the group's sequences (9 bytes a token: int32 token, float32 log-probability,
uint8 mask), `lengths` tells them apart. A group is immutable once made. Its id is unique in a run, because
every position of an environment's task stream is trained on once; the parts of a group that was split for the
sake of an exact batch are told apart by `part`, the place of their first sequence in the whole.
"""

from dataclasses import dataclass, field, replace

from envs.rollout import Float32s, Int32s, Uint8s
from orchestrator.tasks.task import TrainTask


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The rollouts of one task, scored together, ready to be trained on.

    `version` is the oldest policy version that sampled any of it, `version_end` the newest.
    `rewards` and `advantages` have one entry per sequence. `transcript` is a msgpack list with one entry per
    rollout (messages, reward, metrics, stop_reason, timings), for people.
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
    transcript: bytes = field(default=b"", repr=False)
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
        )
        rest = replace(
            self,
            lengths=self.lengths[n:],
            tokens=self.tokens[cut:],
            mask=self.mask[cut:],
            logprobs=self.logprobs[cut:],
            rewards=self.rewards[n:],
            advantages=self.advantages[n:],
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
