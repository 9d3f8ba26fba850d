"""What is asked of an environment and what comes back: plain data, shared by the link and those who use it."""

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from envs import wire

_MESSAGE_LENGTH = 1000
_DETAIL_LENGTH = 8000
_WHERE_LENGTH = 300


class Canceller(Protocol):
    """The link that a request was sent on."""

    def cancel(self, request: "RolloutRequest") -> bool: ...


class RolloutRequest(msgspec.Struct, eq=False):
    """One rollout, or one group of `count`, to be done. `context` is the caller's own; `id` and `link` are the link's."""

    split: str
    index: int
    base_url: str
    count: int = 1
    group: bool = False
    session: str = ""
    cache_salt: str = ""
    timeout_s: float = 0.0
    model: str = ""
    context: Any = None
    id: int = -1
    link: "Canceller | None" = None


Answer = wire.Result | wire.Failure
"""How a request ended. A server that went away is a failure of kind "server_lost"."""

OnDone = Callable[[RolloutRequest, Answer], None]


def plain(failure: wire.Failure) -> wire.Failure:
    """A failure as it may be told on: of a length that a log can hold, and not of the kind that only we can know."""
    if failure.lost or failure.inflight:
        failure = msgspec.structs.replace(failure, kind="error", inflight=0)
    long = len(failure.message) > _MESSAGE_LENGTH or len(failure.detail) > _DETAIL_LENGTH
    if long or len(failure.where) > _WHERE_LENGTH:
        # What was raised stands at the end of a traceback, and a file at the end of its path.
        failure = msgspec.structs.replace(
            failure,
            message=failure.message[:_MESSAGE_LENGTH],
            detail=failure.detail[-_DETAIL_LENGTH:],
            where=failure.where[-_WHERE_LENGTH:],
        )
    return failure
