"""A batch on its way to the trainer: the same bytes every time, and arrays that a trainer can use as they are."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.groups import group as group_module
from orchestrator.groups.group import Batch, Group
from orchestrator.trainer import batch as batch_module
from orchestrator.trainer.batch import TrainingBatch, decode_batch
from orchestrator.trainer.protocol import ProtocolError
from orchestrator.trainer_link.encoding import encode_batch
from tests.support.journal_groups import make_batch, make_group


def receive(batch: Batch, rank: int = 0, world_size: int = 1) -> TrainingBatch:
    """What a rank has after the frames went through a transport."""
    return decode_batch([bytearray(frame) for frame in encode_batch(batch, rank, world_size)])


def told(group: Group, number: int) -> tuple[object, ...]:
    """What a trainer should hear of a sequence beside its arrays."""
    facts, details, task = group.facts[number], group.decode_details(), group.task
    heat = float(facts["temperature"])
    return (
        int(facts["version"]),
        int(facts["version_end"]),
        f"{task.key}#{facts['rollout']}",
        f"{task.env}/{task.split}/{task.index}",
        details.names[facts["seat"]],
        details.names[facts["stop_reason"]],
        str(None if np.isnan(heat) else heat),
        bool(facts["truncated"]),
        str(details.metrics[facts["rollout"]]),
    )


def test_parts_of_a_split_group_keep_their_rollouts() -> None:
    """Sequences of one rollout share its id also when they are in different batches."""
    whole = make_group(3, size=4)
    first, rest = whole.split(1)
    ids = [s.rollout_id for part in (first, rest) for s in receive(Batch(1, 0, (part,))).sequences]
    assert ids == [f"{whole.task.key}#{number}" for number in (0, 0, 1, 1)]
    assert [s.metrics["correct"] for s in receive(Batch(1, 0, (rest,))).sequences] == [0.0, 1.0, 1.0]


def test_what_is_said_of_sequences_is_there_as_arrays_too() -> None:
    """For a trainer that does without a loop over sequences."""
    batch = receive(make_batch(2))
    sequences = batch.sequences
    assert batch.versions.tolist() == [sequence.version for sequence in sequences]
    assert batch.versions_end.tolist() == [sequence.version_end for sequence in sequences]
    assert batch.truncated.tolist() == [sequence.truncated for sequence in sequences]
    known = [None if np.isnan(heat) else float(heat) for heat in batch.temperatures]
    assert known == [sequence.temperature for sequence in sequences]


@settings(max_examples=40)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(1, 4))
def test_the_ranks_together_have_every_sequence_once_and_unchanged(sizes: list[int], world_size: int) -> None:
    """Tokens, masks, log-probabilities, rewards and advantages arrive as they were recorded."""
    missing = -sum(sizes) % world_size
    groups = tuple(make_group(n, size=size) for n, size in enumerate([*sizes, *[1] * missing]))
    batch = Batch(4, 3, groups)
    expected, got = [], []
    for group in groups:
        ends = np.cumsum(group.lengths)
        for number, end in enumerate(ends):
            piece = slice(end - group.lengths[number], end)
            arrays = (group.tokens[piece], group.mask[piece], group.logprobs[piece])
            values = (
                float(group.rewards[number]),
                float(group.advantages[number]),
                *told(group, number),
            )
            expected.append((group.id, *(array.tobytes() for array in arrays), *values))
    sampled = int(sum(group.mask.sum() for group in groups))
    for rank in range(world_size):
        share = receive(batch, rank, world_size)
        assert (share.step, share.version, share.rank, share.world_size) == (4, 3, rank, world_size)
        assert (len(share), share.batch_size) == (batch.size // world_size, batch.size)
        assert share.trained_tokens == sampled
        for sequence in share.sequences:
            arrays = (sequence.tokens, sequence.mask, sequence.logprobs)
            values = (
                sequence.reward,
                sequence.advantage,
                sequence.version,
                sequence.version_end,
                sequence.rollout_id,
                sequence.task,
                sequence.seat,
                sequence.stop_reason,
                str(sequence.temperature),
                sequence.truncated,
                str(sequence.metrics),
            )
            got.append((sequence.group_id, *(array.tobytes() for array in arrays), *values))
    assert sorted(got) == sorted(expected)


def test_the_service_and_the_trainer_mean_the_same_by_the_facts_of_a_sequence() -> None:
    """Written twice, because a trainer imports nothing of the service: the layout, and what its numbers refer to."""
    assert group_module.FACTS == batch_module.FACTS
    assert group_module.Details.__struct_fields__ == batch_module.Details.__struct_fields__


def test_encoding_twice_gives_the_same_bytes() -> None:
    """Also from groups that were read back from elsewhere."""
    first = [bytes(frame) for frame in encode_batch(make_batch(3), 1, 2)]
    assert first == [bytes(frame) for frame in encode_batch(make_batch(3), 1, 2)]
    assert first != [bytes(frame) for frame in encode_batch(make_batch(3), 0, 2)]


def test_arrays_are_writable_views_of_what_was_received() -> None:
    """No copy is made, and torch.from_numpy would share the memory without a warning."""
    frames = [bytearray(frame) for frame in encode_batch(make_batch(1), 0, 1)]
    batch = decode_batch(frames)
    for array, frame in ((batch.tokens, frames[5]), (batch.logprobs, frames[6]), (batch.mask, frames[7])):
        assert array.flags.writeable
        assert array.flags.aligned
        assert np.shares_memory(array, np.frombuffer(frame, np.uint8))
    sequence = batch.sequences[0]
    assert np.shares_memory(sequence.tokens, batch.tokens)
    kinds = [array.dtype.str for array in (sequence.tokens, sequence.mask, sequence.logprobs)]
    assert kinds == ["<i4", "|u1", "<f4"]


def test_advantages_are_the_sequences_own_where_the_policy_sampled() -> None:
    """Per token, float32, zero outside of the mask, made once."""
    sequence = receive(make_batch(1)).sequences[1]
    assert sequence.advantages.dtype == np.float32
    assert sequence.advantages.tolist() == (sequence.mask * np.float32(sequence.advantage)).tolist()
    assert sequence.advantages is sequence.advantages
    assert sequence.env == "math"


@pytest.mark.parametrize(
    "spoil", ["missing frames", "short tokens", "no header", "short facts", "unknown group", "negative place"]
)
def test_frames_that_do_not_fit_together_are_an_error(spoil: str) -> None:
    """A damaged message never becomes a batch."""
    frames = [bytearray(frame) for frame in encode_batch(make_batch(1), 0, 1)]
    if spoil == "missing frames":
        frames = frames[:-2]
    elif spoil == "short facts":
        frames[8] = frames[8][:-40]
    elif spoil == "unknown group":
        frames[2][:4] = (99).to_bytes(4, "little")
    elif spoil == "negative place":
        frames[8][20:24] = b"\xff" * 4
    elif spoil == "short tokens":
        frames[5] = frames[5][:-4]
    else:
        frames[0] = bytearray(b"\xc1")
    with pytest.raises(ProtocolError):
        decode_batch(frames)


def test_the_client_imports_nothing_beyond_pyzmq_msgspec_and_numpy() -> None:
    """A trainer can use it in an environment that has nothing else of the project's dependencies."""
    script = """
import sys
class Forbid:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        allowed = {"zmq", "msgspec", "numpy", "orchestrator"} | set(sys.stdlib_module_names)
        # numpy and pyzmq look for optional parts of their own; they live without them.
        if top not in allowed:
            raise ModuleNotFoundError(f"forbidden: {name}")
sys.meta_path.insert(0, Forbid())
import orchestrator.trainer
ours = sorted(name for name in sys.modules if name.startswith(("orchestrator", "envs")))
print(ours)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=root, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "orchestrator.groups.group" not in done.stdout
    assert "envs" not in done.stdout
