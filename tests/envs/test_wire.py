"""The wire format: what is encoded comes back, what is broken is a WireError, the catalogue matches the code."""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from envs import wire
from envs.rollout import InvalidRolloutError, Rollout, Sequence

CATALOGUE = Path(__file__).parents[2] / "docs" / "wire.md"


def sequence(length: int, *, first: int = 0) -> Sequence:
    mask = np.ones(length, np.uint8)
    mask[0] = 0 if length > 1 else 1
    return Sequence(
        np.arange(first, first + length, dtype=np.int32),
        mask,
        np.linspace(-2.0, 0.0, length, dtype=np.float32) * mask,
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
    wire.Request(7, "group", "train", 12, "http://x/v1", 8, "s", "v3", 60.0),
    wire.Request(8, "rollout", "eval", 0, "http://x/v1"),
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
    assert len(frames) == wire.RESULT_FRAMES
    assert len(frames[1]) == 9 * 4 + 9 * 4 + 9
    decoded = wire.decode_to_client(frames)
    assert isinstance(decoded, wire.Result)
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
    assert isinstance(decoded, wire.Result)
    arrays: list[np.ndarray[Any, Any]] = [decoded.tokens, decoded.mask, decoded.logprobs]
    for array in arrays:
        assert np.shares_memory(array, np.frombuffer(frames[1], np.uint8))
        assert array.flags.aligned
        assert not array.flags.writeable


def test_a_transcript_has_one_entry_per_rollout_for_people() -> None:
    """Messages, reward, metrics, stop reason and timings travel as msgpack that the service need not open."""
    decoded = wire.decode_to_client(wire.encode_result(1, [rollout(2), rollout(3)]))
    assert isinstance(decoded, wire.Result)
    entries = msgspec.msgpack.decode(decoded.transcript)
    assert [entry["messages"][1]["content"] for entry in entries] == ["4", "4"]
    assert set(entries[0]) == {"messages", "reward", "metrics", "stop_reason", "truncated", "timings"}


def test_a_transcript_survives_what_msgpack_does_not_know() -> None:
    """Numbers of numpy become numbers, other objects their text; the rollout is not lost for its messages."""
    strange = rollout(2)
    strange.messages = [{"role": "tool", "content": np.float32(1.5), "array": np.arange(2), "object": object}]
    decoded = wire.decode_to_client(wire.encode_result(1, [strange]))
    assert isinstance(decoded, wire.Result)
    message = msgspec.msgpack.decode(decoded.transcript)[0]["messages"][0]
    assert message == {"role": "tool", "content": 1.5, "array": [0, 1], "object": repr(object)}


def test_an_evaluation_without_sequences_is_a_valid_result() -> None:
    """Evaluations ask for no tokens, so their arrays are empty."""
    decoded = wire.decode_to_client(wire.encode_result(1, [Rollout([], 1.0)]))
    assert isinstance(decoded, wire.Result)
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


def with_frame(place: int, content: bytes) -> Callable[[list[bytes]], list[bytes]]:
    return lambda frames: [*frames[:place], content, *frames[place + 1 :]]


def with_arrays(
    tokens: bytes | None = None, logprobs: bytes | None = None, mask: bytes | None = None
) -> Callable[[list[bytes]], list[bytes]]:
    """Some of the arrays are others; there are 6 tokens."""

    def change(frames: list[bytes]) -> list[bytes]:
        parts = (frames[1][:24], frames[1][24:48], frames[1][48:])
        given = (tokens, logprobs, mask)
        chosen = [old if new is None else new for old, new in zip(parts, given, strict=True)]
        return [frames[0], b"".join(chosen), frames[2]]

    return change


# Well formed, and still nothing to train on. The result has a sequence of 4 tokens and one of 2.
INVALID: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "reward beyond float32": lambda frames: [header(reward=1e308), *frames[1:]],
    "negative reward beyond float32": lambda frames: [header(reward=-3.1e38), *frames[1:]],
    "metric beyond float32": lambda frames: [header(metrics={"m": 1e39}), *frames[1:]],
    "timing NaN": lambda frames: [header(timings={"t": float("nan")}), *frames[1:]],
    "reward of a sequence NaN": lambda frames: [
        header(lengths=[4, 2], rewards=[0.0, float("nan")]),
        *frames[1:],
    ],
    "temperature infinite": lambda frames: [header(temperature=float("inf")), *frames[1:]],
    "temperature of a sequence NaN": lambda frames: [
        header(lengths=[4, 2], temperatures=[None, float("nan")]),
        *frames[1:],
    ],
    "negative token": with_arrays(tokens=np.array([1, 2, 3, 4, -5, 6], "<i4").tobytes()),
    "token of 2**31": with_arrays(tokens=np.array([1, 2, 3, 4, 5, 2**31], "<u4").tobytes()),
    "mask of 2": with_arrays(mask=bytes([0, 1, 1, 2, 0, 1])),
    "nothing sampled in the second sequence": with_arrays(
        mask=bytes([0, 1, 1, 1, 0, 0]), logprobs=np.zeros(6, "<f4").tobytes()
    ),
    "log-probability above 0": with_arrays(logprobs=np.array([0, -1, 0.01, -1, 0, -1], "<f4").tobytes()),
    "log-probability where nothing was sampled": with_arrays(logprobs=np.full(6, -1, "<f4").tobytes()),
    "transcript empty": with_frame(2, b""),
    "transcript not a list": with_frame(2, msgspec.msgpack.encode({"messages": []})),
    "transcript of another count": with_frame(2, msgspec.msgpack.encode([{}, {}])),
    "transcript cut short": lambda frames: [*frames[:2], frames[2][:-1]],
    "transcript with something behind it": lambda frames: [*frames[:2], frames[2] + b"\x90"],
    "transcript nested without end": with_frame(2, b"\x91" * 1_000_000),
}


@pytest.mark.parametrize("change", INVALID.values(), ids=INVALID)
def test_content_that_cannot_be_trained_on_is_told_from_a_broken_message(
    change: Callable[[list[bytes]], list[bytes]],
) -> None:
    """It is counted as an invalid rollout, whether the environment's own server finds it or we do."""
    with pytest.raises(wire.InvalidResultError) as error:
        wire.decode_to_client(broken(change))
    assert (error.value.request_id, error.value.kind) == (9, "invalid_rollout")


def test_a_log_probability_may_be_rounded_above_zero() -> None:
    """Engines compute in half precision; a thousandth is noise."""
    rounded = rollout(3)
    rounded.sequences[0].logprobs[1] = 1e-4
    rounded.check()
    assert isinstance(wire.decode_to_client(wire.encode_result(1, [rounded])), wire.Result)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"stop_reason": "x" * (wire.MAX_HEADER_BYTES + 1)}, "rewards, metrics and lengths of 4,194,"),
        ({"stop_reason": "\ud800"}, "cannot be encoded: UnicodeEncodeError"),
        ({"messages": [{"content": "\ud800"}]}, "cannot be encoded: UnicodeEncodeError"),
        ({"messages": [{"count": 2**70}]}, "cannot be encoded: OverflowError"),
    ],
    ids=["too large", "stop reason", "message", "number"],
)
def test_what_cannot_be_sent_is_an_invalid_rollout(change: dict[str, Any], why: str) -> None:
    """The side that has it says so, instead of a connection that closes on the other."""
    one = rollout(3)
    for name, value in change.items():
        setattr(one, name, value)
    with pytest.raises(InvalidRolloutError, match=why):
        wire.encode_result(1, [one])


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda frames: frames[:2], id="a frame is missing"),
        pytest.param(lambda frames: [*frames, b""], id="a frame too many"),
        pytest.param(with_arrays(tokens=bytes(20)), id="a token is missing"),
        pytest.param(with_arrays(mask=bytes([0, 1, 1, 1, 0, 1, 1])), id="a mask too many"),
        pytest.param(with_arrays(logprobs=bytes(23)), id="half a log-probability"),
        pytest.param(with_arrays(logprobs=np.full(6, np.nan, "<f4").tobytes()), id="log-probabilities NaN"),
        pytest.param(with_arrays(logprobs=np.full(6, -np.inf, "<f4").tobytes()), id="infinite ones"),
        pytest.param(lambda frames: [header(seats=["white", "black"]), *frames[1:]], id="a seat too many"),
        pytest.param(
            lambda frames: [header(lengths=[4, 2], truncations=[True]), *frames[1:]], id="an end too few"
        ),
        pytest.param(lambda frames: [header(seats=[7]), *frames[1:]], id="a seat that is no text"),
        pytest.param(lambda frames: [header(reward=float("nan")), *frames[1:]], id="reward NaN"),
        pytest.param(lambda frames: [header(reward="1"), *frames[1:]], id="reward as text"),
        pytest.param(lambda frames: [header(lengths=[-6, 12]), *frames[1:]], id="negative length"),
        pytest.param(lambda frames: [header(lengths=[6, 0]), *frames[1:]], id="empty sequence"),
        pytest.param(lambda frames: [header(metrics={"m": float("inf")}), *frames[1:]], id="metric infinite"),
        *[pytest.param(change, id=name) for name, change in INVALID.items()],
    ],
)
def test_a_broken_result_names_the_run_it_belongs_to(change: Callable[[list[bytes]], list[bytes]]) -> None:
    """Whatever is wrong behind a readable id, the run can be failed instead of waiting for ever."""
    with pytest.raises(wire.WireError) as error:
        wire.decode_to_client(broken(change))
    assert error.value.request_id == 9


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
    assert error.value.request_id == 3


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
        if isinstance(message, wire.Result):
            total = sum(sum(header.lengths) for header in message.rollouts)
            assert total == len(message.tokens) == len(message.mask) == len(message.logprobs)
            assert_trainable(message)
    # Mutations that hit a string's text or a number stay valid; the test is worth little if none or all did.
    assert FUZZED // 100 < accepted < FUZZED // 2


def assert_trainable(result: wire.Result) -> None:
    """Every promise about the content of a result."""
    assert len(msgspec.msgpack.decode(result.transcript, type=list[msgspec.Raw])) == len(result.rollouts)
    assert (result.tokens >= 0).all()
    assert (result.mask <= 1).all()
    assert np.isfinite(result.logprobs).all()
    assert (result.logprobs <= 1e-3).all()
    assert (result.logprobs[result.mask == 0] == 0).all()
    start = 0
    for one in result.rollouts:
        numbers = [one.reward, *one.rewards, *one.metrics.values(), *one.timings.values()]
        for values in (one.seats, one.rewards, one.temperatures, one.stop_reasons, one.truncations):
            assert len(values) in (0, len(one.lengths))
        assert np.isfinite(np.array(numbers).astype(np.float32)).all()
        for length in one.lengths:
            assert result.mask[start : start + length].any()
            start += length


def mostly(usual: st.SearchStrategy[Any], odd: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """The usual kind, and the odd one in between."""
    return st.integers(0, 9).flatmap(lambda draw: odd if draw == 0 else usual)


NUMBERS = mostly(st.floats(-1, 1), st.floats() | st.just(1e308))
TOKENS = mostly(st.integers(0, 2**31 - 1), st.integers(-(2**31), 2**31 - 1))
LOGPROBS = mostly(st.floats(-20, 0, width=32), st.floats(width=32))
MASKS = mostly(st.integers(0, 1), st.integers(0, 255))


@st.composite
def results(draw: st.DrawFn) -> list[bytes]:
    """Frames of a result as a faulty server may send them: mostly right, now and then not."""
    headers, lengths = [], []
    for _ in range(draw(st.integers(1, 3))):
        own = draw(st.lists(mostly(st.integers(1, 4), st.integers(-1, 2)), max_size=3))
        lengths += [max(0, length) for length in own]
        headers.append(
            {
                "reward": draw(NUMBERS),
                "lengths": own,
                "stop_reason": "stop",
                "truncated": False,
                "metrics": draw(st.dictionaries(st.text(max_size=3), NUMBERS, max_size=2)),
                "timings": draw(st.dictionaries(st.text(max_size=3), NUMBERS, max_size=2)),
                "rewards": draw(mostly(st.just([0.5] * len(own)), st.lists(NUMBERS, max_size=3))),
                "seats": draw(mostly(st.just(["white"] * len(own)), st.lists(st.text(), max_size=3))),
                "temperatures": draw(mostly(st.just([]), st.lists(NUMBERS | st.none(), max_size=3))),
            }
        )
    total = sum(lengths)
    mask = draw(st.lists(MASKS, min_size=total, max_size=total))
    logprobs = [draw(LOGPROBS) * draw(mostly(st.just(bool(sampled)), st.just(True))) for sampled in mask]
    entries = draw(mostly(st.just(len(headers)), st.integers(0, 4)))
    frames = [
        msgspec.msgpack.encode({"type": "result", "id": 3, "rollouts": headers}),
        np.array(draw(st.lists(TOKENS, min_size=total, max_size=total)), "<i4").tobytes()
        + np.array(logprobs, "<f4").tobytes()
        + bytes(mask),
        draw(mostly(st.just(msgspec.msgpack.encode([{}] * entries)), st.binary(max_size=8))),
    ]
    cut = draw(mostly(st.none(), st.integers(0, 2)))
    return [frame[:-1] if place == cut else frame for place, frame in enumerate(frames)]


@settings(max_examples=600, deadline=None)
@given(results())
def test_a_result_is_either_refused_or_keeps_every_promise(frames: list[bytes]) -> None:
    """Whatever a server sends, nothing else than a WireError leaves the decoder, and what passes can be trained on."""
    try:
        decoded = wire.decode_to_client(frames)
    except wire.WireError as error:
        event(type(error).__name__)
        return
    event("accepted")
    assert isinstance(decoded, wire.Result)
    assert_trainable(decoded)


RECORDED: dict[int, Any] = {
    protocol: msgspec.json.decode((Path(__file__).parent / f"wire_protocol_{protocol}.json").read_bytes())
    for protocol in (1, 2)
}


def recorded(direction: str) -> list[tuple[int, str]]:
    return [(protocol, name) for protocol, said in RECORDED.items() for name in said[direction]]


def recorded_frames(protocol: int, direction: str, name: str) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in RECORDED[protocol][direction][name]]


@pytest.mark.parametrize(("protocol", "name"), recorded("to_server"))
def test_what_a_client_of_any_spoken_protocol_says_is_understood(protocol: int, name: str) -> None:
    """Frames as an earlier release wrote them; a message that was re-encoded now says the same."""
    frames = recorded_frames(protocol, "to_server", name)
    message = wire.decode_to_server(frames, protocol)
    assert msgspec.msgpack.decode(wire.encode(message)) == msgspec.msgpack.decode(frames[0])


@pytest.mark.parametrize(("protocol", "name"), recorded("to_client"))
def test_what_a_server_of_any_spoken_protocol_says_is_understood(protocol: int, name: str) -> None:
    """Frames as an earlier release wrote them, results with all their arrays."""
    frames = recorded_frames(protocol, "to_client", name)
    message = wire.decode_to_client(frames, protocol)
    said = msgspec.msgpack.decode(frames[0])
    if not isinstance(message, wire.Result):
        assert msgspec.msgpack.decode(wire.encode(message)) == said
        return
    assert message.id == said["id"]
    for one, meant in zip(message.rollouts, said["rollouts"], strict=True):
        assert {name: getattr(one, name) for name in meant} == meant
    assert message.digest == said.get("digest", 0)
    tokens, mask, logprobs = (array.tobytes() for array in (message.tokens, message.mask, message.logprobs))
    assert frames[1:-1] == ([tokens, mask, logprobs] if protocol == 1 else [tokens + logprobs + mask])
    assert message.transcript == frames[-1]


def played() -> Rollout:
    """A rollout of two seats with rewards of their own."""
    one = rollout(3, 2, reward=0.5)
    white, black = one.sequences
    white.seat, white.reward, white.temperature, white.stop_reason = "white", 1.0, 0.7, "stop"
    black.seat, black.reward, black.truncated = "black", 0.0, True
    return one


def test_what_is_said_of_single_sequences_arrives() -> None:
    """Seats with their rewards, temperatures and ends; the transcript has the rewards too."""
    decoded = wire.decode_to_client(wire.encode_result(1, [played(), rollout(4)], digest=77))
    assert isinstance(decoded, wire.Result)
    assert decoded.digest == 77
    one, plain = decoded.rollouts
    assert (one.seats, one.rewards) == (["white", "black"], [1.0, 0.0])
    assert (one.temperature, one.temperatures) == (None, [0.7, None])
    assert (one.stop_reasons, one.truncations) == ([], [False, True])
    assert (plain.seats, plain.rewards, plain.temperatures) == ([], [], [])
    entries = msgspec.msgpack.decode(decoded.transcript)
    assert entries[0]["seats"] == {"white": 1.0, "black": 0.0}
    assert "seats" not in entries[1]


def test_a_result_in_the_usual_case_says_nothing_about_its_sequences() -> None:
    """One sequence without a seat: a header of a hundred bytes, whatever there is room for."""
    plain = rollout(4)
    plain.sequences[0].temperature = 1.0
    plain.sequences[0].stop_reason, plain.sequences[0].truncated = "stop", False
    said = msgspec.msgpack.decode(wire.encode_result(1, [plain])[0])
    assert set(said["rollouts"][0]) == {"reward", "lengths", "metrics", "timings", "temperature"}


def test_a_client_of_protocol_1_gets_its_five_frames() -> None:
    """A server of today still answers it; what that protocol cannot say is left out."""
    frames = wire.encode_result(1, [played()], digest=77, protocol=1)
    assert len(frames) == 5
    decoded = wire.decode_to_client(frames, 1)
    assert isinstance(decoded, wire.Result)
    assert (decoded.rollouts[0].lengths, decoded.rollouts[0].reward, decoded.digest) == ([3, 2], 0.5, 0)
    assert set(msgspec.msgpack.decode(frames[0])["rollouts"][0]) == {
        "reward",
        "lengths",
        "stop_reason",
        "truncated",
        "metrics",
        "timings",
    }


def test_every_version_that_is_spoken_has_its_recorded_frames() -> None:
    """Whoever adds a version to the table records what it looked like."""
    recorded = {
        int(path.stem.rpartition("_")[2]) for path in Path(__file__).parent.glob("wire_protocol_*.json")
    }
    assert recorded == set(wire.VERSIONS)
    assert max(wire.VERSIONS) == wire.PROTOCOL


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


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({}, {}),
        ({"reward": 0.5, "stop_reason": "stop", "truncated": False}, {}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"seat": "white"}, {"seats": ["white"]}),
        ({"reward": 1.0}, {"rewards": [1.0]}),
        ({"stop_reason": "length"}, {"stop_reasons": ["length"]}),
        ({"truncated": True}, {"truncations": [True]}),
    ],
)
def test_a_single_sequence_says_what_differs_from_its_rollout(
    own: dict[str, Any], said: dict[str, Any]
) -> None:
    """And nothing else, as several do."""
    single = rollout(3)
    single.sequences[0] = replace(single.sequences[0], **own)
    result = wire.decode_to_client(wire.encode_result(1, [single]))
    assert isinstance(result, wire.Result)
    header = result.rollouts[0]
    expected = {
        "temperature": None,
        "seats": [],
        "rewards": [],
        "stop_reasons": [],
        "truncations": [],
        **said,
    }
    assert {name: getattr(header, name) for name in expected} == expected
    assert (header.lengths, header.temperatures) == ([3], [])
