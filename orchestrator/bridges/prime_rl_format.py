"""A batch as prime-rl's trainer reads it: for each rank a list of micro-batches, in msgpack, whatever it comes over."""

from collections.abc import Sequence

import msgspec

from orchestrator.trainer import TrainingSequence, micro_batches

_RESERVED = "all"
"""A name that an env must not have there."""


class MicroBatch(msgspec.Struct, frozen=True, array_like=True):
    """Packed sequences; the order of the fields is the format, and positions are those of the tokens."""

    input_ids: list[int]
    loss_mask: list[bool]
    advantages: list[float]
    inference_logprobs: list[float]
    position_ids: list[int]
    sequence_lengths: list[int]
    temperatures: list[float]
    env_names: list[str]
    seq_lens: list[int]


def share_out(sequences: Sequence[TrainingSequence], ranks: int, max_tokens: int) -> list[list[MicroBatch]]:
    """As many micro-batches for every rank; where they do not go round, one comes again that trains nothing."""
    parts = micro_batches(sequences, max_tokens, at_least=min(ranks, len(sequences)))
    parts.sort(key=lambda part: -sum(map(len, part)))
    filled = [_pack(part) for part in parts]
    missing = -len(filled) % ranks
    if missing:
        shortest = filled[-1]
        nothing = msgspec.structs.replace(
            shortest,
            loss_mask=[False] * len(shortest.input_ids),
            advantages=[0.0] * len(shortest.input_ids),
        )
        filled += [nothing] * missing
    return [filled[rank::ranks] for rank in range(ranks)]


def _pack(part: Sequence[TrainingSequence]) -> MicroBatch:
    lengths = [len(sequence) for sequence in part]
    return MicroBatch(
        input_ids=[token for sequence in part for token in sequence.tokens.tolist()],
        loss_mask=[sampled for sequence in part for sampled in (sequence.mask != 0).tolist()],
        advantages=[value for sequence in part for value in sequence.advantages.tolist()],
        inference_logprobs=[value for sequence in part for value in sequence.logprobs.tolist()],
        position_ids=[place for length in lengths for place in range(length)],
        sequence_lengths=lengths,
        temperatures=[heat for sequence in part for heat in [_heat(sequence)] * len(sequence)],
        env_names=[name for sequence in part for name in [_name(sequence)] * len(sequence)],
        seq_lens=lengths,
    )


def _heat(sequence: TrainingSequence) -> float:
    """What its trainer divides logits by: 1 where that is not known, or nothing to divide by."""
    return sequence.temperature or 1.0


def _name(sequence: TrainingSequence) -> str:
    return f"{sequence.env}_" if sequence.env == _RESERVED else sequence.env


def encode_shares(shares: Sequence[Sequence[MicroBatch]]) -> list[bytes]:
    """The content of each rank's file or message; takes long for a large batch."""
    return [msgspec.msgpack.encode(share) for share in shares]
