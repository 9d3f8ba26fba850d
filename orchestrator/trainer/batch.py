"""A batch as a trainer sees it, and how it is read from bytes.

The frames of a batch are a function of the step, the version, the groups, the rank and the world size and of nothing
else, so asking again, over any transport and after any crash, gives the same bytes. Arrays are little-endian and
are read where they lie: a received batch is writable, owned by the trainer, and `torch.from_numpy` takes its
arrays without a copy or a warning.

A trainer imports this, so it needs msgspec and numpy only and nothing of the service.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from orchestrator.trainer.protocol import ProtocolError

Int32s = NDArray[np.int32]
Uint8s = NDArray[np.uint8]
Float32s = NDArray[np.float32]


class GroupHeader(msgspec.Struct, frozen=True, array_like=True):
    """A group that has sequences in the batch."""

    id: str
    env: str
    version: int
    version_end: int


class BatchHeader(msgspec.Struct, frozen=True):
    """First frame of a batch for one rank; `batch_size` counts the sequences of all ranks.

    Then come the frames `lengths` and `group_of` (int32, per sequence; the latter an index into `groups`), `rewards`
    and `advantages` (float32, per sequence), `tokens` (int32), `logprobs` (float32) and `mask` (uint8), the last
    three concatenated over the sequences.
    """

    step: int
    version: int
    rank: int
    world_size: int
    batch_size: int
    groups: list[GroupHeader]


_header_decoder = msgspec.msgpack.Decoder(BatchHeader)
DTYPES = ("<i4", "<i4", "<f4", "<f4", "<i4", "<f4", "u1")
BATCH_FRAMES = 1 + len(DTYPES)


class TrainingSequence:
    """One training sample; the arrays are views on the batch's."""

    __slots__ = ("_advantages", "_group", "advantage", "logprobs", "mask", "reward", "tokens")

    def __init__(
        self,
        tokens: Int32s,
        mask: Uint8s,
        logprobs: Float32s,
        reward: float,
        advantage: float,
        group: GroupHeader,
    ) -> None:
        self.tokens = tokens
        self.mask = mask
        self.logprobs = logprobs
        self.reward = reward
        self.advantage = advantage
        self._group = group
        self._advantages: Float32s | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"TrainingSequence({self.group_id}, {len(self)} tokens, reward {self.reward:g})"

    @property
    def advantages(self) -> Float32s:
        """The advantage of every token: the sequence's where the policy sampled it, 0 elsewhere."""
        if self._advantages is None:
            self._advantages = self.mask * np.float32(self.advantage)
        return self._advantages

    @property
    def env(self) -> str:
        return self._group.env

    @property
    def group_id(self) -> str:
        return self._group.id

    @property
    def version(self) -> int:
        """The oldest policy version that sampled any of it."""
        return self._group.version

    @property
    def version_end(self) -> int:
        """The newest policy version that sampled any of it."""
        return self._group.version_end


class TrainingBatch:
    """A rank's share of a batch: `sequences`, or the same as flat arrays.

    `tokens`, `mask` and `logprobs` are concatenated over the sequences, `lengths` tells them apart; `rewards` and
    `sequence_advantages` have one entry per sequence. Arrays are writable and not shared with anything.
    """

    def __init__(self, header: BatchHeader, arrays: Sequence[NDArray[Any]]) -> None:
        self._header = header
        self.lengths: Int32s = arrays[0]
        self._group_of: Int32s = arrays[1]
        self.rewards: Float32s = arrays[2]
        self.sequence_advantages: Float32s = arrays[3]
        self.tokens: Int32s = arrays[4]
        self.logprobs: Float32s = arrays[5]
        self.mask: Uint8s = arrays[6]
        self._sequences: list[TrainingSequence] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        return f"TrainingBatch(step {self.step}, {len(self)} of {self.batch_size} sequences, {len(self.tokens)} tokens)"

    @property
    def step(self) -> int:
        return self._header.step

    @property
    def version(self) -> int:
        """The policy version that the batch is trained on."""
        return self._header.version

    @property
    def rank(self) -> int:
        return self._header.rank

    @property
    def world_size(self) -> int:
        return self._header.world_size

    @property
    def batch_size(self) -> int:
        """Sequences of all ranks."""
        return self._header.batch_size

    @property
    def sequences(self) -> list[TrainingSequence]:
        if self._sequences is None:
            self._sequences = list(self._cut())
        return self._sequences

    def _cut(self) -> Iterator[TrainingSequence]:
        start = 0
        facts = zip(
            self.lengths.tolist(),
            self._group_of.tolist(),
            self.rewards.tolist(),
            self.sequence_advantages.tolist(),
            strict=True,
        )
        for length, group, reward, advantage in facts:
            piece = slice(start, start + length)
            start += length
            yield TrainingSequence(
                self.tokens[piece],
                self.mask[piece],
                self.logprobs[piece],
                reward,
                advantage,
                self._header.groups[group],
            )


def decode_batch(frames: Sequence[Any]) -> TrainingBatch:
    """The batch in frames that `encode_batch` made; its arrays are views on them. Raises ProtocolError."""
    if len(frames) != BATCH_FRAMES:
        raise ProtocolError(f"a batch has {BATCH_FRAMES} frames, got {len(frames)}")
    try:
        header = _header_decoder.decode(frames[0])
        arrays = [_view(frame, dtype) for frame, dtype in zip(frames[1:], DTYPES, strict=True)]
    except (msgspec.MsgspecError, ValueError) as error:
        raise ProtocolError(f"a batch cannot be decoded: {error}") from error
    total = int(arrays[0].sum())
    sizes = [len(array) for array in arrays]
    if sizes[1:4] != [sizes[0]] * 3 or sizes[4:] != [total] * 3:
        raise ProtocolError(f"the frames of batch {header.step} do not fit together")
    return TrainingBatch(header, arrays)


def _view(frame: Any, dtype: str) -> NDArray[Any]:
    """An array on the frame's own memory, unless the transport put a small frame where it is not aligned."""
    view = memoryview(frame)
    if not view.nbytes:
        return np.empty(0, dtype)
    array: NDArray[Any] = np.frombuffer(view, dtype)
    return array if array.flags.aligned and array.flags.writeable else array.copy()
