"""What the service and a trainer say to each other.

A message is a list of frames: one msgpack header (a tagged map, `type` names it) and, for `served`, the frames of
the batch behind it (see `batch`). Requests carry an id that the answer repeats; every request may be
sent again, and an answer means that the service has recorded what it says. The trainer is a DEALER, the service a
ROUTER; a connection starts with `join`, which carries the number of the protocol.

Numbers, names and paths have bounds, which are checked when a message is read: whatever bytes come in, reading
them gives a message within these bounds or ProtocolError, and nothing else.

A trainer imports this, so it needs msgspec only and nothing else of the project.
"""

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

PROTOCOLS = {
    1: "join, next, get, ack, publish, done, ping, leave and their answers",
    2: "join may carry a token; a publication may be answered by missing, when the version cannot be loaded",
    3: "batches say more of each sequence, in one more frame, and how many tokens are trained on; report; publish may wait; checkpointed",
    4: "updating and updated, answered by engines; a pong says how many engines wait for weights",
    5: "welcome says how often the run was set back, and join what the trainer knows of it; updating may name a step, and updated say that nothing was sent; a pong may say that the run is over",
}
"""What each number of the protocol added. The service understands every number in this table.

A new number adds optional fields, with defaults that mean what their absence meant before, so trainers of an
older number go on working. A change that old trainers would misunderstand takes their number out of the table; they
are then refused when they join, with both numbers named.
"""

PROTOCOL = max(PROTOCOLS)
"""What this side speaks."""

MAX_REQUEST_BYTES = 64 * 1024
"""The largest message of a trainer; what the bounds below allow takes less than half of it."""

MAX_FRAME_BYTES = 4 * 1024**3
"""The largest frame of the service's messages: the tokens of a billion-token share."""

MAX_METRICS = 32
"""Numbers in one report."""

MAX_REASON_CHARACTERS = 300
"""How much of what was wrong with a message is told or logged."""

Number = Annotated[int, Meta(ge=0, le=2**53)]
"""Ids, steps and versions; 2**53 is exact in every language and fits every database."""

Seconds = Annotated[float, Meta(ge=0, le=86_400)]
RankNumber = Annotated[int, Meta(ge=0, le=2**20)]
Name = Annotated[str, Meta(max_length=1024)]
MetricName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_./@:-]{1,64}\Z")]
WeightsPath = Annotated[str, Meta(max_length=4096, pattern=r"^[^\x00]*$")]


class ProtocolError(ValueError):
    """A message that cannot be understood."""


class Join(msgspec.Struct, tag="join", frozen=True, omit_defaults=True):
    """A rank's first message on a connection. `client` is new for every client object, `token` a shared secret.

    `rewinds` is how often the run had been set back when this client joined last; None for one that has not joined, or that asks
    for the run to be set back.
    """

    protocol: Number
    rank: RankNumber
    world_size: RankNumber
    client: Name
    host: Name = ""
    pid: Number = 0
    token: Name = ""
    rewinds: Number | None = None


class Next(msgspec.Struct, tag="next", frozen=True):
    """The batch of step `after` + 1, as soon as there is one.

    With `rewind` the run is set back to step `after`, where the service allows it and no longer keeps that batch.
    """

    id: Number
    after: Number
    rewind: bool = False


class Get(msgspec.Struct, tag="get", frozen=True):
    """The batch of a step, if it is there now."""

    id: Number
    step: Number


class Ack(msgspec.Struct, tag="ack", frozen=True):
    """This rank is done with a batch."""

    id: Number
    step: Number


class Publish(msgspec.Struct, tag="publish", frozen=True):
    """A version of the policy can be sampled from; it comes from training up to `step`, where the rank knows.

    With `wait_s` the answer is `published`, and comes when every engine has loaded the version or will not, or after that time.
    """

    id: Number
    version: Number
    path: WeightsPath | None = None
    step: Number = 0
    wait_s: Seconds = 0.0


class Updating(msgspec.Struct, tag="updating", frozen=True):
    """The rank is about to send a version to the engines itself: have them stand still, and say which they are.

    It comes from training up to `step`, where the rank knows.
    """

    id: Number
    version: Number
    step: Number = 0


class Updated(msgspec.Struct, tag="updated", frozen=True):
    """The version was sent to all of them, or not, where `failed` says why; else as `publish`.

    With `untouched` nothing of it was sent to any of them, so they can go on with what they have.
    """

    id: Number
    version: Number
    step: Number = 0
    wait_s: Seconds = 0.0
    failed: Name = ""
    untouched: bool = False


class Report(msgspec.Struct, tag="report", frozen=True):
    """The trainer's own numbers of a step, by name; people see them."""

    id: Number
    step: Number
    metrics: Annotated[dict[MetricName, float], Meta(min_length=1, max_length=MAX_METRICS)]


class Checkpointed(msgspec.Struct, tag="checkpointed", frozen=True):
    """The trainer has saved a checkpoint after a step: it will not ask for that batch or an earlier one again."""

    id: Number
    step: Number


class Done(msgspec.Struct, tag="done", frozen=True):
    """The trainer wants no more batches."""

    id: Number


class Ping(msgspec.Struct, tag="ping", frozen=True):
    """Answered by a pong, or by `unknown` when the service does not know this connection."""


class Leave(msgspec.Struct, tag="leave", frozen=True):
    """The rank closes its connection in good order."""


class Welcome(msgspec.Struct, tag="welcome", frozen=True, omit_defaults=True):
    """The rank has joined. `after` is the last step before the first that it has not acknowledged, `rewinds` how often the run was set back."""

    protocol: Number
    run: Name
    world_size: RankNumber
    after: Number
    version: Number
    rewinds: Number = 0


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The rank cannot join, or can no longer be served; `reason` names both sides."""

    reason: str


class Unknown(msgspec.Struct, tag="unknown", frozen=True):
    """The connection is new to the service: join, then ask again."""


class Served(msgspec.Struct, tag="served", frozen=True):
    """The frames of a batch follow."""

    id: Number
    step: Number


class Missing(msgspec.Struct, tag="missing", frozen=True):
    """What was asked for cannot be had; `reason` says why."""

    id: Number
    reason: str


class Finished(msgspec.Struct, tag="finished", frozen=True):
    """There will be no further batch."""

    id: Number
    reason: str


class Ok(msgspec.Struct, tag="ok", frozen=True):
    """It is done and recorded; `note` says what was odd about it."""

    id: Number
    note: str = ""


class Published(msgspec.Struct, tag="published", frozen=True):
    """What became of a version that was waited for: by engine, why it does not have it, empty where it has it or a later one."""

    id: Number
    engines: dict[str, str]
    note: str = ""


class Engines(msgspec.Struct, tag="engines", frozen=True):
    """The engines stand still until `updated` comes; these are their base URLs."""

    id: Number
    urls: list[str]


class Pong(msgspec.Struct, tag="pong", frozen=True, omit_defaults=True):
    """The service is there. Also sent unasked, to find out whether a rank still is.

    `waiting` engines have no weights that they may sample with, and wait for the trainer to send them some. `over` is why there will
    be no further batch, and the service leaves.
    """

    waiting: Number = 0
    over: str = ""


ToServer = (
    Join | Next | Get | Ack | Publish | Updating | Updated | Report | Checkpointed | Done | Ping | Leave
)
ToTrainer = Welcome | Refused | Unknown | Served | Missing | Finished | Ok | Published | Engines | Pong
Request = Next | Get | Ack | Publish | Updating | Updated | Report | Checkpointed | Done
Answer = Served | Missing | Finished | Ok | Published | Engines

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_to_server: "msgspec.msgpack.Decoder[ToServer]" = msgspec.msgpack.Decoder(ToServer)
_to_trainer: "msgspec.msgpack.Decoder[ToTrainer]" = msgspec.msgpack.Decoder(ToTrainer)


def encode(message: ToServer | ToTrainer) -> bytes:
    """The header frame of a message."""
    return _encoder.encode(message)


def decode_to_server(frame: Any) -> ToServer:
    """A trainer's message; raises ProtocolError."""
    return _decode(_to_server, frame)


def decode_to_trainer(frame: Any) -> ToTrainer:
    """The service's message; raises ProtocolError."""
    return _decode(_to_trainer, frame)


def _decode(decoder: "msgspec.msgpack.Decoder[T]", frame: Any) -> T:
    try:
        return decoder.decode(frame)
    except Exception as error:
        # Besides its own errors the decoder raises at least UnicodeDecodeError (text that is none) and RecursionError
        # (lists in lists in lists). All of them say one thing: this is no message.
        raise ProtocolError(_shorten(f"{error}" or type(error).__name__)) from error


def _shorten(text: str) -> str:
    """An error may quote the message, so it is as long as whoever sent that wants."""
    return text if len(text) <= MAX_REASON_CHARACTERS else f"{text[:MAX_REASON_CHARACTERS]}…"
