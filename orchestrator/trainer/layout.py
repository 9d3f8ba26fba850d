"""How sequences are laid out for a model: micro-batches of bounded size, padded rows or one packed row.

A model's output at position t is about token t + 1, and what was recorded of a token stands at the token's own place.
So `Padded` and `Packed` have two kinds of arrays: `tokens` and `position_ids` are what the model reads, and `targets`, `mask`,
`logprobs`, `advantages` and `temperatures` are shifted by one, so that position t of them belongs to the output at position t. The last
position of every sequence has no target and mask 0; no position is ever about a token of another sequence. The first
token of a sequence cannot be predicted from anything, so it is not trained on, whatever its mask says.

Every sequence is in exactly one place, nothing is cut, and the same sequences give the same arrays. Pure; numpy only.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.trainer.batch import Float32s, Int32s, TrainingSequence

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Padded:
    """Sequences as the rows of [rows, width] arrays, each filled up on the right.

    `attention_mask` is True where a row has a token of its sequence. `mask` is True where `targets` was sampled by the policy;
    elsewhere the shifted arrays are 0. `temperatures` is what logits are divided by, and 1 where there is nothing to divide by.
    """

    tokens: Int64s
    attention_mask: Bools
    position_ids: Int64s
    targets: Int64s
    mask: Bools
    logprobs: Float32s
    advantages: Float32s
    temperatures: Float32s


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences one behind the other in [tokens] arrays; positions begin at 0 in each.

    `cu_seqlens` are the places where they begin, and the end of the last: what attention over packed sequences asks for, with
    `max_seqlen`. What was added to reach a multiple is a further sequence at the end, with mask 0.
    """

    tokens: Int64s
    position_ids: Int64s
    sequence_lengths: Int32s
    cu_seqlens: Int32s
    targets: Int64s
    mask: Bools
    logprobs: Float32s
    advantages: Float32s
    temperatures: Float32s

    @property
    def max_seqlen(self) -> int:
        return int(self.sequence_lengths.max(initial=0))


def micro_batches(
    sequences: Sequence[TrainingSequence], max_tokens: int, *, padded: bool = False, at_least: int = 1
) -> list[list[TrainingSequence]]:
    """Parts of at most `max_tokens` tokens each; a sequence that is longer by itself is a part by itself.

    With `padded` the fill counts: rows times the longest. Ranks that must make equally many steps take the highest number of
    any rank as `at_least`, which is possible because every rank has as many sequences as the others.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    if not 0 <= at_least <= max(1, len(sequences)):
        raise ValueError(f"{len(sequences)} sequences cannot be at least {at_least} micro-batches")
    longest_first = sorted(range(len(sequences)), key=lambda index: (-len(sequences[index]), index))
    lengths = [len(sequence) for sequence in sequences]
    parts = (_fill_rows if padded else _fill_packs)(longest_first, lengths, max_tokens)
    while parts and len(parts) < at_least:
        parts.sort(key=lambda part: (len(part) < 2, -sum(lengths[index] for index in part)))
        parts[:1] = [parts[0][::2], parts[0][1::2]]
    return [[sequences[index] for index in sorted(part)] for part in sorted(map(sorted, parts))]


def pad(sequences: Sequence[TrainingSequence], *, fill: int = 0, multiple_of: int = 1) -> Padded:
    """Rows of one width, a multiple of `multiple_of`; `fill` is the token behind the end of a row."""
    lengths = [len(sequence) for sequence in sequences]
    shape = (len(lengths), _round_up(max(lengths, default=0), multiple_of))
    there = np.arange(shape[1]) < np.asarray(lengths, np.int64).reshape(-1, 1)
    flat = _shifted(sequences)

    def rows(values: NDArray[Any], empty: int = 0) -> NDArray[Any]:
        filled = np.full(shape, empty, values.dtype)
        filled[there] = values
        return filled

    return Padded(
        tokens=rows(flat.tokens, fill),
        attention_mask=there,
        position_ids=np.where(there, np.arange(shape[1]), 0),
        targets=rows(flat.targets),
        mask=rows(flat.mask),
        logprobs=rows(flat.logprobs),
        advantages=rows(flat.advantages),
        temperatures=rows(flat.temperatures, 1),
    )


def pack(sequences: Sequence[TrainingSequence], *, fill: int = 0, multiple_of: int = 1) -> Packed:
    """One row of all sequences, filled up with `fill` to a multiple of `multiple_of` tokens."""
    lengths = [len(sequence) for sequence in sequences]
    flat = _shifted(sequences)
    missing = _round_up(sum(lengths), multiple_of) - sum(lengths)
    if missing:
        lengths.append(missing)

    def row(values: NDArray[Any], empty: int = 0) -> NDArray[Any]:
        return np.concatenate([values, np.full(missing, empty, values.dtype)])

    return Packed(
        tokens=row(flat.tokens, fill),
        position_ids=np.concatenate([np.arange(length) for length in [0, *lengths]]),
        sequence_lengths=np.asarray(lengths, np.int32),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        targets=row(flat.targets),
        mask=row(flat.mask),
        logprobs=row(flat.logprobs),
        advantages=row(flat.advantages),
        temperatures=row(flat.temperatures, 1),
    )


@dataclass(frozen=True, slots=True)
class _Flat:
    tokens: Int64s
    targets: Int64s
    mask: Bools
    logprobs: Float32s
    advantages: Float32s
    temperatures: Float32s


def _shifted(sequences: Sequence[TrainingSequence]) -> _Flat:
    """All sequences behind each other; every array but the tokens one to the left, and empty at the end of each."""
    lengths = np.asarray([len(sequence) for sequence in sequences], np.int64)
    lasts = (np.cumsum(lengths) - 1)[lengths > 0]

    def joined(pieces: Iterator[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
        return np.concatenate([np.empty(0, dtype), *pieces]).astype(dtype)

    tokens = joined((sequence.tokens for sequence in sequences), np.int64)
    mask = _one_to_the_left(joined((sequence.mask for sequence in sequences), np.bool_), lasts)

    def about_the_next(pieces: Iterator[NDArray[Any]]) -> NDArray[Any]:
        return np.asarray(_one_to_the_left(joined(pieces, np.float32), lasts) * mask)

    # One that is not known, or 0 (the likeliest token), cannot be divided by.
    temperatures = np.asarray([sequence.temperature or 1.0 for sequence in sequences], np.float32)
    return _Flat(
        tokens=tokens,
        targets=_one_to_the_left(tokens, lasts),
        mask=mask,
        logprobs=about_the_next(sequence.logprobs for sequence in sequences),
        advantages=about_the_next(sequence.advantages for sequence in sequences),
        temperatures=np.where(mask, np.repeat(temperatures, lengths), np.float32(1.0)),
    )


def _one_to_the_left(values: NDArray[Any], lasts: Int64s) -> NDArray[Any]:
    moved = np.roll(values, -1)
    moved[lasts] = 0
    return moved


def _fill_packs(longest_first: list[int], lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Each sequence into the pack that has the most room, if it has enough of it."""
    packs: list[list[int]] = []
    used: list[tuple[int, int]] = []
    for index in longest_first:
        tokens, number = heappop(used) if used else (0, -1)
        if number >= 0 and tokens + lengths[index] <= max_tokens:
            packs[number].append(index)
            heappush(used, (tokens + lengths[index], number))
            continue
        if number >= 0:
            heappush(used, (tokens, number))
        heappush(used, (lengths[index], len(packs)))
        packs.append([index])
    return packs


def _fill_rows(longest_first: list[int], lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Neighbours in length together, because a row costs as much as the longest beside it."""
    parts: list[list[int]] = []
    for index in longest_first:
        if parts and (len(parts[-1]) + 1) * lengths[parts[-1][0]] <= max_tokens:
            parts[-1].append(index)
        else:
            parts.append([index])
    return parts


def _round_up(number: int, multiple_of: int) -> int:
    if multiple_of < 1:
        raise ValueError(f"multiple_of must be at least 1, got {multiple_of}")
    return -(-number // multiple_of) * multiple_of
