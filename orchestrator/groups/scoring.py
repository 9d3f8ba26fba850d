"""From a complete group's rewards to advantages, and to the `Group` that is trained on.

An advantage function takes the rewards of one group's rollouts (float64) and returns one advantage per rollout; all
sequences of a rollout share it. Where rollouts have seats, it is called once per seat, with the rewards that the rollouts
earned there: a seat is compared with itself and with nothing else. Pure; nothing here knows where rollouts come from.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from envs.importing import ImportReferenceError, import_attribute
from envs.rollout import Float32s, Int32s, Uint8s
from envs.wire import Result, RolloutHeader
from orchestrator.dispatch.work import PendingGroup
from orchestrator.errors import ConfigError
from orchestrator.groups.group import FACTS, Facts, Group, encode_details

Floats = NDArray[np.float64]
AdvantageFunction = Callable[[Floats], Floats]

_EPSILON = 1e-6
"""Keeps the division finite; far below any difference of rewards that matters."""


def grpo(rewards: Floats) -> Floats:
    """Distance from the group's mean in standard deviations."""
    distances = mean(rewards)
    return distances / (math.sqrt(distances.dot(distances) / len(rewards)) + _EPSILON)


def rloo(rewards: Floats) -> Floats:
    """Distance from the mean of the others; a lone rollout has nothing to be compared with and gets 0."""
    n = len(rewards)
    if n == 1:
        return np.zeros(1)
    return mean(rewards) * (n / (n - 1))


def mean(rewards: Floats) -> Floats:
    """Distance from the group's mean; by `reduce`, because `mean` of a few numbers takes four times as long."""
    return np.asarray(rewards - np.add.reduce(rewards) / len(rewards))


def none(rewards: Floats) -> Floats:
    """The reward itself."""
    return rewards.copy()


_NAMED: dict[str, AdvantageFunction] = {"grpo": grpo, "rloo": rloo, "mean": mean, "none": none}


def build_advantage(name: str) -> AdvantageFunction:
    """A named function, or "module:attr"."""
    if name in _NAMED:
        return _NAMED[name]
    if ":" not in name:
        raise ConfigError(
            f'dispatch.advantage: "{name}" is not one of {", ".join(_NAMED)}, nor "module:attr"'
        )
    try:
        function = import_attribute(name, what="dispatch.advantage:")
    except ImportReferenceError as error:
        raise ConfigError(str(error)) from None
    if not callable(function):
        raise ConfigError(f'dispatch.advantage: "{name}" is not callable')
    return function  # type: ignore[no-any-return]  # a user's function; its result is checked where it is used


@dataclass(frozen=True, slots=True)
class Seat:
    """One seat of a group: the reward that each rollout which played it earned there, and its sequences.

    `counts` are the sequences of each of these rollouts, `places` where they are in the group (None: all, in order).
    """

    rewards: Floats
    counts: list[int]
    places: list[int] | None = None


def seats_of(pending: PendingGroup) -> list[Seat]:
    """The seats of a group, each to be compared with itself; nearly always one."""
    rollouts = [rollout for result in pending.results for rollout in result.rollouts]
    if not any(rollout.seats or rollout.rewards for rollout in rollouts):
        alone = np.array([rollout.reward for rollout in rollouts], dtype=np.float64)
        return [Seat(alone, [len(rollout.lengths) for rollout in rollouts])]
    found: dict[str, tuple[list[float], list[int], list[int]]] = {}
    place = 0
    for rollout in rollouts:
        mine: dict[str, int] = {}
        for number in range(len(rollout.lengths)):
            name = rollout.seats[number] if rollout.seats else ""
            rewards, counts, places = found.setdefault(name, ([], [], []))
            if name not in mine:
                mine[name] = len(counts)
                rewards.append(rollout.rewards[number] if rollout.rewards else rollout.reward)
                counts.append(0)
            counts[mine[name]] += 1
            places.append(place)
            place += 1
    return [
        Seat(np.array(rewards, dtype=np.float64), counts, places)
        for rewards, counts, places in found.values()
    ]


def has_variance(rewards: Floats) -> bool:
    """Whether any two rewards differ by more than rounding."""
    lowest, highest = _ends(rewards)
    return highest - lowest > _EPSILON


def _ends(values: Floats) -> tuple[float, float]:
    """The smallest and the largest; where there is a NaN, both are. A third of what `min` and `max` cost."""
    return float(values.item(values.argmin())), float(values.item(values.argmax()))


def build_group(
    pending: PendingGroup, seats: Sequence[Seat], advantage: AdvantageFunction, *, version_end: int
) -> Group:
    """The finished group; arrays of its results are concatenated, never turned into lists."""
    rollouts = [rollout for result in pending.results for rollout in result.rollouts]
    lengths = tuple(length for rollout in rollouts for length in rollout.lengths)
    rewards, advantages = np.empty(len(lengths), np.float32), np.empty(len(lengths), np.float32)
    for seat in seats:
        values = advantage(seat.rewards)
        if values.shape != seat.rewards.shape or not all(map(math.isfinite, _ends(values))):
            raise ValueError(f"the advantage function returned {values!r} for rewards {seat.rewards!r}")
        places = slice(None) if seat.places is None else seat.places
        earned = seat.rewards
        if len(values) != sum(seat.counts):
            earned, values = np.repeat(earned, seat.counts), np.repeat(values, seat.counts)
        rewards[places] = earned
        advantages[places] = values
    tokens, mask, logprobs = _arrays(pending.results)
    facts, names = _facts(pending, version_end)
    return Group(
        task=pending.task,
        version=pending.version,
        version_end=version_end,
        rollouts=len(rollouts),
        lengths=lengths,
        tokens=tokens,
        mask=mask,
        logprobs=logprobs,
        rewards=rewards,
        advantages=advantages,
        facts=facts,
        details=encode_details(names, [rollout.metrics for rollout in rollouts]),
        digest=next((result.digest for result in pending.results if result.digest), 0),
        transcript=join_transcripts([result.transcript for result in pending.results]),
    )


def _facts(pending: PendingGroup, version_end: int) -> tuple[Facts, list[str]]:
    """A row per sequence, and the names that the rows refer to."""
    names = {"": 0}
    rows: list[tuple[int, int, int, int, int, float, bool, int]] = []
    spans = pending.spans or [(pending.version, version_end)] * len(pending.results)
    number = 0
    for result, (version, end) in zip(pending.results, spans, strict=True):
        for rollout in result.rollouts:
            reason = names.setdefault(rollout.stop_reason, len(names))
            heat = math.nan if rollout.temperature is None else rollout.temperature
            usual = (version, end, number, 0, reason, heat, rollout.truncated, 0)
            if rollout.seats or rollout.temperatures or rollout.stop_reasons or rollout.truncations:
                rows += _own_facts(rollout, usual, names)
            else:
                rows += [usual] * len(rollout.lengths)
            number += 1
    return np.array(rows, FACTS), list(names)


def _own_facts(
    rollout: RolloutHeader, usual: tuple[int, int, int, int, int, float, bool, int], names: dict[str, int]
) -> Iterator[tuple[int, int, int, int, int, float, bool, int]]:
    """Rows of a rollout whose sequences differ."""
    version, end, number, _, reason, heat, cut, unused = usual
    for place in range(len(rollout.lengths)):
        seat = names.setdefault(rollout.seats[place], len(names)) if rollout.seats else 0
        if rollout.stop_reasons:
            reason = names.setdefault(rollout.stop_reasons[place], len(names))
        if rollout.temperatures:
            given = rollout.temperatures[place]
            heat = math.nan if given is None else given
        if rollout.truncations:
            cut = rollout.truncations[place]
        yield version, end, number, seat, reason, heat, cut, unused


def _arrays(results: Sequence[Result]) -> tuple[Int32s, Uint8s, Float32s]:
    if len(results) == 1:
        return results[0].tokens, results[0].mask, results[0].logprobs
    return (
        np.concatenate([result.tokens for result in results]),
        np.concatenate([result.mask for result in results]),
        np.concatenate([result.logprobs for result in results]),
    )


def join_transcripts(parts: Sequence[bytes]) -> bytes:
    """One msgpack list from several, without decoding what they hold beyond their first bytes."""
    if len(parts) == 1:
        return parts[0]
    total, bodies = 0, []
    for part in parts:
        count, body = _list_header(part)
        total += count
        bodies.append(part[body:])
    return _encode_list_header(total) + b"".join(bodies)


def _list_header(part: bytes) -> tuple[int, int]:
    """Number of items of a msgpack list, and where its first item starts."""
    if not part:
        return 0, 0
    first = part[0]
    if 0x90 <= first <= 0x9F:
        return first & 0x0F, 1
    if first == 0xDC:
        return int.from_bytes(part[1:3], "big"), 3
    if first == 0xDD:
        return int.from_bytes(part[1:5], "big"), 5
    raise msgspec.DecodeError(f"a transcript must be a msgpack list, it starts with {first:#x}")


def _encode_list_header(count: int) -> bytes:
    if count < 16:
        return bytes([0x90 | count])
    return b"\xdd" + count.to_bytes(4, "big")
