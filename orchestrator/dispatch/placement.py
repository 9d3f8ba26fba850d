"""Where a rollout goes: which env server has room for it, which inference server is next, and what each may have. Pure.

The rules alone, for whoever has servers: real ones (`env_servers`, `inference`) and imagined ones (`simulate`).
"""

import sys
from collections.abc import Sequence
from typing import Protocol, TypeVar


class Room(Protocol):
    """An env server, as far as placing goes."""

    @property
    def inflight(self) -> int: ...
    def has_room(self, count: int) -> bool: ...


class Load(Protocol):
    """An inference server, as far as placing goes."""

    @property
    def inflight(self) -> int: ...
    @property
    def limit(self) -> int: ...


R = TypeVar("R", bound=Room)


def fits(count: int, inflight: int, capacity: int) -> bool:
    """Whether a server has room for `count` rollouts beside those that it has; a group larger than the server gets it to itself."""
    return inflight == 0 or inflight + count <= capacity


def least_loaded(servers: Sequence[R], count: int) -> R | None:
    """The env server with the fewest rollouts among those that have room for `count` more; None when none has."""
    best: R | None = None
    least = sys.maxsize
    for server in servers:
        # There may be hundreds: only those that would be the best are asked.
        if server.inflight < least and server.has_room(count):
            best, least = server, server.inflight
    return best


def next_in_turn(ready: Sequence[Load], turn: int) -> int | None:
    """Which of the inference servers has the most room in proportion to its limit; ties go round, from `turn` on."""
    best: int | None = None
    best_load = 0.0
    for offset in range(len(ready)):
        at = (turn + offset) % len(ready)
        load = ready[at].inflight / ready[at].limit
        if best is None or load < best_load:
            best, best_load = at, load
    return best


def even_shares(total: int, servers: int) -> list[int]:
    """What each of some inference servers may have in flight: `total` in even whole shares, each at least 1."""
    whole, rest = divmod(total, max(1, servers))
    return [max(1, whole + (index < rest)) for index in range(servers)]
