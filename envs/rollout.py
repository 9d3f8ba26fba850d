"""What one attempt at a task yields: sequences of tokens with log-probabilities, and a reward.

Invariants, enforced by `Rollout.check` where a rollout is made and by the wire where it arrives: the three
arrays of a sequence have one length; token ids are not negative; the mask holds 0 and 1, and at least one 1;
log-probabilities are finite, not positive, and 0 where the mask is 0; rewards, metrics, timings and temperatures
fit into a float32. Arrays keep their compact types (int32, uint8, float32) from the environment to the trainer; nothing
turns them into lists.
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Uint8s = NDArray[np.uint8]
Float32s = NDArray[np.float32]


MAX_NUMBER = 3e38
"""Largest reward, metric or timing: what is larger becomes infinite in the float32 arrays of a batch."""

MAX_LOGPROB = 1e-3
"""Largest log-probability. Probabilities end at 1, but engines compute in half precision and round."""


_ARRAYS = (
    ("tokens", np.dtype(np.int32)),
    ("mask", np.dtype(np.uint8)),
    ("logprobs", np.dtype(np.float32)),
)


class InvalidRolloutError(ValueError):
    """A rollout whose content cannot be trained on."""


@dataclass(slots=True)
class Sequence:
    """One training sample; `mask` is 1 where the policy sampled the token, `logprobs` is 0 elsewhere.

    `seat` is whose part it is in a rollout that plays several. What is None is as the rollout's: its reward, why it
    ended, whether a limit cut it. `temperature` is what its tokens were sampled with, None where nobody knows.
    """

    tokens: Int32s
    mask: Uint8s
    logprobs: Float32s
    reward: float | None = None
    seat: str = ""
    temperature: float | None = None
    stop_reason: str | None = None
    truncated: bool | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def check(self) -> None:
        """Raise InvalidRolloutError unless the arrays fit together."""
        for name, dtype in _ARRAYS:
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
                raise InvalidRolloutError(
                    f"{name} must be a one-dimensional {dtype} array, got {_describe(array)}"
                )
        if not len(self.tokens) == len(self.mask) == len(self.logprobs):
            raise InvalidRolloutError(
                f"tokens, mask and logprobs differ in length: {len(self.tokens)}, {len(self.mask)}, {len(self.logprobs)}"
            )
        if self.reward is not None and not _is_number(self.reward):
            raise InvalidRolloutError(
                f"the reward of a sequence must be a finite number, got {self.reward!r}"
            )
        if self.temperature is not None and not _is_number(self.temperature):
            raise InvalidRolloutError(f"temperature must be a finite number, got {self.temperature!r}")
        if not isinstance(self.seat, str) or not isinstance(self.stop_reason, str | None):
            raise InvalidRolloutError(
                f"seat and stop_reason must be text, got {self.seat!r} and {self.stop_reason!r}"
            )
        flaw = find_flaw(self.tokens, self.mask, self.logprobs, [len(self.tokens)])
        if flaw:
            raise InvalidRolloutError(flaw)


@dataclass(slots=True)
class Rollout:
    """One attempt: what the policy produced and what it earned.

    `reward` is that of every sequence that has none of its own. `messages` is the transcript for people; training reads only the sequences. `timings` are seconds by name.
    """

    sequences: list[Sequence]
    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    stop_reason: str = "stop"
    truncated: bool = False
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens in all sequences."""
        return sum(len(sequence) for sequence in self.sequences)

    def check(self, *, require_sequences: bool = True) -> None:
        """Raise InvalidRolloutError unless this can be trained on.

        Evaluations are not trained on: with `require_sequences` False they may come without sequences.
        """
        if not _is_number(self.reward):
            raise InvalidRolloutError(f"reward must be a finite number, got {self.reward!r}")
        if require_sequences and not self.sequences:
            raise InvalidRolloutError("the rollout has no sequence: the model was never called")
        earned: dict[str, float] = {}
        for sequence in self.sequences:
            sequence.check()
            reward = self.reward if sequence.reward is None else sequence.reward
            if earned.setdefault(sequence.seat, reward) != reward:
                raise InvalidRolloutError(
                    f"sequences of one seat have one reward, but those of {sequence.seat!r} have {earned[sequence.seat]:g}"
                    f" and {reward:g}; give them seats of their own"
                )
        for name, value in self.metrics.items():
            if not _is_number(value):
                raise InvalidRolloutError(f'metric "{name}" must be a finite number, got {value!r}')


def find_flaw(tokens: Int32s, mask: Uint8s, logprobs: Float32s, lengths: Seq[int]) -> str:
    """What is wrong with sequences of these lengths (at least 1 each), one behind the other; empty when nothing is.

    The arrays have one length. A few passes over them; both sides do this for every rollout, so each call counts.
    """
    if not len(tokens):
        return "" if not len(lengths) else "the sequence is empty"
    # Where the largest is costs a sixth of what the largest costs; a NaN counts as both the largest and the smallest.
    if tokens.item(tokens.argmin()) < 0:
        return "a token id is negative"
    if mask.item(mask.argmax()) > 1:
        return "the mask holds something else than 0 and 1"
    raw, start = mask.tobytes(), 0
    for length in lengths:
        if raw.find(1, start, start + length) < 0:
            return "no token of the sequence was sampled by the policy (mask is all zero)"
        start += length
    lowest, highest = logprobs.item(logprobs.argmin()), logprobs.item(logprobs.argmax())
    if not (lowest > -math.inf and highest < math.inf):
        return "logprobs contain NaN or infinity"
    if highest > MAX_LOGPROB:
        return f"a log-probability is {highest:g}, above 0"
    if 0 in raw:
        stray = logprobs.astype(np.bool_) > mask.view(np.bool_)
        if stray.item(stray.argmax()):
            return "a token that the policy did not sample (mask 0) has a log-probability"
    return ""


def fits_float32(value: float) -> bool:
    """Whether a number is finite and stays so as float32."""
    return -MAX_NUMBER <= value <= MAX_NUMBER


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and fits_float32(value)


def _describe(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.ndim}-dimensional {value.dtype}"
    return type(value).__name__
