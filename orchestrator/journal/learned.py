"""What groups said about their tasks, as the journal keeps it: rows since the last batch, then one blob with the batch.

A batch's blob has what was learned between the batch before it and itself, so the statistics of every step can be had
again by reading the blobs up to it. Per env it is an array of `OUTCOMES`, all of them in msgpack and zlib.
"""

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from orchestrator.curriculum import OUTCOMES, Outcomes

COLUMNS = "env, task_index, version, reward, rollouts, equal"

_decoder = msgspec.msgpack.Decoder(dict[str, bytes])


def arrays_of(rows: Iterable[tuple[Any, ...]]) -> dict[str, Outcomes]:
    """Rows as an array for each env."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    for env, *rest in rows:
        found.setdefault(env, []).append(tuple(rest))
    return {env: np.array(rows, OUTCOMES) for env, rows in found.items()}


def pack(learned: Mapping[str, Outcomes]) -> bytes | None:
    """As a blob; None for nothing."""
    if not learned:
        return None
    return zlib.compress(msgspec.msgpack.encode({env: rows.tobytes() for env, rows in learned.items()}), 1)


def unpack(blob: bytes) -> dict[str, Outcomes]:
    """What `pack` made; raises zlib.error, msgspec.DecodeError and ValueError for anything else."""
    packed = _decoder.decode(zlib.decompress(blob))
    return {env: np.frombuffer(rows, OUTCOMES) for env, rows in packed.items()}
