"""The wire format: what is encoded comes back, what is broken is a WireError, the catalogue matches the code."""

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest

from envs import wire
from envs.rollout import Rollout, Sequence

CATALOGUE = Path(__file__).parents[2] / "docs" / "wire.md"


def sequence(length: int, *, first: int = 0) -> Sequence:
    mask = np.ones(length, np.uint8)
    mask[0] = 0 if length > 1 else 1
    return Sequence(
        np.arange(first, first + length, dtype=np.int32),
        mask,
        np.linspace(-2.0, 0.0, length, dtype=np.float32),
    )


def rollout(*lengths: int, reward: float = 0.5) -> Rollout:
    return Rollout(
        [sequence(length, first=100 * place) for place, length in enumerate(lengths)],
        reward,
        metrics={"correct": 1.0},
        messages=[{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
        timings={"total": 0.25},
    )


MESSAGES_TO_SERVER: list[wire.ToServer] = [
    wire.Hello(
        wire.PROTOCOL, "c-1", "reverse", "m", {"temperature": 1.0}, "Be brief.", "KEY", True, ["train"]
    ),
    wire.Run(7, "group", "train", 12, "http://x/v1", 8, "s", "v3", 60.0),
    wire.Run(8, "rollout", "eval", 0, "http://x/v1"),
    wire.Cancel(7),
    wire.Ping(12.5),
    wire.Drain(),
    wire.Bye(),
]
MESSAGES_TO_CLIENT: list[wire.ToClient] = [
    wire.Welcome(wire.PROTOCOL, "reverse", 123, "host"),
    wire.Ready("reverse", {"train": 100, "eval": None}, True, 64),
    wire.Refused(wire.PROTOCOL, "because"),
    wire.Expired(),
    wire.Failure(7, "error", "ValueError: no", False, "Traceback …"),
    wire.Pong(12.5, wire.ServerStats(1, 2, 3, 4, 0.5, 1 << 30)),
    wire.Drained(),
]


@pytest.mark.parametrize("message", MESSAGES_TO_SERVER, ids=lambda message: type(message).__name__)
def test_a_message_to_a_server_comes_back_as_it_was(message: wire.ToServer) -> None:
    """Encoding and decoding are inverse for everything a client says."""
    assert wire.decode_to_server([wire.encode(message)]) == message


@pytest.mark.parametrize("message", MESSAGES_TO_CLIENT, ids=lambda message: type(message).__name__)
def test_a_message_to_a_client_comes_back_as_it_was(message: wire.ToClient) -> None:
    """Encoding and decoding are inverse for everything a server says."""
    assert wire.decode_to_client([wire.encode(message)]) == message


def test_a_result_carries_its_arrays_as_raw_bytes_in_order() -> None:
    """All sequences of all rollouts are concatenated, four bytes a token, four a log-probability, one a mask."""
    rollouts = [rollout(3, 2), rollout(4, reward=1.0)]
    frames = wire.encode_result(5, rollouts)
    assert [len(frame) for frame in frames[1:4]] == [9 * 4, 9, 9 * 4]
    decoded = wire.decode_to_client(frames)
    assert isinstance(decoded, wire.ResultArrays)
    assert decoded.id == 5
    assert [header.lengths for header in decoded.rollouts] == [[3, 2], [4]]
    assert [header.reward for header in decoded.rollouts] == [0.5, 1.0]
    sequences = [sequence for rollout in rollouts for sequence in rollout.sequences]
    assert np.array_equal(decoded.tokens, np.concatenate([s.tokens for s in sequences]))
    assert np.array_equal(decoded.mask, np.concatenate([s.mask for s in sequences]))
    assert np.array_equal(decoded.logprobs, np.concatenate([s.logprobs for s in sequences]))
    arrays: list[np.ndarray[Any, Any]] = [decoded.tokens, decoded.mask, decoded.logprobs]
    assert [str(array.dtype) for array in arrays] == ["int32", "uint8", "float32"]


def test_decoded_arrays_are_views_on_the_received_bytes() -> None:
    """No token is copied after it was received."""
    frames = wire.encode_result(5, [rollout(64)])
    decoded = wire.decode_to_client(frames)
    assert isinstance(decoded, wire.ResultArrays)
    arrays: list[np.ndarray[Any, Any]] = [decoded.tokens, decoded.mask, decoded.logprobs]
    for array, frame in zip(arrays, frames[1:4], strict=True):
        assert np.shares_memory(array, np.frombuffer(frame, np.uint8))
        assert not array.flags.writeable


def test_a_transcript_has_one_entry_per_rollout_for_people() -> None:
    """Messages, reward, metrics, stop reason and timings travel as msgpack that the service need not open."""
    decoded = wire.decode_to_client(wire.encode_result(1, [rollout(2), rollout(3)]))
    assert isinstance(decoded, wire.ResultArrays)
    entries = msgspec.msgpack.decode(decoded.transcript)
    assert [entry["messages"][1]["content"] for entry in entries] == ["4", "4"]
    assert set(entries[0]) == {"messages", "reward", "metrics", "stop_reason", "truncated", "timings"}


def test_a_transcript_survives_what_msgpack_does_not_know() -> None:
    """Numbers of numpy become numbers, other objects their text; the rollout is not lost for its messages."""
    strange = rollout(2)
    strange.messages = [{"role": "tool", "content": np.float32(1.5), "array": np.arange(2), "object": object}]
    decoded = wire.decode_to_client(wire.encode_result(1, [strange]))
    assert isinstance(decoded, wire.ResultArrays)
    message = msgspec.msgpack.decode(decoded.transcript)[0]["messages"][0]
    assert message == {"role": "tool", "content": 1.5, "array": [0, 1], "object": repr(object)}


def test_an_evaluation_without_sequences_is_a_valid_result() -> None:
    """Evaluations ask for no tokens, so their arrays are empty."""
    decoded = wire.decode_to_client(wire.encode_result(1, [Rollout([], 1.0)]))
    assert isinstance(decoded, wire.ResultArrays)
    assert decoded.rollouts[0].lengths == []
    assert len(decoded.tokens) == 0


def broken(change: Callable[[list[bytes]], list[bytes]]) -> list[bytes]:
    return change(wire.encode_result(9, [rollout(4, 2)]))


def header(**changes: Any) -> bytes:
    fields = {
        "reward": 1.0,
        "lengths": [6],
        "stop_reason": "stop",
        "truncated": False,
        "metrics": {},
        "timings": {},
    }
    return msgspec.msgpack.encode({"type": "result", "id": 9, "rollouts": [fields | changes]})


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda frames: frames[:4], id="a frame is missing"),
        pytest.param(lambda frames: [*frames, b""], id="a frame too many"),
        pytest.param(lambda frames: [frames[0], frames[1][:-4], *frames[2:]], id="a token is missing"),
        pytest.param(lambda frames: [*frames[:2], frames[2] + b"\1", *frames[3:]], id="a mask too many"),
        pytest.param(lambda frames: [*frames[:3], frames[3][:-1], frames[4]], id="half a log-probability"),
        pytest.param(
            lambda frames: [*frames[:3], np.full(6, np.nan, "<f4").tobytes(), frames[4]],
            id="log-probabilities NaN",
        ),
        pytest.param(
            lambda frames: [*frames[:3], np.full(6, -np.inf, "<f4").tobytes(), frames[4]], id="infinite ones"
        ),
        pytest.param(lambda frames: [header(reward=float("nan")), *frames[1:]], id="reward NaN"),
        pytest.param(lambda frames: [header(reward="1"), *frames[1:]], id="reward as text"),
        pytest.param(lambda frames: [header(lengths=[-6, 12]), *frames[1:]], id="negative length"),
        pytest.param(lambda frames: [header(lengths=[6, 0]), *frames[1:]], id="empty sequence"),
        pytest.param(lambda frames: [header(metrics={"m": float("inf")}), *frames[1:]], id="metric infinite"),
    ],
)
def test_a_broken_result_names_the_run_it_belongs_to(change: Callable[[list[bytes]], list[bytes]]) -> None:
    """Whatever is wrong behind a readable id, the run can be failed instead of waiting for ever."""
    with pytest.raises(wire.WireError) as error:
        wire.decode_to_client(broken(change))
    assert error.value.run_id == 9


@pytest.mark.parametrize(
    "run",
    [
        {"timeout_s": float("nan")},
        {"timeout_s": -1.0},
        {"count": 0},
        {"count": wire.MAX_COUNT + 1, "kind": "group"},
        {"count": 2},
        {"index": -1},
        {"kind": "batch"},
        {"base_url": "x" * 2000},
    ],
    ids=str,
)
def test_a_run_that_makes_no_sense_is_refused_with_its_id(run: dict[str, Any]) -> None:
    """A server never starts what it cannot mean."""
    fields = {
        "type": "run",
        "id": 3,
        "kind": "rollout",
        "split": "train",
        "index": 0,
        "base_url": "http://x",
    } | run
    with pytest.raises(wire.WireError) as error:
        wire.decode_to_server([msgspec.msgpack.encode(fields)])
    assert error.value.run_id == 3


def test_a_hello_of_another_version_is_recognised_whatever_else_it_says() -> None:
    """A handshake that cannot be decoded still tells which protocol its sender speaks."""
    future = msgspec.msgpack.encode({"type": "hello", "protocol": 99, "who": ["something", "else"]})
    with pytest.raises(wire.WireError) as error:
        wire.decode_to_server([future])
    assert error.value.protocol == 99


def test_unknown_fields_are_ignored() -> None:
    """A newer peer may add fields without a new protocol version."""
    ping = msgspec.msgpack.encode({"type": "ping", "sent": 1.0, "mood": "good"})
    assert wire.decode_to_server([ping]) == wire.Ping(1.0)


FUZZED = 120_000


def test_no_frame_whatsoever_raises_anything_but_a_wire_error() -> None:
    """120,000 random, cut, spliced and bit-flipped messages either decode into something valid or are WireErrors."""
    random_source = random.Random(20_240_817)
    to_server = [[wire.encode(message)] for message in MESSAGES_TO_SERVER]
    to_client = [[wire.encode(message)] for message in MESSAGES_TO_CLIENT]
    to_client += [wire.encode_result(3, [rollout(3, 2)]), wire.encode_result(4, [rollout(5), rollout(1)])]
    accepted = 0
    for turn in range(FUZZED):
        decode: Callable[[list[bytes]], Any]
        decode, seeds = (wire.decode_to_server, to_server) if turn % 2 else (wire.decode_to_client, to_client)
        frames = mutated(random_source, list(random_source.choice(seeds)))
        try:
            message = decode(frames)
        except wire.WireError:
            continue
        accepted += 1
        if isinstance(message, wire.ResultArrays):
            total = sum(sum(header.lengths) for header in message.rollouts)
            assert total == len(message.tokens) == len(message.mask) == len(message.logprobs)
            assert np.isfinite(message.logprobs).all()
    # Mutations that hit a string's text or a number stay valid; the test is worth little if none or all did.
    assert FUZZED // 100 < accepted < FUZZED // 2


def mutated(random_source: random.Random, frames: list[bytes]) -> list[bytes]:
    """A message with one to four things wrong with it."""
    for _ in range(random_source.randint(1, 4)):
        way = random_source.randrange(8)
        place = random_source.randrange(len(frames)) if frames else 0
        frame = bytearray(frames[place]) if frames else bytearray()
        if way == 0:
            frame = bytearray(random_source.randbytes(random_source.randrange(64)))
        elif way == 1 and frame:
            frame[random_source.randrange(len(frame))] ^= 1 << random_source.randrange(8)
        elif way == 2:
            frame = frame[: random_source.randrange(len(frame) + 1)]
        elif way == 3:
            frame += random_source.randbytes(random_source.randrange(1, 9))
        elif way == 4:
            at = random_source.randrange(len(frame) + 1)
            frame[at:at] = random_source.randbytes(random_source.randrange(1, 5))
        elif way == 5 and frame:
            # Lengths and nesting: the bytes that announce maps, lists and long strings.
            frame[random_source.randrange(len(frame))] = random_source.choice(
                b"\x80\x9f\xdc\xdd\xde\xdf\xdb\xc6\xcb\xc1"
            )
        elif way == 6:
            return [*frames[:place], *frames[place + 1 :]]
        else:
            frames = [*frames, bytes(frame)]
            continue
        frames = [*frames[:place], bytes(frame), *frames[place + 1 :]]
    return frames


@pytest.mark.parametrize(
    "opening", [b"\xdd", b"\xdf", b"\xdb", b"\xc6"], ids=["list", "map", "text", "bytes"]
)
def test_an_announced_size_is_not_believed(opening: bytes) -> None:
    """Four billion entries that do not follow cost no memory."""
    header = b"\x82\xa4type\xa5hello\xa8sampling" + opening + b"\xff\xff\xff\xff"
    with pytest.raises(wire.WireError):
        wire.decode_to_server([header])


def test_deep_nesting_is_a_wire_error() -> None:
    """A header of a million nested lists must not exhaust the stack."""
    bomb = b"\x82\xa4type\xa5hello\xa8sampling" + b"\x91" * 1_000_000
    with pytest.raises(wire.WireError):
        wire.decode_to_server([bomb])


def catalogue_rows() -> dict[str, tuple[str, list[str]]]:
    """Message name → (direction, field names) as docs/wire.md has them."""
    rows = {}
    for line in CATALOGUE.read_text(encoding="utf-8").splitlines():
        found = re.fullmatch(r"\| `(\w+)` \| (client|server) \| (.*?) \| .* \|", line)
        if found:
            rows[found[1]] = (found[2], re.findall(r"`(\w+)`", found[3]))
    return rows


def test_the_catalogue_lists_every_message_with_its_fields_and_sender() -> None:
    """docs/wire.md cannot fall behind the code: a server in another language is written from it."""
    expected = {}
    for sender, union in (("client", wire.ToServer), ("server", wire.ToClient)):
        for struct in get_args(union):
            info = msgspec.inspect.type_info(struct)
            assert isinstance(info, msgspec.inspect.StructType)
            expected[str(info.tag)] = (sender, [field.encode_name for field in info.fields])
    assert catalogue_rows() == expected


@pytest.mark.parametrize("struct", [wire.RolloutHeader, wire.ServerStats], ids=lambda struct: struct.__name__)
def test_the_catalogue_describes_every_field_of_nested_parts(struct: type[msgspec.Struct]) -> None:
    """Parts of messages are described field by field too."""
    text = CATALOGUE.read_text(encoding="utf-8")
    section = text.partition(f"### {struct.__name__}")[2].partition("\n#")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(struct.__struct_fields__)


def test_the_catalogue_states_the_version_and_the_limits_of_the_code() -> None:
    """Numbers in the text are those in force."""
    text = CATALOGUE.read_text(encoding="utf-8")
    for number in (
        wire.PROTOCOL,
        wire.MAX_COUNT,
        wire.MAX_MESSAGE_BYTES,
        wire.MAX_REQUEST_BYTES,
        wire.MAX_HEADER_BYTES,
    ):
        assert re.search(rf"\b{number:,}\b", text), f"{number:,} is not in docs/wire.md"
