"""Which groups to split where no set of whole groups makes an exact batch.

One split suffices nearly always: the oldest group is split for which some cut makes an exact batch, as late as
possible. Where the environments' bounds need more than one, each group that would overshoot is cut, walking
the queue from its front. Splitting itself is the caller's: here are only places and sizes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.buffer.oldest_first import start
from orchestrator.buffer.queue import Entry, EnvQueue, SizeQueue
from orchestrator.buffer.subset_sum import Stock, completable, reachable


@dataclass(frozen=True, slots=True)
class Cut:
    """Split a queued group into its first `size` sequences and the rest."""

    lane: SizeQueue
    entry: Entry
    size: int


@dataclass(frozen=True, slots=True)
class Piece:
    size: int
    left: int


@dataclass(slots=True)
class PartOf:
    least: int
    most: int
    stock: Sequence[Stock]
    sums: int = 0
    sums_limit: int = 0


def plan_cuts(size: int, envs: Sequence[EnvQueue]) -> list[Cut]:
    """The cuts after which an exact batch within every env's low and high exists; none if there is no way.

    Given that no exact batch exists now.
    """
    start(envs)
    lanes = [lane for env in envs for lane in env.lanes.values() if lane.left and lane.size > 1]
    lanes.sort(key=lambda lane: (lane.entries[lane.head][0], lane.rank))
    for lane in lanes:
        # A group that may give anything below its size is that many single sequences.
        if not _completable_with(size, envs, lane, Piece(1, lane.size - 1)):
            continue
        for cut in range(lane.size - 1, 0, -1):
            if _completable_with(size, envs, lane, Piece(cut, 1)):
                return [Cut(lane, lane.entries[lane.head], cut)]
    return cut_overshoots(size, envs)


def _completable_with(size: int, envs: Sequence[EnvQueue], lane: SizeQueue, piece: Piece) -> bool:
    """Whether an exact batch exists with one group of `lane` replaced by `piece`."""
    parts = []
    for env in envs:
        stock: list[Stock] = [Piece(other.size, other.left - (other is lane)) for other in env.lanes.values()]
        if env is lane.env:
            stock.append(piece)
        parts.append(PartOf(env.low, env.high, stock))
    return completable(size, parts)


def whole_groups(envs: Sequence[EnvQueue], amounts: Mapping[str, int]) -> dict[str, int]:
    """The largest sums of each env's queued groups that these amounts hold."""
    return {env.name: _largest_sum(env, amounts.get(env.name, 0)) for env in envs}


def _largest_sum(env: EnvQueue, most: int) -> int:
    for lane in env.lanes.values():
        lane.reset()
    return reachable(env.stock, most).bit_length() - 1


def cut_overshoots(size: int, envs: Sequence[EnvQueue]) -> list[Cut]:
    """Take from the front of the queue all that fits, cutting what fits only in part."""
    lacking = {env.rank: env.low for env in envs}
    room = {env.rank: env.high for env in envs}
    short = sum(lacking.values())
    need = size
    cuts = []
    groups = [
        (lane, entry)
        for env in envs
        for lane in env.lanes.values()
        for entry in lane.entries[lane.head : lane.head + size]
    ]
    groups.sort(key=lambda group: (group[1][0], group[0].rank))
    for lane, entry in groups:
        rank = lane.env.rank
        # Beyond what its env lacks, a group may only use what no env lacks.
        part = min(lane.size, room[rank], lacking[rank] + need - short)
        if part < 1:
            continue
        filled = min(part, lacking[rank])
        need -= part
        short -= filled
        lacking[rank] -= filled
        room[rank] -= part
        if part < lane.size:
            cuts.append(Cut(lane, entry, part))
    return cuts if need == 0 else []
