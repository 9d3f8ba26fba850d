"""The messages between the service and a trainer: read within bounds, and as they were written years ago."""

import msgspec
import pytest

from orchestrator.trainer.batch import decode_batch
from orchestrator.trainer.protocol import (
    MAX_REASON_CHARACTERS,
    MAX_REQUEST_BYTES,
    PROTOCOL,
    PROTOCOLS,
    Join,
    Next,
    ProtocolError,
    Publish,
    Report,
    Served,
    ToServer,
    Updated,
    Updating,
    decode_to_server,
    decode_to_trainer,
    encode,
)
from orchestrator.trainer_link.encoding import encode_batch
from tests.trainer.recorded import messages, read_recorded, recorded_batch


@pytest.mark.parametrize("name", messages(1))
def test_messages_of_protocol_1_are_understood_as_they_were_meant(name: str) -> None:
    """A trainer or a service of the first protocol is read by either side of today."""
    expected = messages(1)[name]
    (frame,) = read_recorded(name)
    decode = decode_to_server if isinstance(expected, ToServer) else decode_to_trainer
    assert decode(frame) == expected


@pytest.mark.parametrize("protocol", [1, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_bytes_of_a_batch_are_those_of_protocol_1(rank: int, protocol: int) -> None:
    """A trainer that was written for them reads the batches of today, which are said as they were then."""
    header, *frames = read_recorded(f"served_{rank}")
    assert decode_to_trainer(header) == Served(7, 3)
    assert [bytes(frame) for frame in frames] == [
        bytes(frame) for frame in encode_batch(recorded_batch(), rank, 2, protocol)
    ]
    batch = decode_batch(frames)
    assert (batch.step, batch.version, batch.rank, batch.world_size, batch.batch_size) == (3, 2, rank, 2, 8)
    groups = {group.id: group for group in recorded_batch().groups}
    for sequence in batch.sequences:
        group = groups[sequence.group_id]
        assert (sequence.version, sequence.version_end) == (group.version, group.version_end)
        assert (sequence.temperature, sequence.metrics, sequence.seat) == (None, {}, "")


def test_the_numbers_of_the_protocol_have_no_gap() -> None:
    """One path from each number to the next."""
    assert list(PROTOCOLS) == list(range(1, PROTOCOL + 1))


@pytest.mark.parametrize(
    "message",
    [
        Publish(1, 2**63),
        Publish(1, -1),
        Publish(1, 1, "x" * 5000),
        Publish(1, 1, "a\0b"),
        Publish(1, 1, step=2**54),
        Updating(1, -1),
        Updating(2**63, 1),
        Updated(1, 2**63),
        Updated(1, 1, step=-1),
        Updated(1, 1, wait_s=-1.0),
        Updated(1, 1, wait_s=float("inf")),
        Updated(1, 1, failed="x" * 2000),
        Updated(1, 1, failed=3),  # type: ignore[arg-type]
        Report(1, 2, {}),
        Report(1, 2, {"": 1.0}),
        Report(1, 2, {"a" * 65: 1.0}),
        Report(1, 2, {"two\nlines": 1.0}),
        Report(1, 2, {"line\n": 1.0}),
        Report(1, -2, {"loss": 1.0}),
        Report(1, 2, {"loss": "low"}),  # type: ignore[dict-item]
        Report(1, 2, {f"name{number}": 1.0 for number in range(33)}),
        Next(2**63, 0),
        Next(1, -1),
        Join(2**60, 0, 1, "c"),
        Join(1, 2**40, 1, "c"),
        Join(1, 0, 1, "c" * 2000),
        Join(1, 0, 1, "c", token="t" * 2000),
    ],
)
def test_what_is_out_of_bounds_is_no_message(message: ToServer) -> None:
    """A number that no database holds would otherwise be written down for ever."""
    with pytest.raises(ProtocolError):
        decode_to_server(encode(message))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x82\xa4type\xa4join\xa4host\xa2\xff\xfe",
        b"\x82\xa4type\xa4ping\xa1x" + b"\x91" * 60_000 + b"\xc0",
        b"\x82\xa4type\xa4ping\xa1x" + b"\x81\xa1a" * 20_000 + b"\xc0",
        msgspec.msgpack.encode({"type": "x" * 60_000}),
        msgspec.msgpack.encode([1, 2]),
    ],
)
def test_no_bytes_raise_anything_but_a_protocol_error(frame: bytes) -> None:
    """Text that is none, endless nesting: all are a message that cannot be understood, said in few words."""
    for decode in (decode_to_server, decode_to_trainer):
        with pytest.raises(ProtocolError) as raised:
            decode(frame)
        assert 0 < len(str(raised.value)) <= MAX_REASON_CHARACTERS + 1


def test_the_largest_messages_of_a_trainer_fit_the_limit() -> None:
    """Names and paths of four-byte characters included."""
    name = "𝄞" * 1024
    join = Join(2**53, 2**20, 2**20, name, name, 2**53, name)
    publish = Publish(2**53, 2**53, "𝄞" * 4096, 2**53)
    for message in (join, publish):
        assert decode_to_server(encode(message)) == message
        assert len(encode(message)) < MAX_REQUEST_BYTES / 2
