"""The trainer's ranks: who is connected as which, and who may not.

A rank has one connection, the newest, and a connection is one rank. A process whose rank was taken over is told so and
is not let in again, or two processes would take the rank from each other for ever. Where the service has a token,
who does not present it learns nothing else. A process that joined before the run was set back is refused, and takes nobody's place: what it
has was given up. No I/O: what is to be sent goes through `send`.
"""

import hmac
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import structlog

from orchestrator.trainer.protocol import PROTOCOL, PROTOCOLS, Join, Refused, ToTrainer
from orchestrator.trainer_link.thinning import Thinned

log = structlog.get_logger("trainer")

_REMEMBERED_CLIENTS = 1024


@dataclass(slots=True)
class Rank:
    """A connected rank.

    `waiting` is the id of its request for the batch behind the last one, `told` whether it knows that the run is over,
    `rewinding` the id of a request that wants the run to be set back if need be.
    """

    number: int
    peer: bytes
    client: str
    host: str
    pid: int
    protocol: int
    waiting: int | None = None
    told: bool = False
    rewinding: int | None = None


class Ranks:
    """The ranks that are connected."""

    def __init__(
        self,
        *,
        world_size: int,
        token: str | None,
        rewound: Sequence[int],
        send: Callable[[bytes, ToTrainer], None],
        on_gone: Callable[[Rank], None],
    ) -> None:
        """`rewound`: the steps that the run was set back to. `on_gone` is called with a rank whose connection is over, however, or
        whose place another process has taken."""
        self._on_gone = on_gone
        self._world_size = world_size
        self._token = token
        self._rewound = rewound
        self._send = send
        self._ranks: dict[int, Rank] = {}
        self._peers: dict[bytes, Rank] = {}
        self._replaced: OrderedDict[str, None] = OrderedDict()
        self._refused = Thinned()

    def __iter__(self) -> Iterator[Rank]:
        return iter(sorted(self._ranks.values(), key=lambda rank: rank.number))

    def by_peer(self, peer: bytes) -> Rank | None:
        """The rank of a connection; None for one that has not joined or was replaced."""
        return self._peers.get(peer)

    def join(self, peer: bytes, join: Join) -> Rank | None:
        """Let a rank in, in place of an older process if need be; None when it was refused."""
        reason = self._refusal(join)
        if reason:
            if self._refused.is_worth_a_line():
                facts = {"rank": join.rank, "host": join.host, "pid": join.pid, "reason": reason}
                log.warning("trainer.refused", **facts, count=self._refused.count)
            self._send(peer, Refused(reason))
            return None
        other = self._peers.get(peer)
        if other is not None and other.number != join.rank:
            self._remove(other)
        old = self._ranks.pop(join.rank, None)
        if old is not None:
            del self._peers[old.peer]
        rank = Rank(join.rank, peer, join.client, join.host, join.pid, join.protocol)
        self._ranks[join.rank] = self._peers[peer] = rank
        if old is not None and old.client != join.client:
            self._replace(old, join)
        elif old is None:
            facts = {"rank": join.rank, "world_size": join.world_size, "host": join.host, "pid": join.pid}
            log.info("trainer.joined", **facts, connected=len(self._ranks))
        return rank

    def leave(self, rank: Rank) -> None:
        """A rank closes its connection in good order."""
        self._remove(rank)
        log.info("trainer.left", rank=rank.number, connected=len(self._ranks))

    def lose(self, peer: bytes) -> None:
        """A connection is gone; harmless when it is no rank's."""
        rank = self._peers.get(peer)
        if rank is not None:
            self._remove(rank)
            log.warning("trainer.rank_lost", rank=rank.number, host=rank.host, pid=rank.pid)

    def _remove(self, rank: Rank) -> None:
        del self._peers[rank.peer], self._ranks[rank.number]
        self._on_gone(rank)

    def _refusal(self, join: Join) -> str:
        if self._token is not None and not hmac.compare_digest(join.token.encode(), self._token.encode()):
            what = "another token than" if join.token else "no token, but"
            return (
                f"the trainer presented {what} the orchestrator asks for (trainer.token_env); give the trainer the same "
                "one, as token=... or in ORCHESTRATOR_TRAINER_TOKEN"
            )
        if join.protocol not in PROTOCOLS:
            return (
                f"the trainer speaks protocol {join.protocol}, this orchestrator {PROTOCOL} (it understands "
                f"{min(PROTOCOLS)} to {PROTOCOL}); install one version on both sides"
            )
        if join.world_size != self._world_size or not 0 <= join.rank < self._world_size:
            return (
                f"the trainer joined as rank {join.rank} of world size {join.world_size}, the orchestrator is configured "
                f"for world size {self._world_size} (trainer.world_size); start as many ranks, or restart the orchestrator with "
                "another trainer.world_size, which shares out anew what was not acknowledged"
            )
        if join.client in self._replaced:
            return f"a newer process has joined as rank {join.rank}"
        if join.rewinds is not None and join.rewinds < len(self._rewound):
            back = min(self._rewound[join.rewinds :])
            return (
                f"the run was set back to step {back} since this process joined, and what it has of later steps was given up; restart it "
                f"from its checkpoint of step {self._rewound[-1]}"
            )
        return ""

    def _replace(self, old: Rank, join: Join) -> None:
        self._on_gone(old)
        self._replaced[old.client] = None
        while len(self._replaced) > _REMEMBERED_CLIENTS:
            self._replaced.popitem(last=False)
        processes = {"old": f"{old.host}:{old.pid}", "new": f"{join.host}:{join.pid}"}
        log.warning("trainer.rank_replaced", rank=join.rank, **processes)
        reason = f"a newer process has joined as rank {join.rank} (pid {join.pid} on {join.host})"
        self._send(old.peer, Refused(reason))
