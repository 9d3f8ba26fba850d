"""Turns of a conversation become training sequences, by comparing token ids.

While a turn's prompt extends the whole of the turn before it (prompt and completion), both belong to one
sequence; where it does not (the template dropped or rewrote something, or another conversation began), a
new sequence starts. Sampled tokens have mask 1 and their log-probability, all others mask 0 and 0.0, so
every sampled token is trained on exactly once. Nothing is tokenised again. Pure and synchronous.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from envs.rollout import Float32s, Int32s, Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """Token ids of one call: the prompt as the engine saw it, what it sampled, and the log-probabilities.

    `temperature` is what was asked for, None for the engine's own; `stop_reason` is why it ended.
    """

    prompt: Int32s
    completion: Int32s
    logprobs: Float32s
    temperature: float | None = None
    stop_reason: str | None = None

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)


def merge_turns(turns: Iterable[Turn], *, seat: str = "", reward: float | None = None) -> list[Sequence]:
    """The sequences of a rollout, or of one of its seats, in order. Those in which nothing was sampled are left out."""
    sequences = []
    chain: list[Turn] = []
    for turn in turns:
        if chain and not extends(turn, chain[-1]):
            sequences.append(chain)
            chain = []
        chain.append(turn)
    if chain:
        sequences.append(chain)
    return [
        _sequence(chain, seat, reward) for chain in sequences if any(len(turn.completion) for turn in chain)
    ]


def extends(turn: Turn, previous: Turn) -> bool:
    """Whether the turn's prompt starts with all tokens of the previous turn."""
    middle, end = len(previous.prompt), len(previous)
    return (
        len(turn.prompt) >= end
        and np.array_equal(turn.prompt[:middle], previous.prompt)
        and np.array_equal(turn.prompt[middle:end], previous.completion)
    )


def _sequence(chain: list[Turn], seat: str, reward: float | None) -> Sequence:
    """One sequence of turns that extend each other: the last turn holds every token of the earlier ones."""
    last = chain[-1]
    tokens = np.concatenate((last.prompt, last.completion))
    mask = np.zeros(len(tokens), np.uint8)
    logprobs = np.zeros(len(tokens), np.float32)
    for turn in chain:
        start, end = len(turn.prompt), len(turn)
        mask[start:end] = 1
        logprobs[start:end] = turn.logprobs
    temperature, reason = last.temperature, last.stop_reason
    if len(chain) == 1:
        truncated = None if reason is None else reason == "length"
        return Sequence(tokens, mask, logprobs, reward, seat, temperature, reason, truncated)
    return Sequence(
        tokens=tokens,
        mask=mask,
        logprobs=logprobs,
        reward=reward,
        seat=seat,
        # Turns of several temperatures have none in common.
        temperature=temperature if all(turn.temperature == temperature for turn in chain) else None,
        stop_reason=reason,
        truncated=None if reason is None else any(turn.stop_reason == "length" for turn in chain),
    )
