"""How a batch is turned into bytes for one rank; reading them is `orchestrator.trainer.batch`.

The frames are a function of the step, the version, the groups, the rank, the world size and the protocol of the trainer,
and of nothing else, so asking again, over any transport and after any crash, gives the same bytes. Pure.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from orchestrator.errors import ConfigError
from orchestrator.groups.group import Batch, Group
from orchestrator.trainer.batch import FACTS
from orchestrator.trainer.protocol import PROTOCOL
from orchestrator.trainer_link.partition import partition

_encoder = msgspec.msgpack.Encoder()
_WITH_FACTS = 3
"""The first protocol whose batches say more of each sequence."""
_NO_DETAILS = msgspec.msgpack.encode(((), ()))


def check_shares(batches: Iterable[Batch], world_size: int) -> None:
    """Whether the ranks can share each batch equally; ConfigError names the first that they cannot."""
    for batch in batches:
        sequences = sum(group.size for group in batch.groups)
        if sequences % world_size:
            raise ConfigError(
                f"the batch of step {batch.step} was formed with {sequences} sequences and not every rank has acknowledged "
                f"it; {world_size} ranks cannot share it equally: set trainer.world_size to a number that divides "
                f"{sequences}, or start over with --fresh or another run_dir"
            )


class _Share(NamedTuple):
    """What one rank gets: the groups that it has sequences of, the arrays of every protocol, and the facts of each sequence."""

    groups: Sequence[Group]
    arrays: list[NDArray[Any]]
    facts: NDArray[Any]


class CutBatch:
    """A batch that is shared out among the ranks: what all shares have in common is found once, not once a rank.

    `frames` makes one rank's share when it is asked for, so that only shares which are on their way take memory.
    """

    def __init__(self, batch: Batch, world_size: int) -> None:
        """ValueError unless the ranks share it evenly."""
        groups = batch.groups
        self._batch = batch
        self._world_size = world_size
        self._lengths = [length for group in groups for length in group.lengths]
        self._shares = partition(self._lengths, world_size)
        self._group_of = [number for number, group in enumerate(groups) for _ in group.lengths]
        """Of each sequence; where it begins in its group's arrays is in `_starts`."""
        self._starts = (
            []  # nobody asks: the one rank has all of it
            if world_size == 1
            else [
                start
                for group in groups
                for start, _ in zip(accumulate(group.lengths, initial=0), group.lengths, strict=False)
            ]
        )
        self._rewards = _join([group.rewards for group in groups], "<f4")
        self._advantages = _join([group.advantages for group in groups], "<f4")
        # As bytes: numpy would take a thousand times as long to join arrays of this kind.
        self._facts = np.frombuffer(b"".join([group.facts.tobytes() for group in groups]), FACTS)
        # A mask has nothing but 0 and 1, and as truth values they are counted ten times as fast.
        self._trained_tokens = int(sum(np.count_nonzero(group.mask.view(np.bool_)) for group in groups))

    def frames(self, rank: int, protocol: int) -> list[bytes | memoryview]:
        """One rank's share, as a trainer of this protocol reads it. Copies its arrays once."""
        share = self._whole() if self._world_size == 1 else self._part(self._shares[rank])
        header: dict[str, Any] = {
            "step": self._batch.step,
            "version": self._batch.version,
            "rank": rank,
            "world_size": self._world_size,
            "batch_size": len(self._lengths),
            "groups": [_described(group, protocol) for group in share.groups],
        }
        arrays = share.arrays
        if protocol >= _WITH_FACTS:
            header["trained_tokens"] = self._trained_tokens
            arrays = [*arrays, share.facts.view(np.uint8)]
        return [_encoder.encode(header), *(array.data.cast("B") if array.size else b"" for array in arrays)]

    def _whole(self) -> _Share:
        """What the only rank gets: all groups as they are, so nothing is looked for."""
        groups = self._batch.groups
        arrays = [
            np.asarray(self._lengths, "<i4"),
            np.asarray(self._group_of, "<i4"),
            self._rewards,
            self._advantages,
            _join([group.tokens for group in groups], "<i4"),
            _join([group.logprobs for group in groups], "<f4"),
            _join([group.mask for group in groups], "u1"),
        ]
        return _Share(groups, arrays, self._facts)

    def _part(self, mine: list[int]) -> _Share:
        """What one of several ranks gets."""
        groups = self._batch.groups
        owners = [self._group_of[index] for index in mine]
        used = {number: new for new, number in enumerate(sorted(set(owners)))}
        pieces = self._pieces(mine)
        arrays = [
            np.asarray([self._lengths[index] for index in mine], "<i4"),
            np.asarray([used[number] for number in owners], "<i4"),
            self._rewards[mine],
            self._advantages[mine],
            _join([groups[number].tokens[piece] for number, piece in pieces], "<i4"),
            _join([groups[number].logprobs[piece] for number, piece in pieces], "<f4"),
            _join([groups[number].mask[piece] for number, piece in pieces], "u1"),
        ]
        return _Share([groups[number] for number in used], arrays, self._facts[mine])

    def _pieces(self, mine: list[int]) -> list[tuple[int, slice]]:
        """Where the arrays of these sequences lie: the group, and from where to where; neighbours are one piece."""
        pieces: list[tuple[int, slice]] = []
        last, end = -1, 0
        for index in mine:
            number, start = self._group_of[index], self._starts[index]
            begin = pieces.pop()[1].start if number == last and start == end else start
            last, end = number, start + self._lengths[index]
            pieces.append((number, slice(begin, end)))
        return pieces


def encode_batch(
    batch: Batch, rank: int, world_size: int, protocol: int = PROTOCOL
) -> list[bytes | memoryview]:
    """The frames of a batch for one rank, as a trainer of this protocol reads them.

    Copies its arrays once; ValueError unless the ranks share it evenly.
    """
    return CutBatch(batch, world_size).frames(rank, protocol)


def _described(group: Group, protocol: int) -> tuple[object, ...]:
    """A group in the header of a batch."""
    named = (group.id, group.env, group.version, group.version_end)
    if protocol < _WITH_FACTS:
        return named
    task = group.task
    details = msgspec.Raw(group.details or _NO_DETAILS)
    return (*named, f"{task.env}/{task.split}/{task.index}", details)


def _join(pieces: list[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(pieces).astype(dtype, copy=False) if pieces else np.empty(0, dtype)
