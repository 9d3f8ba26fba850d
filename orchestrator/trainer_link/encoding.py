"""How a batch is turned into bytes for one rank; reading them is `orchestrator.trainer.batch`.

The frames are a function of the step, the version, the groups, the rank, the world size and the protocol of the trainer,
and of nothing else, so asking again, over any transport and after any crash, gives the same bytes. Pure.
"""

from collections.abc import Iterable
from typing import Any

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


def encode_batch(
    batch: Batch, rank: int, world_size: int, protocol: int = PROTOCOL
) -> list[bytes | memoryview]:
    """The frames of a batch for one rank, as a trainer of this protocol reads them.

    Copies its arrays once; ValueError unless the ranks share it evenly.
    """
    groups = batch.groups
    lengths = [length for group in groups for length in group.lengths]
    mine = partition(lengths, world_size)[rank]
    owners = [(number, index) for number, group in enumerate(groups) for index in range(group.size)]
    starts = [np.concatenate(([0], np.cumsum(group.lengths))).tolist() for group in groups]
    used = {number: new for new, number in enumerate(sorted({owners[index][0] for index in mine}))}
    pieces: list[tuple[int, slice]] = []
    for index in mine:
        number, within = owners[index]
        pieces.append((number, slice(starts[number][within], starts[number][within + 1])))
    arrays = [
        np.asarray([lengths[index] for index in mine], "<i4"),
        np.asarray([used[number] for number, _ in pieces], "<i4"),
        _join([group.rewards for group in groups], "<f4")[mine],
        _join([group.advantages for group in groups], "<f4")[mine],
        _join([groups[number].tokens[piece] for number, piece in pieces], "<i4"),
        _join([groups[number].logprobs[piece] for number, piece in pieces], "<f4"),
        _join([groups[number].mask[piece] for number, piece in pieces], "u1"),
    ]
    header: dict[str, Any] = {
        "step": batch.step,
        "version": batch.version,
        "rank": rank,
        "world_size": world_size,
        "batch_size": len(lengths),
        "groups": [_described(groups[number], protocol) for number in used],
    }
    if protocol >= _WITH_FACTS:
        header["trained_tokens"] = int(sum(np.count_nonzero(group.mask) for group in groups))
        arrays.append(_join([group.facts for group in groups], FACTS)[mine].view(np.uint8))
    return [_encoder.encode(header), *(array.data.cast("B") if array.size else b"" for array in arrays)]


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
