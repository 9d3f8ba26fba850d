"""How a batch is turned into bytes for one rank; reading them is `orchestrator.trainer.batch`.

The frames are a function of the step, the version, the groups, the rank and the world size and of nothing else, so
asking again, over any transport and after any crash, gives the same bytes. Pure.
"""

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from orchestrator.errors import ConfigError
from orchestrator.groups.group import Batch
from orchestrator.trainer.batch import BatchHeader, GroupHeader
from orchestrator.trainer_link.partition import partition

_encoder = msgspec.msgpack.Encoder()


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


def encode_batch(batch: Batch, rank: int, world_size: int) -> list[bytes | memoryview]:
    """The frames of a batch for one rank. Copies its arrays once; ValueError unless the ranks share it evenly."""
    lengths = [length for group in batch.groups for length in group.lengths]
    mine = partition(lengths, world_size)[rank]
    owners = [(number, index) for number, group in enumerate(batch.groups) for index in range(group.size)]
    starts = [np.concatenate(([0], np.cumsum(group.lengths))).tolist() for group in batch.groups]
    used = {number: new for new, number in enumerate(sorted({owners[index][0] for index in mine}))}
    pieces: list[tuple[int, slice]] = []
    for index in mine:
        number, within = owners[index]
        pieces.append((number, slice(starts[number][within], starts[number][within + 1])))
    groups = batch.groups
    header = BatchHeader(
        step=batch.step,
        version=batch.version,
        rank=rank,
        world_size=world_size,
        batch_size=len(lengths),
        groups=[
            GroupHeader(groups[n].id, groups[n].env, groups[n].version, groups[n].version_end) for n in used
        ],
    )
    arrays = (
        np.asarray([lengths[index] for index in mine], "<i4"),
        np.asarray([used[number] for number, _ in pieces], "<i4"),
        np.asarray([groups[owners[i][0]].rewards[owners[i][1]] for i in mine], "<f4"),
        np.asarray([groups[owners[i][0]].advantages[owners[i][1]] for i in mine], "<f4"),
        _join([groups[number].tokens[piece] for number, piece in pieces], "<i4"),
        _join([groups[number].logprobs[piece] for number, piece in pieces], "<f4"),
        _join([groups[number].mask[piece] for number, piece in pieces], "u1"),
    )
    return [_encoder.encode(header), *(array.data.cast("B") if array.size else b"" for array in arrays)]


def _join(pieces: list[NDArray[Any]], dtype: str) -> NDArray[Any]:
    return np.concatenate(pieces).astype(dtype, copy=False) if pieces else np.empty(0, dtype)
