"""Results on the wire: the frames that carry rollouts, and what must hold before they are believed.

Behind the header come the arrays of all sequences in order (tokens as int32, log-probabilities as float32, masks as
uint8, little-endian, one behind the other) and the transcripts. Version 1, which is still spoken, had a frame for each
array and knew nothing of single sequences. Whatever arrives either keeps every promise or is a `WireError`.
"""

import sys
from collections.abc import Sequence as Seq
from typing import Any, TypeVar

import msgspec
import numpy as np

from envs.messages import RESULT_FRAMES, Result, ResultHeader, RolloutHeader
from envs.rollout import Float32s, Int32s, Rollout, Sequence, Uint8s, find_flaw, fits_float32

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_transcript_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])

# Beside its own error msgspec raises what Python does for text that is no UTF-8 and for nesting without end.
BROKEN = (msgspec.DecodeError, ValueError, OverflowError, RecursionError)

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")
_UINT8 = np.dtype("u1")


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


def result_frames(request_id: int, rollouts: Seq[Rollout], digest: int) -> list[bytes]:
    header = ResultHeader(request_id, [_rollout_header(rollout) for rollout in rollouts], digest)
    sequences = [sequence for rollout in rollouts for sequence in rollout.sequences]
    # Tokens and log-probabilities have four bytes each, so that both are where a reader can use them as they lie.
    arrays = [_raw(sequence.tokens, _INT32) for sequence in sequences]
    arrays += [_raw(sequence.logprobs, _FLOAT32) for sequence in sequences]
    arrays += [_raw(sequence.mask, _UINT8) for sequence in sequences]
    return [_encoder.encode(header), b"".join(arrays), _transcripts(rollouts)]


def _rollout_header(rollout: Rollout) -> RolloutHeader:
    """The header of a rollout; lists that say nothing about its sequences are left empty."""
    sequences = rollout.sequences
    stop_reason, truncated = rollout.stop_reason, bool(rollout.truncated)
    if len(sequences) == 1 and _says_nothing_else(sequences[0], rollout):
        temperature = sequences[0].temperature
        return RolloutHeader(
            reward=float(rollout.reward),
            lengths=[len(sequences[0].tokens)],
            stop_reason=stop_reason,
            truncated=truncated,
            metrics={name: float(value) for name, value in rollout.metrics.items()},
            timings={name: float(value) for name, value in rollout.timings.items()},
            temperature=None if temperature is None else float(temperature),
        )
    seats = [sequence.seat for sequence in sequences]
    rewards = [
        rollout.reward if sequence.reward is None else float(sequence.reward) for sequence in sequences
    ]
    temperatures = [
        None if sequence.temperature is None else float(sequence.temperature) for sequence in sequences
    ]
    reasons = [
        stop_reason if sequence.stop_reason is None else sequence.stop_reason for sequence in sequences
    ]
    cuts = [truncated if sequence.truncated is None else bool(sequence.truncated) for sequence in sequences]
    one = temperatures[0] if len(set(temperatures)) == 1 else None
    return RolloutHeader(
        reward=float(rollout.reward),
        lengths=[len(sequence.tokens) for sequence in sequences],
        stop_reason=stop_reason,
        truncated=truncated,
        metrics={name: float(value) for name, value in rollout.metrics.items()},
        timings={name: float(value) for name, value in rollout.timings.items()},
        temperature=one,
        seats=seats if any(seats) else [],
        rewards=_unless_all(rewards, rollout.reward),
        temperatures=_unless_all(temperatures, one),
        stop_reasons=_unless_all(reasons, stop_reason),
        truncations=_unless_all(cuts, truncated),
    )


def _says_nothing_else(sequence: Sequence, rollout: Rollout) -> bool:
    """Whether all that a sequence says is what its rollout says too, as that of nearly every rollout of one sequence."""
    return (
        not sequence.seat
        and (sequence.reward is None or sequence.reward == rollout.reward)
        and (sequence.stop_reason is None or sequence.stop_reason == rollout.stop_reason)
        and (sequence.truncated is None or bool(sequence.truncated) == bool(rollout.truncated))
    )


def _unless_all(values: list[T], value: object) -> list[T]:
    """The values, or none where each is this one."""
    return values if any(one != value for one in values) else []


def _transcripts(rollouts: Seq[Rollout]) -> bytes:
    return _transcript_encoder.encode([_transcript(rollout) for rollout in rollouts])


def _transcript(rollout: Rollout) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "messages": rollout.messages,
        "reward": float(rollout.reward),
        "metrics": rollout.metrics,
        "stop_reason": rollout.stop_reason,
        "truncated": rollout.truncated,
        "timings": rollout.timings,
    }
    seats = {
        sequence.seat: float(rollout.reward if sequence.reward is None else sequence.reward)
        for sequence in rollout.sequences
        if sequence.seat or sequence.reward is not None
    }
    return {**entry, "seats": seats} if seats else entry


def result_frames_1(request_id: int, rollouts: Seq[Rollout], digest: int) -> list[bytes]:
    """As version 1 had it: five frames, all fields always, nothing about single sequences."""
    headers = [
        {
            "reward": float(rollout.reward),
            "lengths": [len(sequence.tokens) for sequence in rollout.sequences],
            "stop_reason": rollout.stop_reason,
            "truncated": bool(rollout.truncated),
            "metrics": {name: float(value) for name, value in rollout.metrics.items()},
            "timings": {name: float(value) for name, value in rollout.timings.items()},
        }
        for rollout in rollouts
    ]
    sequences = [sequence for rollout in rollouts for sequence in rollout.sequences]
    return [
        _encoder.encode({"type": "result", "id": request_id, "rollouts": headers}),
        b"".join([_raw(sequence.tokens, _INT32) for sequence in sequences]),
        b"".join([_raw(sequence.mask, _UINT8) for sequence in sequences]),
        b"".join([_raw(sequence.logprobs, _FLOAT32) for sequence in sequences]),
        _transcripts(rollouts),
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


def with_arrays(result: ResultHeader, frames: Seq[bytes]) -> Result:
    """The arrays behind a result's header, or a WireError that names the request."""
    if len(frames) != RESULT_FRAMES:
        raise WireError(f"a result has {RESULT_FRAMES} frames, got {len(frames)}", request_id=result.id)
    lengths = _checked_lengths(result)
    arrays, total = frames[1], sum(lengths)
    if len(arrays) != 9 * total:
        raise WireError(
            f"{total} tokens announced, which take {9 * total} bytes, but the frame holds {len(arrays)}",
            request_id=result.id,
        )
    tokens = np.frombuffer(arrays, _INT32, total)
    logprobs = np.frombuffer(arrays, _FLOAT32, total, 4 * total)
    mask = np.frombuffer(arrays, _UINT8, total, 8 * total)
    return _checked_result(result, tokens, mask, logprobs, frames[2], lengths)


def with_arrays_1(result: ResultHeader, frames: Seq[bytes]) -> Result:
    """The same for version 1, which had a frame for each array."""
    if len(frames) != 5:
        raise WireError(f"a result has 5 frames, got {len(frames)}", request_id=result.id)
    _, tokens, mask, logprobs, transcript = frames
    lengths = _checked_lengths(result)
    total = sum(lengths)
    if len(tokens) != 4 * total or len(mask) != total or len(logprobs) != 4 * total:
        raise WireError(
            f"{total} tokens announced, but the frames hold {len(tokens)}, {len(mask)} and {len(logprobs)} bytes",
            request_id=result.id,
        )
    arrays = np.frombuffer(tokens, _INT32), np.frombuffer(mask, _UINT8), np.frombuffer(logprobs, _FLOAT32)
    return _checked_result(result, *arrays, transcript, lengths)


def _checked_lengths(result: ResultHeader) -> list[int]:
    """Tokens of each sequence, once all else that the header says of them is known to fit."""
    lengths: list[int] = []
    for rollout in result.rollouts:
        lengths += rollout.lengths
        if not fits_float32(rollout.reward):
            raise InvalidResultError(f"reward is {rollout.reward}", request_id=result.id)
        for named in (rollout.metrics, rollout.timings):
            for value in named.values():
                if not fits_float32(value):
                    raise InvalidResultError("a metric or timing is not finite", request_id=result.id)
        if rollout.temperature is not None and not fits_float32(rollout.temperature):
            raise InvalidResultError(f"temperature is {rollout.temperature}", request_id=result.id)
        for one in (
            rollout.seats,
            rollout.rewards,
            rollout.temperatures,
            rollout.stop_reasons,
            rollout.truncations,
        ):
            if one and len(one) != len(rollout.lengths):
                raise WireError(
                    f"a list of {len(one)} for {len(rollout.lengths)} sequences", request_id=result.id
                )
        if rollout.rewards and not all(map(fits_float32, rollout.rewards)):
            raise InvalidResultError("the reward of a sequence is not finite", request_id=result.id)
        if rollout.rewards and not _is_one_per_seat(rollout):
            raise InvalidResultError("sequences of one seat have different rewards", request_id=result.id)
        if rollout.temperatures and not all(t is None or fits_float32(t) for t in rollout.temperatures):
            raise InvalidResultError("the temperature of a sequence is not finite", request_id=result.id)
    return lengths


def _is_one_per_seat(rollout: RolloutHeader) -> bool:
    earned: dict[str, float] = {}
    seats = rollout.seats or [""] * len(rollout.rewards)
    return all(
        earned.setdefault(seat, reward) == reward for seat, reward in zip(seats, rollout.rewards, strict=True)
    )


def _checked_result(
    result: ResultHeader,
    tokens: Int32s,
    mask: Uint8s,
    logprobs: Float32s,
    transcript: bytes,
    lengths: list[int],
) -> Result:
    flaw = find_flaw(tokens, mask, logprobs, lengths) or _flaw_in_transcript(transcript, len(result.rollouts))
    if flaw:
        raise InvalidResultError(flaw, request_id=result.id)
    return Result(result.id, result.rollouts, tokens, mask, logprobs, transcript, result.digest)


def _flaw_in_transcript(transcript: bytes, rollouts: int) -> str:
    """What is wrong with the list of transcripts; what stands in its entries is skipped, not decoded."""
    try:
        entries = len(_transcript_decoder.decode(transcript))
    except BROKEN as error:
        return f"the transcripts are not a msgpack list: {error}"
    return "" if entries == rollouts else f"{entries} transcripts for {rollouts} rollouts"
