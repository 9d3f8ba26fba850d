"""The messages between the service and an env server, and their limits; `envs.wire` turns them into frames and back.

A message is a tagged map, `type` names it. The client is the service, the server hosts the environment. Fields are
only ever added with a default; a message that changes its meaning raises PROTOCOL. docs/wire.md is the catalogue.
"""

from typing import Annotated, Any, Literal

import msgspec

from envs.rollout import Float32s, Int32s, Uint8s

PROTOCOL = 2
"""The version that this release speaks by itself; raised whenever a message changes its meaning. See `envs.wire.VERSIONS`."""

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""Largest frame that a client accepts."""

MAX_REQUEST_BYTES = 4 * 1024 * 1024
"""Largest frame that a server accepts."""

MAX_HEADER_BYTES = 4 * 1024 * 1024
"""Largest header of a result; what is larger belongs into the transcript."""

MAX_COUNT = 4096
"""Most rollouts of one request."""

SERVER_LOST = "server_lost"
"""Kind of the failure that a client gives the requests of a server that went away; no server may say it."""

RESULT_FRAMES = 3
"""Header, arrays, transcripts."""

Id = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Index = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Digest = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""63 bits of a hash of a task's content (`envs.digests`), 0 where none was made; the same task has the same everywhere."""
Name = Annotated[str, msgspec.Meta(max_length=1024)]


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """Client's first message on a connection, repeated until answered; opens the lease and fixes what all its requests share.

    `env` is the environment's id. `client` names the sender for good: a hello with the same name on another
    connection ends the older one. The lease lasts `lease_s` from the last message of any kind.
    """

    protocol: int
    client: Name
    env: Name
    model: Name
    sampling: dict[str, Any]
    system_prompt: str | None = None
    api_key_env: Name | None = None
    train: bool = True
    splits: list[Name] = []
    lease_s: float = 15.0


class Request(msgspec.Struct, tag="run", frozen=True):
    """Do one rollout, or one group of `count` rollouts that is scored together.

    Ids are chosen by the client and unique on its connection. `timeout_s` of 0 is no limit.
    `model` is asked for in place of the one in the hello, where it is said.
    """

    id: Id
    kind: Literal["rollout", "group"]
    split: Name
    index: Index
    base_url: Name
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)] = 1
    session: Name = ""
    cache_salt: Name = ""
    timeout_s: float = 0.0
    model: Name | msgspec.UnsetType = msgspec.UNSET


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Stop a request; harmless when it is unknown or has ended. A cancelled one is answered with a failure."""

    id: Id


class Ping(msgspec.Struct, tag="ping", frozen=True):
    """Renews the lease; `sent` comes back in the pong."""

    sent: float


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """Finish what runs, accept nothing new from this client, then answer `drained`."""


class Bye(msgspec.Struct, tag="bye", frozen=True):
    """The client leaves: its lease ends now and its requests are cancelled."""


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """The server is alive and speaks the protocol; it may still be loading."""

    protocol: int
    env: Name
    pid: int
    host: Name


class Ready(msgspec.Struct, tag="ready", frozen=True, omit_defaults=True):
    """The environment is loaded and requests are welcome.

    `tasks` has the number of tasks per asked split, None where unbounded. `capacity` is the number of
    rollouts that this client may have in flight here. `samples` has the digests of a few tasks per asked split, by index.
    `models` says that a request may name another model than the hello.
    """

    env: Name
    tasks: dict[Name, Index | None]
    group_scored: bool
    capacity: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    samples: dict[Name, dict[Index, Digest]] = {}
    models: bool = False


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The handshake failed for good; `reason` names both sides."""

    protocol: int
    reason: str


class Expired(msgspec.Struct, tag="expired", frozen=True):
    """The server holds no lease for this connection, so nothing of it is under way; say hello again."""


class RolloutHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rollout of a result; `lengths` are the tokens of each of its sequences.

    The lists from `seats` on have one entry per sequence, or none where every sequence is as the rollout is: without
    a seat, with its reward, temperature and end.
    """

    reward: float
    lengths: list[Annotated[int, msgspec.Meta(ge=1, lt=2**31)]]
    stop_reason: str = "stop"
    truncated: bool = False
    metrics: dict[str, float] = {}
    timings: dict[str, float] = {}
    temperature: float | None = None
    seats: list[Name] = []
    rewards: list[float] = []
    temperatures: list[float | None] = []
    stop_reasons: list[str] = []
    truncations: list[bool] = []


class ResultHeader(msgspec.Struct, tag="result", frozen=True, omit_defaults=True):
    """A request ended well; the other frames follow. An evaluation's rollouts may have no sequences."""

    id: Id
    rollouts: Annotated[list[RolloutHeader], msgspec.Meta(min_length=1, max_length=MAX_COUNT)]
    digest: Digest = 0


class Failure(msgspec.Struct, tag="failure", frozen=True, omit_defaults=True):
    """A request ended badly. `kind` is a short snake_case name to count by; `detail` is for the log only.

    `where` is the last line of the environment's own code that an exception of it passed, if it was one. `inflight` is never sent: the client sets it for the requests of a server that it lost.
    """

    id: Id
    kind: Name
    message: str
    retryable: bool
    detail: str = ""
    inflight: int = 0
    where: str = ""

    @property
    def described(self) -> str:
        """What happened and where, in one line."""
        return f"{self.message}, at {self.where}" if self.where else self.message

    @property
    def lost(self) -> bool:
        """Whether the server went away with the request, perhaps because of it.

        Then `inflight` is the number of requests that it had in flight, this one included; 0 when this one was not sent.
        """
        return self.kind == SERVER_LOST


class ServerStats(msgspec.Struct, frozen=True):
    """How a server is doing: rollouts in flight, requests ended, malformed messages, longest stall of its loop, memory."""

    inflight: int
    done: int
    failed: int
    malformed: int
    loop_lag_s: float
    rss_bytes: int


class Pong(msgspec.Struct, tag="pong", frozen=True):
    """Answer to a ping. The server also sends one unasked (`sent` 0) every second: its side of the heartbeat."""

    sent: float
    stats: ServerStats


class Drained(msgspec.Struct, tag="drained", frozen=True):
    """Nothing of this client runs any more and nothing new is accepted."""


ToServer = Hello | Request | Cancel | Ping | Drain | Bye
ToClient = Welcome | Ready | Refused | Expired | ResultHeader | Failure | Pong | Drained


class Result(msgspec.Struct, frozen=True, eq=False):
    """A decoded result; the arrays are read-only views on the received frames, over all sequences in order."""

    id: int
    rollouts: list[RolloutHeader]
    tokens: Int32s
    mask: Uint8s
    logprobs: Float32s
    transcript: bytes
    digest: int = 0


FromServer = Welcome | Ready | Refused | Expired | Failure | Pong | Drained | Result
