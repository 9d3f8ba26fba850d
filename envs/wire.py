"""The wire between the service and an env server: message types, their encoding and their limits.

A message is a list of ZMQ frames: one msgpack header (a tagged map, `type` names the message) and, for a
`result`, four raw frames behind it: all tokens (int32), all masks (uint8), all log-probabilities (float32),
each concatenated over the sequences in order and little-endian, and the transcripts (a msgpack list, one
entry per rollout, opaque to the service). The client is a DEALER, the server a ROUTER.
Nothing is pickled. Whatever arrives either decodes into a message that keeps every promise made here, or
is a `WireError` for the caller to count; no other exception leaves a decoder. docs/wire.md is the catalogue.
"""

import math
import sys
from collections.abc import Sequence as Seq
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from envs.rollout import Float32s, Int32s, Rollout, Uint8s

PROTOCOL = 1
"""Raised whenever a message changes its meaning; both sides refuse another number."""

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""Largest frame that a client accepts."""

MAX_REQUEST_BYTES = 4 * 1024 * 1024
"""Largest frame that a server accepts."""

MAX_HEADER_BYTES = 4 * 1024 * 1024
"""Largest header of a result; what is larger belongs into the transcript."""

MAX_COUNT = 4096
"""Most rollouts of one run."""

RESULT_FRAMES = 5
"""Header, tokens, masks, log-probabilities, transcripts."""

Id = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Index = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Name = Annotated[str, msgspec.Meta(max_length=1024)]


class WireError(ValueError):
    """A message that cannot be understood.

    `run_id` is the run it belongs to and `protocol` the version that its sender speaks, where that much could be read.
    """

    def __init__(self, message: str, *, run_id: int | None = None, protocol: int | None = None) -> None:
        super().__init__(message)
        self.run_id = run_id
        self.protocol = protocol


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """Client's first message on a connection, repeated until answered; opens the lease and fixes what all its runs share.

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


class Run(msgspec.Struct, tag="run", frozen=True):
    """Do one rollout, or one group of `count` rollouts that is scored together.

    Ids are chosen by the client and unique on its connection. `timeout_s` of 0 is no limit.
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


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Stop a run; harmless when it is unknown or has ended. A cancelled run is answered with a failure."""

    id: Id


class Ping(msgspec.Struct, tag="ping", frozen=True):
    """Renews the lease; `sent` comes back in the pong."""

    sent: float


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """Finish what runs, accept nothing new from this client, then answer `drained`."""


class Bye(msgspec.Struct, tag="bye", frozen=True):
    """The client leaves: its lease ends now and its runs are cancelled."""


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """The server is alive and speaks the protocol; it may still be loading."""

    protocol: int
    env: Name
    pid: int
    host: Name


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The environment is loaded and runs are welcome.

    `tasks` has the number of tasks per asked split, None where unbounded. `capacity` is the number of
    rollouts that this client may have in flight here.
    """

    env: Name
    tasks: dict[Name, Index | None]
    group_scored: bool
    capacity: Annotated[int, msgspec.Meta(ge=1, le=2**20)]


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The handshake failed for good; `reason` names both sides."""

    protocol: int
    reason: str


class Expired(msgspec.Struct, tag="expired", frozen=True):
    """The server holds no lease for this connection, so none of its runs is under way; say hello again."""


class RolloutHeader(msgspec.Struct, frozen=True):
    """One rollout of a result; `lengths` are the tokens of each of its sequences."""

    reward: float
    lengths: list[Annotated[int, msgspec.Meta(ge=1, lt=2**31)]]
    stop_reason: str
    truncated: bool
    metrics: dict[str, float]
    timings: dict[str, float]


class Result(msgspec.Struct, tag="result", frozen=True):
    """A run ended well; the array frames follow. An evaluation's rollouts may have no sequences."""

    id: Id
    rollouts: Annotated[list[RolloutHeader], msgspec.Meta(min_length=1, max_length=MAX_COUNT)]


class Failure(msgspec.Struct, tag="failure", frozen=True):
    """A run ended badly. `kind` is a short snake_case name to count by; `detail` is for the log only."""

    id: Id
    kind: Name
    message: str
    retryable: bool
    detail: str = ""


class ServerStats(msgspec.Struct, frozen=True):
    """How a server is doing: rollouts in flight, runs ended, malformed messages, longest stall of its loop, memory."""

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


ToServer = Hello | Run | Cancel | Ping | Drain | Bye
ToClient = Welcome | Ready | Refused | Expired | Result | Failure | Pong | Drained


class ResultArrays(msgspec.Struct, frozen=True, eq=False):
    """A decoded result; the arrays are read-only views on the received frames, over all sequences in order."""

    id: int
    rollouts: list[RolloutHeader]
    tokens: Int32s
    mask: Uint8s
    logprobs: Float32s
    transcript: bytes


_encoder = msgspec.msgpack.Encoder()
_to_server: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)
_to_client: msgspec.msgpack.Decoder[ToClient] = msgspec.msgpack.Decoder(ToClient)


class _Addressed(msgspec.Struct):
    """Just the id of a message, to tell whose a broken one is."""

    id: Id


class _Greeting(msgspec.Struct):
    """The part of a handshake that every version of the protocol has."""

    type: Literal["hello", "welcome", "refused"]
    protocol: int


_addressed = msgspec.msgpack.Decoder(_Addressed)
_greeting = msgspec.msgpack.Decoder(_Greeting)

# Beside its own error msgspec raises what Python does for text that is no UTF-8 and for nesting without end.
_BROKEN = (msgspec.DecodeError, ValueError, OverflowError, RecursionError)

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")
_UINT8 = np.dtype("u1")


def encode(message: ToServer | ToClient) -> bytes:
    """The header frame of a message."""
    return _encoder.encode(message)


def decode_to_server(frames: Seq[bytes]) -> ToServer:
    """A client's message, without the routing id in front of it."""
    if len(frames) != 1:
        raise WireError(f"a message to a server has 1 frame, got {len(frames)}")
    try:
        message = _to_server.decode(frames[0])
    except _BROKEN as error:
        raise _undecodable(frames[0], f"not a message to a server: {error}") from None
    if type(message) is Run:
        if not 0 <= message.timeout_s < math.inf:
            raise WireError(
                f"timeout_s must be finite and not negative, got {message.timeout_s}", run_id=message.id
            )
        if message.kind == "rollout" and message.count != 1:
            raise WireError(f"a rollout has a count of 1, got {message.count}", run_id=message.id)
    elif type(message) is Hello and not 0 < message.lease_s < math.inf:
        raise WireError(f"lease_s must be finite and positive, got {message.lease_s}")
    return message


def decode_to_client(
    frames: Seq[bytes],
) -> Welcome | Ready | Refused | Expired | Failure | Pong | Drained | ResultArrays:
    """A server's message; results come with their arrays, checked to fit their header."""
    if not frames or len(frames[0]) > MAX_HEADER_BYTES:
        raise WireError(f"a header has 1 to {MAX_HEADER_BYTES} bytes, got {len(frames[0]) if frames else 0}")
    try:
        message = _to_client.decode(frames[0])
    except _BROKEN as error:
        raise _undecodable(frames[0], f"not a message to a client: {error}") from None
    if type(message) is Result:
        return _with_arrays(message, frames)
    if len(frames) != 1:
        raise WireError(f"a {type(message).__name__.lower()} has 1 frame, got {len(frames)}")
    assert not isinstance(message, Result)
    return message


def encode_result(run_id: int, rollouts: Seq[Rollout]) -> list[bytes]:
    """The frames of a result; the rollouts have been checked."""
    headers = []
    sequences = []
    transcripts = []
    for rollout in rollouts:
        sequences += rollout.sequences
        headers.append(
            RolloutHeader(
                reward=float(rollout.reward),
                lengths=[len(sequence.tokens) for sequence in rollout.sequences],
                stop_reason=rollout.stop_reason,
                truncated=bool(rollout.truncated),
                metrics={name: float(value) for name, value in rollout.metrics.items()},
                timings={name: float(value) for name, value in rollout.timings.items()},
            )
        )
        transcripts.append(
            {
                "messages": rollout.messages,
                "reward": float(rollout.reward),
                "metrics": rollout.metrics,
                "stop_reason": rollout.stop_reason,
                "truncated": rollout.truncated,
                "timings": rollout.timings,
            }
        )
    return [
        _encoder.encode(Result(run_id, headers)),
        b"".join([_raw(sequence.tokens, _INT32) for sequence in sequences]),
        b"".join([_raw(sequence.mask, _UINT8) for sequence in sequences]),
        b"".join([_raw(sequence.logprobs, _FLOAT32) for sequence in sequences]),
        _transcript_encoder.encode(transcripts),
    ]


def _readable(value: object) -> object:
    """Stand-in for what an environment put into its messages or metrics that msgpack does not know."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return repr(value)


_transcript_encoder = msgspec.msgpack.Encoder(enc_hook=_readable)


def _raw(array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> bytes:
    if sys.byteorder == "big" or array.dtype != dtype:
        array = array.astype(dtype)
    return array.tobytes()


def _with_arrays(result: Result, frames: Seq[bytes]) -> ResultArrays:
    """The arrays behind a result's header, or a WireError that names the run."""
    if len(frames) != RESULT_FRAMES:
        raise WireError(f"a result has {RESULT_FRAMES} frames, got {len(frames)}", run_id=result.id)
    _, tokens, mask, logprobs, transcript = frames
    total = 0
    for rollout in result.rollouts:
        total += sum(rollout.lengths)
        if not math.isfinite(rollout.reward):
            raise WireError(f"reward is {rollout.reward}", run_id=result.id)
        if rollout.metrics and not all(map(math.isfinite, rollout.metrics.values())):
            raise WireError("a metric is not finite", run_id=result.id)
    if len(tokens) != 4 * total or len(mask) != total or len(logprobs) != 4 * total:
        raise WireError(
            f"{total} tokens announced, but the frames hold {len(tokens)}, {len(mask)} and {len(logprobs)} bytes",
            run_id=result.id,
        )
    floats = np.frombuffer(logprobs, _FLOAT32)
    if not np.logical_and.reduce(np.isfinite(floats)):
        raise WireError("log-probabilities contain NaN or infinity", run_id=result.id)
    return ResultArrays(
        result.id,
        result.rollouts,
        np.frombuffer(tokens, _INT32),
        np.frombuffer(mask, _UINT8),
        floats,
        transcript,
    )


def _undecodable(header: bytes, message: str) -> WireError:
    """The error for a broken header, with the id or the protocol that can still be read from it.

    With them a run fails instead of waiting, and a peer of another version learns that it is one.
    """
    try:
        return WireError(message, run_id=_addressed.decode(header).id)
    except _BROKEN:
        pass
    try:
        return WireError(message, protocol=_greeting.decode(header).protocol)
    except _BROKEN:
        return WireError(message)
