"""What surrounds a run in virtual time: imagined environments with their servers, and inference servers.

They keep the protocols of the real ones (`run.ports`, `dispatch.ports`) and do nothing by themselves; `world` lets time pass.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.dispatch.placement import even_shares, fits, least_loaded, next_in_turn
from orchestrator.dispatch.work import Attempt

Draw = Callable[[random.Random], float]


@dataclass(slots=True)
class Behaviour:
    """How an env's rollouts go.

    `latency` is in seconds, `loss` the probability of a failure, `retryable` that of a retryable one among those;
    `sequences` draws how many sequences a rollout yields, `length` the tokens of each, `reward` its reward.
    """

    latency: Draw = lambda rng: rng.expovariate(1.0)
    loss: float = 0.0
    retryable: float = 0.5
    group_scored: bool = False
    sequences: Callable[[random.Random], int] = lambda rng: 1
    length: Callable[[random.Random], int] = lambda rng: 3
    reward: Draw = lambda rng: rng.random()


@dataclass(slots=True, eq=False)
class Server:
    """One imagined env server."""

    capacity: int
    ready: bool = True
    inflight: int = 0
    requests: dict[Attempt, None] = field(default_factory=dict)

    def has_room(self, count: int) -> bool:
        return self.ready and fits(count, self.inflight, self.capacity)


class VirtualEnv:
    """An env's servers."""

    def __init__(self, name: str, *, servers: int, capacity: int, group_scored: bool) -> None:
        self.name = name
        self.group_scored = group_scored
        self._servers = [Server(capacity) for _ in range(servers)]
        self.restarts = 0
        self.nodes: dict[str, str] = {}

    @property
    def available(self) -> bool:
        for server in self._servers:  # noqa: SIM110  asked for every env at every event
            if server.ready:
                return True
        return False

    @property
    def ready_servers(self) -> int:
        return sum(server.ready for server in self._servers)

    @property
    def servers(self) -> int:
        return len(self._servers)

    def has_room(self, count: int) -> bool:
        for server in self._servers:  # noqa: SIM110  asked at every event
            if server.has_room(count):
                return True
        return False

    def reserve(self, count: int) -> Server | None:
        server = least_loaded(self._servers, count)
        if server is not None:
            server.inflight += count
        return server

    def release(self, server: Server, attempt: Attempt) -> None:
        if attempt in server.requests:
            del server.requests[attempt]
            server.inflight -= attempt.count

    def kill(self, number: int) -> list[Attempt]:
        """A server dies; returns what was on it."""
        server = self._servers[number]
        lost, server.requests = list(server.requests), {}
        server.inflight, server.ready = 0, False
        self.restarts += 1
        return lost

    def revive(self, number: int) -> None:
        self._servers[number].ready = True


@dataclass(slots=True, eq=False)
class VirtualEndpoint:
    """An imagined inference server."""

    url: str = "http://virtual/v1"
    healthy: bool = True
    inflight: int = 0
    limit: int = 1
    version: int = 0
    version_newest: int = 0
    error: str = ""
    source: str = ""
    leaving: bool = False


class VirtualPool:
    """Inference servers that take `max_inflight` together; they come and go at once."""

    def __init__(self, max_inflight: int, endpoints: int = 1) -> None:
        self._max_inflight = max_inflight
        self._turn = 0
        self.endpoints: list[VirtualEndpoint] = [VirtualEndpoint()]
        self._share_out()
        for number in range(2, endpoints + 1):
            self.add_endpoint(f"http://virtual-{number}/v1")

    @property
    def endpoint(self) -> VirtualEndpoint:
        """The first of them, where there is one."""
        return self.endpoints[0]

    @property
    def limit(self) -> int:
        total = 0
        for one in self.endpoints:  # asked at every event
            if one.healthy and not one.leaving:
                total += one.limit
        return total

    def acquire(self, n: int, prefer: Any = None) -> VirtualEndpoint | None:
        ready = self._ready()
        if prefer not in ready:
            at = next_in_turn(ready, self._turn)
            if at is None:
                return None
            self._turn, prefer = at + 1, ready[at]
        chosen: VirtualEndpoint = prefer
        chosen.inflight += n
        return chosen

    def release(self, endpoint: VirtualEndpoint, n: int) -> None:
        endpoint.inflight -= n
        self._let_go(endpoint)

    def note_success(self, endpoint: Any) -> None: ...
    def note_failure(self, endpoint: Any, kind: str) -> None: ...

    def explain(self) -> str:
        return "" if self._ready() else "it is down"

    def refuse_max_inflight(self, value: int) -> str:
        return "" if value >= 1 else f"{value} is below 1"

    def set_max_inflight(self, value: int) -> None:
        self._max_inflight = value
        self._share_out()

    def refuse_add(self, url: str) -> str:
        return "it is there" if any(one.url == url and not one.leaving for one in self.endpoints) else ""

    def add_endpoint(self, url: str) -> None:
        for one in self.endpoints:
            if one.url == url:
                one.leaving = False
                break
        else:
            like = self.endpoints[0]
            self.endpoints.append(replace(like, url=url, inflight=0, leaving=False, source=""))
        self._share_out()

    def refuse_remove(self, url: str) -> str:
        others = [one for one in self.endpoints if one.url != url and not one.leaving]
        there = any(one.url == url and not one.leaving for one in self.endpoints)
        return "" if others and there else "it is the last one, or not there"

    def remove_endpoint(self, url: str) -> None:
        for one in list(self.endpoints):
            if one.url == url:
                one.leaving = True
                self._let_go(one)
        self._share_out()

    def take_in(self, url: str, source: str) -> None:
        if not self.refuse_add(url):
            self.add_endpoint(url)
            next(one for one in self.endpoints if one.url == url).source = source

    def let_go(self, url: str) -> None:
        if any(one.url == url and one.source for one in self.endpoints):
            self.remove_endpoint(url)

    def _ready(self) -> list[VirtualEndpoint]:
        return [one for one in self.endpoints if one.healthy and not one.leaving]

    def _share_out(self) -> None:
        staying = [one for one in self.endpoints if not one.leaving]
        for one, share in zip(staying, even_shares(self._max_inflight, len(staying)), strict=True):
            one.limit = share

    def _let_go(self, endpoint: VirtualEndpoint) -> None:
        if endpoint.leaving and not endpoint.inflight and endpoint in self.endpoints:
            self.endpoints.remove(endpoint)
