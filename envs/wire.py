"""The wire between the service and an env server: messages, from frames and to frames.

A message is a list of ZMQ frames: one msgpack header (a tagged map, `type` names the message) and, for a
`result`, two frames behind it: the arrays (all tokens as int32, then all log-probabilities as float32, then all masks
as uint8, each over the sequences in order, little-endian) and the transcripts (a msgpack list, one entry per
rollout, opaque to the service). The client is a DEALER, the server a ROUTER.
Nothing is pickled. Whatever arrives either decodes into a message that keeps every promise made here, or
is a `WireError` for the caller to count; no other exception leaves a decoder. docs/wire.md is the catalogue.
"""

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Literal, NamedTuple

import msgspec

from envs.messages import (
    MAX_COUNT,
    MAX_HEADER_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_REQUEST_BYTES,
    PROTOCOL,
    RESULT_FRAMES,
    SERVER_LOST,
    Bye,
    Cancel,
    Drain,
    Drained,
    Expired,
    Failure,
    FromServer,
    Hello,
    Id,
    Ping,
    Pong,
    Ready,
    Refused,
    Request,
    Result,
    ResultHeader,
    RolloutHeader,
    ServerStats,
    ToClient,
    ToServer,
    Welcome,
)
from envs.results import (
    BROKEN,
    InvalidResultError,
    WireError,
    result_frames,
    result_frames_1,
    with_arrays,
    with_arrays_1,
)
from envs.rollout import InvalidRolloutError, Rollout

__all__ = [
    "MAX_COUNT",
    "MAX_HEADER_BYTES",
    "MAX_MESSAGE_BYTES",
    "MAX_REQUEST_BYTES",
    "PROTOCOL",
    "RESULT_FRAMES",
    "SERVER_LOST",
    "VERSIONS",
    "Bye",
    "Cancel",
    "Drain",
    "Drained",
    "Expired",
    "Failure",
    "FromServer",
    "Hello",
    "InvalidResultError",
    "Ping",
    "Pong",
    "Ready",
    "Refused",
    "Request",
    "Result",
    "ResultHeader",
    "RolloutHeader",
    "ServerStats",
    "ToClient",
    "ToServer",
    "Version",
    "Welcome",
    "WireError",
    "decode_to_client",
    "decode_to_server",
    "encode",
    "encode_result",
    "spoken",
    "version_of",
]


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

_HEADER = "rewards, metrics and lengths"


def encode(message: ToServer | ToClient) -> bytes:
    """The header frame of a message."""
    return _encoder.encode(message)


def decode_to_server(frames: Seq[bytes], protocol: int = PROTOCOL) -> ToServer:
    """A client's message in a version of the protocol, without the routing id in front of it."""
    return VERSIONS[protocol].to_server(frames)


def decode_to_client(frames: Seq[bytes], protocol: int = PROTOCOL) -> FromServer:
    """A server's message in a version of the protocol; results come with their arrays, checked to fit their header."""
    return VERSIONS[protocol].to_client(frames)


def version_of(frames: Seq[bytes]) -> int:
    """The version to read a stranger's message in: what its greeting says, else the present one."""
    try:
        protocol = _greeting.decode(frames[0]).protocol if frames else PROTOCOL
    except BROKEN:
        return PROTOCOL
    return protocol if protocol in VERSIONS else PROTOCOL


def spoken() -> str:
    """The versions that this release speaks, in words."""
    return " or ".join(map(str, sorted(VERSIONS)))


def _decode_to_server(frames: Seq[bytes]) -> ToServer:
    if len(frames) != 1:
        raise WireError(f"a message to a server has 1 frame, got {len(frames)}")
    try:
        message = _to_server.decode(frames[0])
    except BROKEN as error:
        raise _undecodable(frames[0], f"not a message to a server: {error}") from None
    if type(message) is Request:
        if not 0 <= message.timeout_s < math.inf:
            raise WireError(
                f"timeout_s must be finite and not negative, got {message.timeout_s}", request_id=message.id
            )
        if message.kind == "rollout" and message.count != 1:
            raise WireError(f"a rollout has a count of 1, got {message.count}", request_id=message.id)
    elif type(message) is Hello and not 0 < message.lease_s < math.inf:
        raise WireError(f"lease_s must be finite and positive, got {message.lease_s}")
    return message


def _decode_to_client(frames: Seq[bytes], arrays: Callable[[ResultHeader, Seq[bytes]], Result]) -> FromServer:
    if not frames or len(frames[0]) > MAX_HEADER_BYTES:
        raise WireError(f"a header has 1 to {MAX_HEADER_BYTES} bytes, got {len(frames[0]) if frames else 0}")
    try:
        message = _to_client.decode(frames[0])
    except BROKEN as error:
        raise _undecodable(frames[0], f"not a message to a client: {error}") from None
    if type(message) is ResultHeader:
        return arrays(message, frames)
    if len(frames) != 1:
        raise WireError(f"a {type(message).__name__.lower()} has 1 frame, got {len(frames)}")
    assert not isinstance(message, ResultHeader)
    return message


def encode_result(
    request_id: int, rollouts: Seq[Rollout], *, digest: int = 0, protocol: int = PROTOCOL
) -> list[bytes]:
    """The frames of a result of rollouts that have been checked; InvalidRolloutError for what cannot be sent.

    `digest` is the task's. What an older `protocol` cannot say is left out.
    """
    version = VERSIONS[protocol]
    try:
        frames = version.result(request_id, rollouts, digest)
    # Text that is no Unicode, numbers beyond 64 bits, endless nesting, and whatever the repr() of an object raises.
    except Exception as error:
        raise InvalidRolloutError(
            f"the rollout cannot be encoded: {type(error).__name__}: {error}"
        ) from error
    limit = MAX_HEADER_BYTES
    for name, frame in zip(version.frames, frames, strict=True):
        if len(frame) > limit:
            raise InvalidRolloutError(
                f"{name} of {len(frame):,} bytes cannot be sent; the limit is {limit:,}"
            )
        limit = MAX_MESSAGE_BYTES
    return frames


class Version(NamedTuple):
    """How messages of one version become the present ones, and how a result is said in it."""

    to_server: Callable[[Seq[bytes]], ToServer]
    to_client: Callable[[Seq[bytes]], FromServer]
    result: Callable[[int, Seq[Rollout], int], list[bytes]]
    frames: tuple[str, ...]


VERSIONS: Mapping[int, Version] = {
    1: Version(
        _decode_to_server,
        lambda frames: _decode_to_client(frames, with_arrays_1),
        result_frames_1,
        (_HEADER, "tokens", "masks", "log-probabilities", "transcripts"),
    ),
    2: Version(
        _decode_to_server,
        lambda frames: _decode_to_client(frames, with_arrays),
        result_frames,
        (_HEADER, "tokens, log-probabilities and masks", "transcripts"),
    ),
}
"""Versions that both sides still speak, each with its decoders: whoever raises PROTOCOL adds a row and keeps the old.

A client says hello in its newest version. A server that does not speak it says so with the version that it speaks
itself, in which the client says hello again if it can. `hello`, `welcome` and `refused` have their `type` and
`protocol` in every version.
"""


def _undecodable(header: bytes, message: str) -> WireError:
    """The error for a broken header, with the id or the protocol that can still be read from it.

    With them a request fails instead of waiting, and a peer of another version learns that it is one.
    """
    try:
        return WireError(message, request_id=_addressed.decode(header).id)
    except BROKEN:
        pass
    try:
        return WireError(message, protocol=_greeting.decode(header).protocol)
    except BROKEN:
        return WireError(message)
