"""What the service and a trainer say to each other.

A message is a list of frames: one msgpack header (a tagged map, `type` names it) and, for `served`, the frames of
the batch behind it (see `batch`). Requests carry an id that the answer repeats; every request may be
sent again, and an answer means that the service has recorded what it says. The trainer is a DEALER, the service a
ROUTER; a connection starts with `join`, which carries the protocol's version.

A trainer imports this, so it needs msgspec only and nothing else of the project.
"""

from typing import Any

import msgspec

PROTOCOL = 1
"""Raised whenever a message changes its meaning; both sides refuse another number."""


class ProtocolError(ValueError):
    """A message that cannot be understood."""


class Join(msgspec.Struct, tag="join", frozen=True):
    """A rank's first message on a connection. `client` is new for every client object."""

    protocol: int
    rank: int
    world_size: int
    client: str
    host: str = ""
    pid: int = 0


class Next(msgspec.Struct, tag="next", frozen=True):
    """The batch of step `after` + 1, as soon as there is one."""

    id: int
    after: int


class Get(msgspec.Struct, tag="get", frozen=True):
    """The batch of a step, if it is there now."""

    id: int
    step: int


class Ack(msgspec.Struct, tag="ack", frozen=True):
    """This rank is done with a batch."""

    id: int
    step: int


class Publish(msgspec.Struct, tag="publish", frozen=True):
    """A version of the policy can be sampled from; it comes from training up to `step`, where the rank knows."""

    id: int
    version: int
    path: str | None = None
    step: int = 0


class Done(msgspec.Struct, tag="done", frozen=True):
    """The trainer wants no more batches."""

    id: int


class Ping(msgspec.Struct, tag="ping", frozen=True):
    """Answered by a pong, or by `unknown` when the service does not know this connection."""


class Leave(msgspec.Struct, tag="leave", frozen=True):
    """The rank closes its connection in good order."""


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """The rank has joined. `after` is the last step before the first that it has not acknowledged."""

    protocol: int
    run: str
    world_size: int
    after: int
    version: int


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The rank cannot join, or can no longer be served; `reason` names both sides."""

    reason: str


class Unknown(msgspec.Struct, tag="unknown", frozen=True):
    """The connection is new to the service: join, then ask again."""


class Served(msgspec.Struct, tag="served", frozen=True):
    """The frames of a batch follow."""

    id: int
    step: int


class Missing(msgspec.Struct, tag="missing", frozen=True):
    """What was asked for cannot be had; `reason` says why."""

    id: int
    reason: str


class Finished(msgspec.Struct, tag="finished", frozen=True):
    """There will be no further batch."""

    id: int
    reason: str


class Ok(msgspec.Struct, tag="ok", frozen=True):
    """It is done and recorded; `note` says what was odd about it."""

    id: int
    note: str = ""


class Pong(msgspec.Struct, tag="pong", frozen=True):
    """The service is there. Also sent unasked, to find out whether a rank still is."""


ToServer = Join | Next | Get | Ack | Publish | Done | Ping | Leave
ToTrainer = Welcome | Refused | Unknown | Served | Missing | Finished | Ok | Pong
Request = Next | Get | Ack | Publish | Done
Answer = Served | Missing | Finished | Ok

_encoder = msgspec.msgpack.Encoder()
_to_server = msgspec.msgpack.Decoder(ToServer)
_to_trainer = msgspec.msgpack.Decoder(ToTrainer)


def encode(message: ToServer | ToTrainer) -> bytes:
    """The header frame of a message."""
    return _encoder.encode(message)


def decode_to_server(frame: Any) -> ToServer:
    """A trainer's message; raises ProtocolError."""
    try:
        message: ToServer = _to_server.decode(frame)
    except msgspec.MsgspecError as error:
        raise ProtocolError(str(error)) from error
    return message


def decode_to_trainer(frame: Any) -> ToTrainer:
    """The service's message; raises ProtocolError."""
    try:
        message: ToTrainer = _to_trainer.decode(frame)
    except msgspec.MsgspecError as error:
        raise ProtocolError(str(error)) from error
    return message
