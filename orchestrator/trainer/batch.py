"""A batch as a trainer sees it, and how it is read from bytes.

The frames of a batch are a function of the step, the version, the groups, the rank and the world size and of nothing
else, so asking again, over any transport and after any crash, gives the same bytes. Arrays are little-endian and
are read where they lie: a received batch is writable, owned by the trainer, and `torch.from_numpy` takes its
arrays without a copy or a warning.

A trainer imports this, so it needs msgspec and numpy only and nothing of the service.
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from orchestrator.trainer.protocol import ProtocolError

Int32s = NDArray[np.int32]
Uint8s = NDArray[np.uint8]
Float32s = NDArray[np.float32]


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
"""What the last frame says of each sequence, in 40 bytes; `seat` and `stop_reason` are places in the group's `names`."""


class Details(msgspec.Struct, frozen=True, array_like=True):
    """Names of seats and ends, and the metrics of each rollout; no list of metrics where no rollout has any."""

    names: list[str] = []
    metrics: list[dict[str, float]] = []


class GroupHeader(msgspec.Struct, frozen=True, array_like=True):
    """A group that has sequences in the batch; `task` is the problem that it is about, the same in every epoch.

    Up to protocol 2 the last two are not there.
    """

    id: str
    env: str
    version: int
    version_end: int
    task: str = ""
    details: Details = Details()


class BatchHeader(msgspec.Struct, frozen=True):
    """First frame of a batch for one rank; `batch_size` counts the sequences of all ranks, `trained_tokens` their sampled tokens.

    Then come the frames `lengths` and `group_of` (int32, per sequence; the latter an index into `groups`), `rewards`
    and `advantages` (float32, per sequence), `tokens` (int32), `logprobs` (float32) and `mask` (uint8), the last
    three concatenated over the sequences, and since protocol 3 `facts` (see `FACTS`).
    """

    step: int
    version: int
    rank: int
    world_size: int
    batch_size: int
    groups: list[GroupHeader]
    trained_tokens: int = 0


_PART = re.compile(r"\+[0-9]+$")
"""How the id of a further part of a group ends that was split over batches."""

_header_decoder = msgspec.msgpack.Decoder(BatchHeader)
DTYPES: tuple[Any, ...] = ("<i4", "<i4", "<f4", "<f4", "<i4", "<f4", "u1", FACTS)
BATCH_FRAMES = 1 + len(DTYPES)


class TrainingSequence:
    """One training sample; the arrays are views on the batch's.

    `version` and `version_end` are the policy versions when its rollout was dispatched and when it came back: all of it was
    sampled by these, or by one in between. `truncated` says that a token limit cut it short.
    """

    __slots__ = (
        "_advantages",
        "_group",
        "_rollout",
        "_seat",
        "_stop_reason",
        "_temperature",
        "advantage",
        "logprobs",
        "mask",
        "reward",
        "tokens",
        "truncated",
        "version",
        "version_end",
    )

    def __init__(
        self,
        tokens: Int32s,
        mask: Uint8s,
        logprobs: Float32s,
        reward: float,
        advantage: float,
        group: GroupHeader,
        facts: tuple[Any, ...],
    ) -> None:
        self.tokens = tokens
        self.mask = mask
        self.logprobs = logprobs
        self.reward = reward
        self.advantage = advantage
        self._group = group
        self.version: int = facts[0]
        self.version_end: int = facts[1]
        self._rollout: int = facts[2]
        self._seat: int = facts[3]
        self._stop_reason: int = facts[4]
        self._temperature: float = facts[5]
        self.truncated = bool(facts[6])
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
    def task(self) -> str:
        """The problem that it is about: env, split and index, the same in every epoch."""
        return self._group.task

    @property
    def rollout_id(self) -> str:
        """Which rollout it comes from; sequences of one rollout share it, also in different batches."""
        return f"{_PART.sub('', self._group.id)}#{self._rollout}"

    @property
    def seat(self) -> str:
        """Whose part it is in a rollout that plays several, else empty."""
        return self._name(self._seat)

    @property
    def stop_reason(self) -> str:
        """Why it ended; empty where nobody knows."""
        return self._name(self._stop_reason)

    @property
    def temperature(self) -> float | None:
        """What its tokens were sampled with; None where that is not known, or not one number."""
        return None if math.isnan(self._temperature) else self._temperature

    @property
    def metrics(self) -> dict[str, float]:
        """What the environment measured in its rollout."""
        metrics = self._group.details.metrics
        return metrics[self._rollout] if self._rollout < len(metrics) else {}

    def _name(self, place: int) -> str:
        names = self._group.details.names
        return names[place] if place < len(names) else ""


class TrainingBatch:
    """A rank's share of a batch: `sequences`, or the same as flat arrays.

    `tokens`, `mask` and `logprobs` are concatenated over the sequences, `lengths` tells them apart; `rewards`,
    `sequence_advantages`, `versions`, `versions_end`, `temperatures` (NaN where unknown) and `truncated` have one entry per
    sequence. Arrays are writable and not shared with anything.
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
        self._facts = arrays[7]
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
    def trained_tokens(self) -> int:
        """Sampled tokens of all ranks: what a loss that is averaged over tokens is divided by."""
        return self._header.trained_tokens

    @property
    def versions(self) -> NDArray[np.int64]:
        return self._facts["version"].copy()

    @property
    def versions_end(self) -> NDArray[np.int64]:
        return self._facts["version_end"].copy()

    @property
    def temperatures(self) -> Float32s:
        return self._facts["temperature"].copy()

    @property
    def truncated(self) -> NDArray[np.bool_]:
        return np.asarray(self._facts["truncated"] != 0)

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
            self._facts.tolist(),
            strict=True,
        )
        for length, group, reward, advantage, own in facts:
            piece = slice(start, start + length)
            start += length
            yield TrainingSequence(
                self.tokens[piece],
                self.mask[piece],
                self.logprobs[piece],
                reward,
                advantage,
                self._header.groups[group],
                own,
            )


def decode_batch(frames: Sequence[Any]) -> TrainingBatch:
    """The batch in frames that `encode_batch` made; its arrays are views on them. Raises ProtocolError."""
    if len(frames) not in (BATCH_FRAMES, BATCH_FRAMES - 1):
        raise ProtocolError(f"a batch has {BATCH_FRAMES} frames, got {len(frames)}")
    try:
        header = _header_decoder.decode(frames[0])
        arrays = [_view(frame, dtype) for frame, dtype in zip(frames[1:], DTYPES, strict=False)]
    except (msgspec.MsgspecError, ValueError) as error:
        raise ProtocolError(f"a batch cannot be decoded: {error}") from error
    total = int(arrays[0].sum())
    sizes = [len(array) for array in arrays]
    if sizes[1:4] != [sizes[0]] * 3 or sizes[4:7] != [total] * 3 or sizes[7:] not in ([], [sizes[0]]):
        raise ProtocolError(f"the frames of batch {header.step} do not fit together")
    groups = arrays[1]
    if len(groups) and not 0 <= groups.min() <= groups.max() < len(header.groups):
        raise ProtocolError(f"batch {header.step} has sequences of a group that it does not name")
    if len(arrays) < len(DTYPES):
        arrays.append(_facts_of(header, arrays))
    elif (
        (arrays[7]["rollout"] < 0).any()
        or (arrays[7]["seat"] < 0).any()
        or (arrays[7]["stop_reason"] < 0).any()
    ):
        raise ProtocolError(f"batch {header.step} refers to what it does not have")
    return TrainingBatch(header, arrays)


def _facts_of(header: BatchHeader, arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Facts for a batch of an earlier protocol, which knew the versions of groups and nothing of rollouts."""
    facts = np.zeros(len(arrays[0]), FACTS)
    for name in ("version", "version_end"):
        facts[name] = [getattr(header.groups[group], name) for group in arrays[1].tolist()]
    facts["rollout"] = np.arange(len(facts))
    facts["temperature"] = np.nan
    return facts


def _view(frame: Any, dtype: Any) -> NDArray[Any]:
    """An array on the frame's own memory, unless the transport put a small frame where it is not aligned."""
    view = memoryview(frame)
    if not view.nbytes:
        return np.empty(0, dtype)
    array: NDArray[Any] = np.frombuffer(view, dtype)
    return array if array.flags.aligned and array.flags.writeable else array.copy()
