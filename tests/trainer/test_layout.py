"""Laying sequences out for a model: every token once, and what was recorded of it where the model's output is about it."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.groups.group import Batch
from orchestrator.trainer import (
    LogprobMismatch,
    TrainingBatch,
    TrainingSequence,
    micro_batches,
    pack,
    pad,
    staleness,
)
from orchestrator.trainer.batch import GroupHeader, decode_batch
from orchestrator.trainer_link.encoding import encode_batch
from tests.support.journal_groups import make_group

LENGTHS = st.lists(st.integers(0, 30), max_size=20)
TEMPERATURES = [0.5, 1.0, 0.0, float("nan")]
"""Of the sequences in turn; neither 0 nor one that is not known can be divided by."""


def sequences_of(lengths: list[int]) -> list[TrainingSequence]:
    """Sequences whose every token says where it comes from, each with a mask of its own."""
    found = []
    for number, length in enumerate(lengths):
        rng = np.random.default_rng([number, length])
        found.append(
            TrainingSequence(
                (1000 * (number + 1) + np.arange(length)).astype(np.int32),
                rng.integers(0, 2, length, dtype=np.uint8),
                -rng.random(length, dtype=np.float32),
                1.0,
                number + 0.5,
                GroupHeader("g", "math", 1, 1),
                (1, 1, 0, 0, 0, TEMPERATURES[number % 4], 0, 0),
            )
        )
    return found


def received(groups: int = 3) -> TrainingBatch:
    batch = Batch(4, 9, tuple(make_group(number) for number in range(groups)))
    return decode_batch([bytearray(frame) for frame in encode_batch(batch, 0, 1)])


@given(LENGTHS, st.integers(1, 60), st.booleans())
def test_micro_batches_hold_every_sequence_once_within_the_budget(
    lengths: list[int], budget: int, padded: bool
) -> None:
    """Only a sequence that is too long by itself goes beyond it, alone."""
    sequences = sequences_of(lengths)
    parts = micro_batches(sequences, budget, padded=padded)
    assert sorted(id(sequence) for part in parts for sequence in part) == sorted(map(id, sequences))
    for part in parts:
        sizes = [len(sequence) for sequence in part]
        assert sizes
        cost = len(sizes) * max(sizes) if padded else sum(sizes)
        assert cost <= budget or len(sizes) == 1


@given(LENGTHS.filter(bool), st.integers(1, 60), st.booleans(), st.data())
def test_ranks_can_agree_on_a_number_of_micro_batches(
    lengths: list[int], budget: int, padded: bool, data: st.DataObject
) -> None:
    """As many as asked for or as the budget needs, none empty, so that every rank makes as many steps as the others."""
    sequences = sequences_of(lengths)
    wanted = data.draw(st.integers(1, len(lengths)))
    parts = micro_batches(sequences, budget, padded=padded, at_least=wanted)
    assert len(parts) == max(wanted, len(micro_batches(sequences, budget, padded=padded)))
    assert all(parts)
    assert sorted(id(sequence) for part in parts for sequence in part) == sorted(map(id, sequences))


def test_a_budget_is_used_well() -> None:
    """Packing does not leave half of every micro-batch empty, and padding keeps long sequences from short ones."""
    sequences = sequences_of([30, 1, 29, 2, 15, 15, 10, 20])
    assert len(micro_batches(sequences, 31)) == 4
    parts = micro_batches(sequences, 60, padded=True)
    assert [sorted(len(sequence) for sequence in part) for part in parts] == [
        [29, 30],
        [1, 2, 10],
        [15, 15, 20],
    ]


@pytest.mark.parametrize(("budget", "at_least"), [(0, 1), (-3, 1), (8, 4)])
def test_what_cannot_be_split_so_is_refused(budget: int, at_least: int) -> None:
    """A budget without room, or more micro-batches than sequences."""
    with pytest.raises(ValueError, match="at least"):
        micro_batches(sequences_of([4, 4, 4]), budget, at_least=at_least)


def naive_position(sequence: TrainingSequence, at: int) -> tuple[int, bool, float, float, float]:
    """What the output at a position is about: target, mask, log-probability, advantage, temperature."""
    if at + 1 >= len(sequence):
        return 0, False, 0.0, 0.0, 1.0
    sampled = bool(sequence.mask[at + 1])
    logprob = float(sequence.logprobs[at + 1]) if sampled else 0.0
    temperature = 0.5 if sampled and sequence.temperature == 0.5 else 1.0
    advantage = sequence.advantage if sampled else 0.0
    return int(sequence.tokens[at + 1]), sampled, logprob, advantage, temperature


@given(LENGTHS, st.integers(1, 8))
def test_padded_rows_are_what_a_loop_over_positions_gives(lengths: list[int], multiple: int) -> None:
    """Tokens at their places, everything recorded one to the left of its token, and nothing behind the end."""
    sequences = sequences_of(lengths)
    rows = pad(sequences, fill=7, multiple_of=multiple)
    width = rows.tokens.shape[1]
    assert rows.tokens.shape == (len(lengths), width)
    assert width % multiple == 0
    assert width - max(lengths, default=0) < multiple
    for row, sequence in enumerate(sequences):
        for at in range(width):
            inside = at < len(sequence)
            read = (
                int(rows.tokens[row, at]),
                bool(rows.attention_mask[row, at]),
                int(rows.position_ids[row, at]),
            )
            assert read == ((int(sequence.tokens[at]), True, at) if inside else (7, False, 0))
            about = tuple(
                array[row, at].item()
                for array in (rows.targets, rows.mask, rows.logprobs, rows.advantages, rows.temperatures)
            )
            assert about == naive_position(sequence, at)


@given(LENGTHS, st.integers(1, 8))
def test_packed_rows_are_what_a_loop_over_positions_gives(lengths: list[int], multiple: int) -> None:
    """The end of a sequence is never about the beginning of the next."""
    sequences = sequences_of(lengths)
    packed = pack(sequences, fill=7, multiple_of=multiple)
    assert len(packed.tokens) % multiple == 0
    filled = len(packed.tokens) - sum(lengths)
    assert 0 <= filled < multiple
    expected_lengths = [*lengths, filled] if filled else lengths
    assert packed.sequence_lengths.tolist() == expected_lengths
    assert packed.cu_seqlens.dtype == np.int32
    assert packed.cu_seqlens.tolist() == [sum(expected_lengths[:n]) for n in range(len(expected_lengths) + 1)]
    assert packed.max_seqlen == max(expected_lengths, default=0)
    place = 0
    for sequence in sequences:
        for at in range(len(sequence)):
            assert (int(packed.tokens[place]), int(packed.position_ids[place])) == (
                int(sequence.tokens[at]),
                at,
            )
            about = tuple(
                array[place].item()
                for array in (
                    packed.targets,
                    packed.mask,
                    packed.logprobs,
                    packed.advantages,
                    packed.temperatures,
                )
            )
            assert about == naive_position(sequence, at)
            place += 1
    assert packed.tokens[place:].tolist() == [7] * filled
    assert packed.position_ids[place:].tolist() == list(range(filled))
    assert not packed.mask[place:].any()


def test_a_model_is_compared_with_what_was_recorded_of_the_same_tokens() -> None:
    """A model whose outputs are the recorded log-probabilities has no mismatch, padded or packed; shifted by one it has."""
    sequences = sequences_of([9, 4, 17])
    recorded = {int(t): float(p) for s in sequences for t, p in zip(s.tokens, s.logprobs, strict=True)}
    for laid_out in (pad(sequences), pack(sequences)):
        # What log_softmax and gather of a perfect model would give at every position.
        model = np.vectorize(lambda token: recorded.get(int(token), -3.0))(laid_out.targets)
        exact, shifted = LogprobMismatch(), LogprobMismatch()
        exact.add(model, laid_out.logprobs, laid_out.mask)
        shifted.add(np.roll(model, 1), laid_out.logprobs, laid_out.mask)
        assert exact.tokens == sum(int(s.mask[1:].sum()) for s in sequences)
        assert exact.metrics()["logprob_mismatch_max"] < 1e-6
        assert shifted.metrics()["logprob_mismatch"] > 0.1


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(-9, 0), st.floats(-9, 0), st.booleans()), max_size=40), st.integers(1, 5))
def test_mismatch_is_the_same_however_it_is_cut(
    positions: list[tuple[float, float, bool]], parts: int
) -> None:
    """Micro-batches one by one, and ranks together, give what a loop over all tokens gives."""
    table = np.asarray(positions, np.float64).reshape(-1, 3)
    ranks = [LogprobMismatch() for _ in range(3)]
    for number, piece in enumerate(np.array_split(table, parts)):
        ranks[number % 3].add(piece[:, 0], piece[:, 1], piece[:, 2])
    found = LogprobMismatch.of_all(pickle.loads(pickle.dumps(rank)) for rank in ranks)
    differences = [ours - theirs for ours, theirs, counts in positions if counts]
    metrics = found.metrics()
    if not differences:
        assert metrics == {}
        return
    ratios = [float(np.exp(difference)) for difference in differences]
    assert metrics == pytest.approx(
        {
            "logprob_mismatch": np.mean(np.abs(differences)),
            "logprob_mismatch_max": max(map(abs, differences)),
            "mismatch_kl": np.mean([np.exp(d) - 1 - d for d in differences]),
            "mismatch_ratio": np.mean(ratios),
            "mismatch_ess": sum(ratios) ** 2 / (len(ratios) * sum(ratio**2 for ratio in ratios)),
        },
        rel=1e-6,
        abs=1e-9,
    )


def test_numbers_that_are_none_are_counted_and_spoil_nothing() -> None:
    """A report of NaN would be refused, and would hide what else there is to see."""
    found = LogprobMismatch()
    found.add([np.nan, -np.inf, -1.0, -2.0], [-1.0, -1.0, -1.5, -900.0], [1, 1, 1, 1])
    metrics = found.metrics()
    assert metrics["logprob_not_finite"] == 2
    assert metrics["logprob_mismatch"] == pytest.approx((0.5 + 898) / 2)
    assert all(np.isfinite(value) for value in metrics.values())
    nothing = LogprobMismatch()
    nothing.add([np.nan], [0.0], [1])
    assert nothing.metrics() == {"logprob_not_finite": 1.0}
    assert LogprobMismatch.of_all([found, nothing]).metrics()["logprob_not_finite"] == 3


def test_shapes_that_do_not_fit_are_refused() -> None:
    """Broadcasting would compare tokens with others than themselves, silently."""
    with pytest.raises(ValueError, match=r"shape \(2, 3\) cannot be compared"):
        LogprobMismatch().add(np.zeros((2, 3)), np.zeros(3), np.ones((2, 3)))


def test_staleness_counts_versions_from_where_a_sequence_was_begun() -> None:
    """The batch is trained on version 9; its sequences began with 0, 1 and 2, and all of them span two versions."""
    batch = received(3)
    ages = [batch.version - sequence.version for sequence in batch.sequences]
    assert staleness(batch) == {
        "staleness_mean": float(np.mean(ages)),
        "staleness_max": 9.0,
        "staleness_spanned": 1.0,
    }


def test_the_torch_face_is_asked_for_by_name() -> None:
    """Importing the client brings no torch along, even where it is installed."""
    script = """
import sys, types
sys.modules["torch"] = None
import orchestrator.trainer
assert "orchestrator.trainer.torch_dataset" not in sys.modules
try:
    import orchestrator.trainer.torch_dataset
except ModuleNotFoundError as error:
    assert "torch" in str(error)
else:
    raise SystemExit("it needs torch")
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
