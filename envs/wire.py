"""The wire between the service and an env server: message types and their encoding.

A message is a list of ZMQ frames: one msgpack header (a tagged map, `type` names the message) and, for a
`result`, four raw frames behind it: all tokens (int32), all masks (uint8), all log-probabilities (float32),
each concatenated over the sequences in order and little-endian, and the transcripts (a msgpack list, one
entry per rollout, opaque to the service). The client is a DEALER, the server a ROUTER.
Nothing is pickled. A frame that does not decode is a `WireError` for the caller to count.
"""

from typing import Any, Literal

import msgspec

PROTOCOL = 1
"""Raised whenever a message changes its meaning; both sides refuse another number."""

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""Largest frame either side accepts."""


class WireError(ValueError):
    """A message that cannot be understood."""


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """Client's first message on a connection, repeated until answered; opens the lease and fixes what all its runs share."""

    protocol: int
    client: str
    env: str
    model: str
    sampling: dict[str, Any]
    system_prompt: str | None = None
    api_key_env: str | None = None
    train: bool = True


class Run(msgspec.Struct, tag="run", frozen=True):
    """Do one rollout, or one group of `count` rollouts that is scored together."""

    id: int
    kind: Literal["rollout", "group"]
    split: str
    index: int
    base_url: str
    count: int = 1
    session: str = ""
    cache_salt: str = ""
    timeout_s: float = 0.0


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Stop a run; harmless when it is unknown or has ended. A cancelled run is answered with a failure."""

    id: int


class Ping(msgspec.Struct, tag="ping", frozen=True):
    """Renews the lease; `sent` comes back in the pong."""

    sent: float


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """Finish what runs, accept nothing new, then answer `drained`."""


class Bye(msgspec.Struct, tag="bye", frozen=True):
    """The client leaves: its lease ends now and its runs are cancelled."""


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """The server is alive and speaks the protocol; it may still be loading."""

    protocol: int
    env: str
    pid: int
    host: str


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The environment is loaded and runs are welcome. `tasks` has the number per split, None where unbounded."""

    env: str
    tasks: dict[str, int | None]
    group_scored: bool
    capacity: int


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The handshake failed for good; `reason` names both sides."""

    protocol: int
    reason: str


class RolloutHeader(msgspec.Struct, frozen=True):
    """One rollout of a result; `lengths` are the tokens of each of its sequences."""

    reward: float
    lengths: list[int]
    stop_reason: str
    truncated: bool
    metrics: dict[str, float]
    timings: dict[str, float]


class Result(msgspec.Struct, tag="result", frozen=True):
    """A run ended well; the array frames follow."""

    id: int
    rollouts: list[RolloutHeader]


class Failure(msgspec.Struct, tag="failure", frozen=True):
    """A run ended badly. `kind` is a short snake_case name to count by; `detail` is for the log only."""

    id: int
    kind: str
    message: str
    retryable: bool
    detail: str = ""


class ServerStats(msgspec.Struct, frozen=True):
    """How a server is doing."""

    inflight: int
    done: int
    failed: int
    malformed: int
    loop_lag_s: float
    rss_bytes: int


class Pong(msgspec.Struct, tag="pong", frozen=True):
    """Answer to a ping."""

    sent: float
    stats: ServerStats


class Drained(msgspec.Struct, tag="drained", frozen=True):
    """Nothing runs any more and nothing new is accepted."""


ToServer = Hello | Run | Cancel | Ping | Drain | Bye
ToClient = Welcome | Ready | Refused | Result | Failure | Pong | Drained

_encoder = msgspec.msgpack.Encoder()
_to_server = msgspec.msgpack.Decoder(ToServer)
_to_client = msgspec.msgpack.Decoder(ToClient)


def encode(message: ToServer | ToClient) -> bytes:
    """The header frame of a message."""
    return _encoder.encode(message)
