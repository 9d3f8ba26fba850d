"""A small trainable policy: log-linear over hashed features of the conversation, learned by policy gradient.

The logits of the next token are a sum of rows of one table. Which rows is decided by the conversation alone:
its first word, the turn, the last message's last tokens, the last answer, the position in the new answer and
the token written before. Some columns of the table do not stand for a token but for "copy the n-th last token
of the message", so that what is learned on one task carries over to others.
Sampling and training compute the same features from the same token ids. Nothing about any environment is built
in: a new policy writes short answers of random letters and digits.
Pure numpy: no clock, no randomness of its own, no I/O but `save` and `load`.
"""

import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.local.tokenizer import ASSISTANT, END, NUM_OUTPUTS, USER, encode

Float32s = NDArray[np.float32]
Int64s = NDArray[np.int64]
Uint64s = NDArray[np.uint64]

WEIGHTS_FILE = "policy.npz"
LAST_TOKENS = 4
"""How many tokens at the end of the last message are looked at, and can be copied."""
FEATURES = LAST_TOKENS + 3
COLUMNS = NUM_OUTPUTS + LAST_TOKENS

_PREVIOUS_FEATURE = 1
_LONGEST_ANSWER = 16
_MOST_TURNS = 8
_ROW_BITS = 12
_SPACE = encode(" ")[0]
_64_BITS = (1 << 64) - 1
# Odd constants that spread nearby keys over all rows.
_KEY_FACTOR = 0x2545F4914F6CDD1D
_POSITION_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_PREVIOUS_FACTOR = np.uint64(0xC2B2AE3D27D4EB4F)
_ROW_FACTOR = np.uint64(0xD6E8FEB86659FD93)


class WeightsError(ValueError):
    """Weights that are missing, damaged or of another shape; the message names the path."""


def read_prompt(prompt: Sequence[int]) -> tuple[list[int], list[int]]:
    """What the policy sees of a prompt that ends with the assistant mark: a key per feature, the last tokens."""
    turn = prompt.count(ASSISTANT) - 1
    word = 0
    for token in prompt[prompt.index(USER) + 1 :] if USER in prompt else ():
        if token in (_SPACE, END):
            break
        word = word * 131 + token + 1
    answer = 0
    if turn > 0:
        backwards = prompt[::-1]
        answer = backwards[backwards.index(ASSISTANT, 1) - 1]
    # The prompt ends with: the last message's tokens, its end mark, the assistant mark.
    last = [min(prompt[-3 - back], END) if len(prompt) > back + 2 else END for back in range(LAST_TOKENS)]
    situation = (word * _MOST_TURNS + min(turn, _MOST_TURNS - 1)) * FEATURES
    keys = [situation, situation + _PREVIOUS_FEATURE, (situation + 2) * 65536 + answer * 256 + last[0]]
    keys += [(situation + 3 + back) * 65536 + token for back, token in enumerate(last)]
    return [(key * _KEY_FACTOR) & _64_BITS for key in keys], last


def find_rows(keys: Uint64s, positions: Int64s, previous: Int64s) -> Int64s:
    """Rows of the table that take part in each token: [tokens, features]."""
    at_position = (
        keys + (np.minimum(positions, _LONGEST_ANSWER).astype(np.uint64) * _POSITION_FACTOR)[:, None]
    )
    at_position[:, _PREVIOUS_FEATURE] += previous.astype(np.uint64) * _PREVIOUS_FACTOR
    at_position ^= at_position >> np.uint64(29)
    return ((at_position * _ROW_FACTOR) >> np.uint64(64 - _ROW_BITS)).astype(np.int64)


class Experience:
    """The sampled tokens of a batch, gathered sequence by sequence, ready to learn from."""

    def __init__(self) -> None:
        self.sequences = 0
        self._rows: list[Int64s] = []
        self._last: list[Int64s] = []
        self._actions: list[NDArray[Any]] = []
        self._logprobs: list[NDArray[Any]] = []
        self._advantages: list[NDArray[Any]] = []

    def add(
        self, tokens: NDArray[Any], mask: NDArray[Any], logprobs: NDArray[Any], advantages: NDArray[Any]
    ) -> None:
        """One sequence; every run of masked-in tokens is an answer to what stands before it."""
        self.sequences += 1
        sampled = np.flatnonzero(mask)
        for answer in np.split(sampled, np.flatnonzero(np.diff(sampled) > 1) + 1):
            start, length = int(answer[0]), len(answer)
            keys, last = read_prompt(tokens[:start].tolist())
            rows = find_rows(
                np.tile(np.array(keys, np.uint64), (length, 1)),
                np.arange(length),
                tokens[start - 1 : start + length - 1].astype(np.int64),
            )
            self._rows.append(rows)
            self._last.append(np.tile(np.array(last, np.int64), (length, 1)))
            self._actions.append(tokens[answer])
            self._logprobs.append(logprobs[answer])
            self._advantages.append(advantages[answer])

    def arrays(self) -> tuple[Int64s, Int64s, Int64s, Float32s, Float32s]:
        """Rows, last tokens, actions, log-probabilities, advantages; one entry per sampled token."""
        return (
            np.concatenate(self._rows),
            np.concatenate(self._last),
            np.concatenate(self._actions).astype(np.int64),
            np.concatenate(self._logprobs).astype(np.float32),
            np.concatenate(self._advantages).astype(np.float32),
        )


class Policy:
    """The table. Its first columns are the outputs' weights, its last ones those of copying."""

    def __init__(self) -> None:
        self.table: Float32s = np.zeros((1 << _ROW_BITS, COLUMNS), np.float32)
        self._prior = _prior()

    def log_probabilities(self, rows: Int64s, last: Int64s) -> Float32s:
        """Log-probability of every output: [tokens, outputs]."""
        sums: Float32s = self.table[rows].sum(axis=1)
        logits: Float32s = sums[:, :NUM_OUTPUTS] + self._prior
        every = np.arange(len(rows))
        for back in range(LAST_TOKENS):
            logits[every, last[:, back]] += sums[:, NUM_OUTPUTS + back]
        logits -= logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return logits

    def learn(self, experience: Experience, *, learning_rate: float, clip: float = 3.0) -> dict[str, float]:
        """One step up the clipped policy-gradient objective (PPO's, with the advantages of GRPO); returns what it saw.

        A token that is already `clip` times likelier (rarer) than when it was sampled gets no further push up (down);
        the others are weighted by that ratio. The range is wider than for large models, because this policy moves
        far in one step and learns from batches that are a step or two old.
        """
        rows, last, actions, old, advantages = experience.arrays()
        every = np.arange(len(actions))
        logprobs = self.log_probabilities(rows, last)
        ratio = np.exp(logprobs[every, actions] - old)
        inside = np.where(advantages > 0, ratio < clip, ratio > 1 / clip)
        # The gradient of a log-probability by the logits is one-hot minus the probabilities.
        probabilities = np.exp(logprobs)
        by_logits = -probabilities
        by_logits[every, actions] += 1
        by_logits *= (learning_rate / experience.sequences * advantages * ratio * inside)[:, None]
        by_columns = np.concatenate((by_logits, np.take_along_axis(by_logits, last, axis=1)), axis=1)
        for feature in range(FEATURES):
            np.add.at(self.table, rows[:, feature], by_columns)
        return {
            "tokens": float(len(actions)),
            "ratio": float(ratio.mean()),
            "clipped": 1.0 - float(inside.mean()),
            "entropy": -float((probabilities * logprobs).sum(axis=1).mean()),
        }

    def save(self, directory: Path) -> Path:
        """Write the weights; the file appears whole or not at all, and survives a crash once it is there."""
        directory.mkdir(parents=True, exist_ok=True)
        partial = directory / f".{WEIGHTS_FILE}.{os.getpid()}"
        with partial.open("wb") as file:
            np.savez(file, table=self.table)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(directory / WEIGHTS_FILE)
        return directory


def load_policy(path: Path) -> Policy:
    """A policy with the weights of a file, or of a directory that `save` wrote."""
    file = path / WEIGHTS_FILE if path.is_dir() else path
    policy = Policy()
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as archive:
            table = archive["table"]
    except FileNotFoundError:
        raise WeightsError(f"no weights at {file}") from None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise WeightsError(f"weights at {file} cannot be read: {error}") from error
    if table.shape != policy.table.shape or not np.isfinite(table).all():
        raise WeightsError(f"weights at {file} are not of this policy: shape {table.shape}, or not finite")
    policy.table = table.astype(np.float32, copy=False)
    return policy


def _prior() -> Float32s:
    """Where a policy starts from: short answers of letters and digits."""
    prior = np.full(NUM_OUTPUTS, -6.0, np.float32)
    prior[encode("abcdefghijklmnopqrstuvwxyz0123456789")] = 0.0
    prior[END] = 2.5
    return prior


def find_policy_flaw(path: str) -> str:
    """Why no policy can be loaded from a path; empty if one is there."""
    try:
        folder = Path(path)
        there = (folder / WEIGHTS_FILE if folder.is_dir() else folder).is_file()
    except ValueError:  # a name that no file can have
        there = False
    return (
        "" if there else f"there is no {WEIGHTS_FILE} in {path!r}, which the policy server of [local] loads"
    )
