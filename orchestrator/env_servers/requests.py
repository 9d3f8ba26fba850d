"""What is asked of an environment and what comes back: plain data, shared by the link and those who use it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from envs import wire


class Canceller(Protocol):
    """The link that a request was sent on."""

    def cancel(self, request: "RolloutRequest") -> bool: ...


@dataclass(slots=True, eq=False)
class RolloutRequest:
    """One rollout, or one group of `count`, to be done. `context` is the caller's own; `id` and `link` are the link's."""

    split: str
    index: int
    base_url: str
    count: int = 1
    group: bool = False
    session: str = ""
    cache_salt: str = ""
    timeout_s: float = 0.0
    context: Any = None
    id: int = field(default=-1, init=False)
    link: "Canceller | None" = field(default=None, init=False, repr=False)


Answer = wire.Result | wire.Failure
"""How a request ended. A server that went away is a failure of kind "server_lost"."""

OnDone = Callable[[RolloutRequest, Answer], None]
