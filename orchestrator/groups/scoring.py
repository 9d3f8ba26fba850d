"""From a complete group's rewards to advantages, and to the `Group` that is trained on.

An advantage function takes the rewards of one group's rollouts (float64) and returns one advantage per rollout; all
sequences of a rollout share it. Pure; nothing here knows where rollouts come from.
"""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from envs.importing import ImportReferenceError, import_attribute
from envs.rollout import Float32s, Int32s, Uint8s
from envs.wire import Result
from orchestrator.dispatch.work import PendingGroup
from orchestrator.errors import ConfigError
from orchestrator.groups.group import Group

Floats = NDArray[np.float64]
AdvantageFunction = Callable[[Floats], Floats]

_EPSILON = 1e-6
"""Keeps the division finite; far below any difference of rewards that matters."""


def grpo(rewards: Floats) -> Floats:
    """Distance from the group's mean in standard deviations."""
    return np.asarray((rewards - rewards.mean()) / (rewards.std() + _EPSILON))


def rloo(rewards: Floats) -> Floats:
    """Distance from the mean of the others; a lone rollout has nothing to be compared with and gets 0."""
    n = len(rewards)
    if n == 1:
        return np.zeros(1)
    return np.asarray((rewards - rewards.mean()) * (n / (n - 1)))


def mean(rewards: Floats) -> Floats:
    """Distance from the group's mean."""
    return np.asarray(rewards - rewards.mean())


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


def group_rewards(pending: PendingGroup) -> Floats:
    """Rewards of all rollouts, in the order of the results."""
    return np.array(
        [rollout.reward for result in pending.results for rollout in result.rollouts], dtype=np.float64
    )


def has_variance(rewards: Floats) -> bool:
    """Whether any two rewards differ by more than rounding."""
    return bool(rewards.max() - rewards.min() > _EPSILON)


def build_group(pending: PendingGroup, rewards: Floats, advantages: Floats, *, version_end: int) -> Group:
    """The finished group; arrays of its results are concatenated, never turned into lists."""
    rollouts = [rollout for result in pending.results for rollout in result.rollouts]
    if advantages.shape != rewards.shape or not np.isfinite(advantages).all():
        raise ValueError(f"the advantage function returned {advantages!r} for rewards {rewards!r}")
    counts = [len(rollout.lengths) for rollout in rollouts]
    tokens, mask, logprobs = _arrays(pending.results)
    return Group(
        task=pending.task,
        version=pending.version,
        version_end=version_end,
        rollouts=len(rollouts),
        lengths=tuple(length for rollout in rollouts for length in rollout.lengths),
        tokens=tokens,
        mask=mask,
        logprobs=logprobs,
        rewards=np.repeat(rewards, counts).astype(np.float32),
        advantages=np.repeat(advantages, counts).astype(np.float32),
        transcript=join_transcripts([result.transcript for result in pending.results]),
    )


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
