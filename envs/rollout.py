"""What one attempt at a task yields: sequences of tokens with log-probabilities, and a reward.

Invariants, enforced by `Rollout.check`: the three arrays of a sequence have one length, at least one
token is trained on (mask 1), log-probabilities and rewards are finite. Arrays keep their compact types
(int32, uint8, float32) from the environment to the trainer; nothing turns them into lists.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Uint8s = NDArray[np.uint8]
Float32s = NDArray[np.float32]


class InvalidRolloutError(ValueError):
    """A rollout whose content cannot be trained on."""


@dataclass(slots=True)
class Sequence:
    """One training sample; `mask` is 1 where the policy sampled the token, `logprobs` is 0 elsewhere."""

    tokens: Int32s
    mask: Uint8s
    logprobs: Float32s

    def __len__(self) -> int:
        return len(self.tokens)

    def check(self) -> None:
        """Raise InvalidRolloutError unless the arrays fit together."""
        arrays = {
            "tokens": (self.tokens, np.int32),
            "mask": (self.mask, np.uint8),
            "logprobs": (self.logprobs, np.float32),
        }
        for name, (array, dtype) in arrays.items():
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
                raise InvalidRolloutError(
                    f"{name} must be a one-dimensional {np.dtype(dtype)} array, got {_describe(array)}"
                )
        if not len(self.tokens) == len(self.mask) == len(self.logprobs):
            raise InvalidRolloutError(
                f"tokens, mask and logprobs differ in length: {len(self.tokens)}, {len(self.mask)}, {len(self.logprobs)}"
            )
        if not self.mask.any():
            raise InvalidRolloutError("no token of the sequence was sampled by the policy (mask is all zero)")
        if not np.isfinite(self.logprobs).all():
            raise InvalidRolloutError("logprobs contain NaN or infinity")


@dataclass(slots=True)
class Rollout:
    """One attempt: what the policy produced and what it earned.

    `messages` is the transcript for people; training reads only the sequences. `timings` are seconds by name.
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
        if not isinstance(self.reward, (int, float)) or not np.isfinite(self.reward):
            raise InvalidRolloutError(f"reward must be a finite number, got {self.reward!r}")
        if require_sequences and not self.sequences:
            raise InvalidRolloutError("the rollout has no sequence: the model was never called")
        for sequence in self.sequences:
            sequence.check()
        for name, value in self.metrics.items():
            if not isinstance(value, (int, float)) or not np.isfinite(value):
                raise InvalidRolloutError(f'metric "{name}" must be a finite number, got {value!r}')


def _describe(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.ndim}-dimensional {value.dtype}"
    return type(value).__name__
