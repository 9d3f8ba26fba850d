"""The wire between the service and an env server: messages, from frames and to frames.

A message is a list of ZMQ frames: one msgpack header (a tagged map, `type` names the message) and, for a
`result`, four raw frames behind it: all tokens (int32), all masks (uint8), all log-probabilities (float32),
each concatenated over the sequences in order and little-endian, and the transcripts (a msgpack list, one
entry per rollout, opaque to the service). The client is a DEALER, the server a ROUTER.
Nothing is pickled. Whatever arrives either decodes into a message that keeps every promise made here, or
is a `WireError` for the caller to count; no other exception leaves a decoder. docs/wire.md is the catalogue.
"""

import math
import sys
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

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
from envs.rollout import InvalidRolloutError, Rollout, find_flaw, fits_float32

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


class WireError(ValueError):
    """A message that cannot be understood.

    `request_id` is the request it answers or is, and `protocol` the version that its sender speaks, where that
    much could be read. `kind` is what a request with such an answer fails as.
    """

    kind = "malformed_result"

    def __init__(self, message: str, *, request_id: int | None = None, protocol: int | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.protocol = protocol


class InvalidResultError(WireError):
    """A result that is well formed, but whose content cannot be trained on."""

    kind = "invalid_rollout"


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


_transcript_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])
_addressed = msgspec.msgpack.Decoder(_Addressed)
_greeting = msgspec.msgpack.Decoder(_Greeting)

# Beside its own error msgspec raises what Python does for text that is no UTF-8 and for nesting without end.
_BROKEN = (msgspec.DecodeError, ValueError, OverflowError, RecursionError)

_FRAME_NAMES = ("rewards, metrics and lengths", "tokens", "masks", "log-probabilities", "transcripts")
_FRAME_LIMITS = (MAX_HEADER_BYTES, *[MAX_MESSAGE_BYTES] * (RESULT_FRAMES - 1))

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")
_UINT8 = np.dtype("u1")


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
    except _BROKEN:
        return PROTOCOL
    return protocol if protocol in VERSIONS else PROTOCOL


def spoken() -> str:
    """The versions that this release speaks, in words."""
    return " or ".join(map(str, sorted(VERSIONS)))


def _decode_to_server_1(frames: Seq[bytes]) -> ToServer:
    if len(frames) != 1:
        raise WireError(f"a message to a server has 1 frame, got {len(frames)}")
    try:
        message = _to_server.decode(frames[0])
    except _BROKEN as error:
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


def _decode_to_client_1(frames: Seq[bytes]) -> FromServer:
    if not frames or len(frames[0]) > MAX_HEADER_BYTES:
        raise WireError(f"a header has 1 to {MAX_HEADER_BYTES} bytes, got {len(frames[0]) if frames else 0}")
    try:
        message = _to_client.decode(frames[0])
    except _BROKEN as error:
        raise _undecodable(frames[0], f"not a message to a client: {error}") from None
    if type(message) is ResultHeader:
        return _with_arrays(message, frames)
    if len(frames) != 1:
        raise WireError(f"a {type(message).__name__.lower()} has 1 frame, got {len(frames)}")
    assert not isinstance(message, ResultHeader)
    return message


def encode_result(request_id: int, rollouts: Seq[Rollout]) -> list[bytes]:
    """The frames of a result of rollouts that have been checked; InvalidRolloutError for what cannot be sent."""
    try:
        frames = _result_frames(request_id, rollouts)
    # Text that is no Unicode, numbers beyond 64 bits, endless nesting, and whatever the repr() of an object raises.
    except Exception as error:
        raise InvalidRolloutError(
            f"the rollout cannot be encoded: {type(error).__name__}: {error}"
        ) from error
    for name, frame, limit in zip(_FRAME_NAMES, frames, _FRAME_LIMITS, strict=True):
        if len(frame) > limit:
            raise InvalidRolloutError(
                f"{name} of {len(frame):,} bytes cannot be sent; the limit is {limit:,}"
            )
    return frames


def _result_frames(request_id: int, rollouts: Seq[Rollout]) -> list[bytes]:
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
        _encoder.encode(ResultHeader(request_id, headers)),
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


def _with_arrays(result: ResultHeader, frames: Seq[bytes]) -> Result:
    """The arrays behind a result's header, or a WireError that names the request."""
    if len(frames) != RESULT_FRAMES:
        raise WireError(f"a result has {RESULT_FRAMES} frames, got {len(frames)}", request_id=result.id)
    _, tokens, mask, logprobs, transcript = frames
    lengths: list[int] = []
    for rollout in result.rollouts:
        lengths += rollout.lengths
        if not fits_float32(rollout.reward):
            raise InvalidResultError(f"reward is {rollout.reward}", request_id=result.id)
        for named in (rollout.metrics, rollout.timings):
            if named and not all(map(fits_float32, named.values())):
                raise InvalidResultError("a metric or timing is not finite", request_id=result.id)
    total = sum(lengths)
    if len(tokens) != 4 * total or len(mask) != total or len(logprobs) != 4 * total:
        raise WireError(
            f"{total} tokens announced, but the frames hold {len(tokens)}, {len(mask)} and {len(logprobs)} bytes",
            request_id=result.id,
        )
    arrays = np.frombuffer(tokens, _INT32), np.frombuffer(mask, _UINT8), np.frombuffer(logprobs, _FLOAT32)
    flaw = find_flaw(*arrays, lengths) or _flaw_in_transcript(transcript, len(result.rollouts))
    if flaw:
        raise InvalidResultError(flaw, request_id=result.id)
    return Result(result.id, result.rollouts, *arrays, transcript)


def _flaw_in_transcript(transcript: bytes, rollouts: int) -> str:
    """What is wrong with the list of transcripts; what stands in its entries is skipped, not decoded."""
    try:
        entries = len(_transcript_decoder.decode(transcript))
    except _BROKEN as error:
        return f"the transcripts are not a msgpack list: {error}"
    return "" if entries == rollouts else f"{entries} transcripts for {rollouts} rollouts"


class Version(NamedTuple):
    """How messages of one version become the present ones."""

    to_server: Callable[[Seq[bytes]], ToServer]
    to_client: Callable[[Seq[bytes]], FromServer]


VERSIONS: Mapping[int, Version] = {1: Version(_decode_to_server_1, _decode_to_client_1)}
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
    except _BROKEN:
        pass
    try:
        return WireError(message, protocol=_greeting.decode(header).protocol)
    except _BROKEN:
        return WireError(message)
