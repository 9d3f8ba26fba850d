"""How batches are handed to a trainer that acknowledges nothing: one at a time, each once, whoever dies."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from orchestrator.bridges.atropos import NONE, Desk, Registration, Served, encode
from orchestrator.trainer.batch import TrainingBatch, decode_batch
from orchestrator.trainer_link.encoding import encode_batch
from tests.support.journal_groups import make_batch

REGISTRATION = Registration(batch_size=8, max_token_len=4096)


def received(step: int) -> TrainingBatch:
    return decode_batch([bytearray(frame) for frame in encode_batch(make_batch(step), 0, 1)])


class World:
    """A desk with its note on disk; `restart` is what a kill and a new process make of it."""

    def __init__(self, directory: Path, *, registered: bool = True) -> None:
        self.path = directory / "note.json"
        self.done: list[int] = []
        self.desk = self.restart()
        if registered:
            assert self.desk.register(REGISTRATION) == ""

    def restart(self, run: str = "r") -> Desk:
        self.desk = Desk(self.path, run, on_done=self.done.append)
        return self.desk

    def offer(self, *steps: int) -> None:
        for step in steps:
            self.desk.offer(encode(received(step)))

    def take(self) -> int:
        """Ask once and have the answer arrive; 0 for none."""
        served = self.desk.ask()
        if not isinstance(served, Served):
            assert served == NONE
            return 0
        self.desk.delivered(served)
        return served.step


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_batch_is_done_with_when_the_trainer_comes_back_for_more(world: World) -> None:
    """Between two batches one question is answered by none, because trainers take what there is before they train."""
    assert world.take() == 0
    world.offer(1, 2)
    assert [world.take(), world.take()] == [1, 0]
    assert world.done == []
    assert [world.take(), world.done] == [2, [1]]


def test_an_answer_that_did_not_arrive_is_given_again(world: World) -> None:
    """The same bytes, as often as it takes; nothing is done with meanwhile."""
    world.offer(1, 2)
    first, again = world.desk.ask(), world.desk.ask()
    assert isinstance(first, Served)
    assert again is first
    assert [world.take(), world.done] == [1, []]
    # The answer that got lost arrives after all.
    world.desk.delivered(first)
    assert [world.take(), world.take(), world.done] == [0, 2, [1]]


def test_a_trainer_that_registers_again_gets_what_it_was_not_done_with(world: World) -> None:
    """It was restarted; the batch that it trained on when it died comes again."""
    world.offer(1, 2)
    assert world.take() == 1
    assert world.desk.register(REGISTRATION) == ""
    assert [world.take(), world.take(), world.take()] == [1, 0, 2]
    assert world.done == [1]


def test_a_killed_bridge_hands_nothing_over_twice_and_loses_nothing(world: World) -> None:
    """Killed with a batch handed over: the trainer has it. Killed with one done with and not acknowledged: it is done with."""
    world.offer(1, 2)
    assert world.take() == 1
    world.restart()
    world.offer(1, 2)
    assert [world.take(), world.take()] == [0, 2]
    assert world.done == [1]
    # The acknowledgement of 1 did not get through, so the orchestrator gives it again.
    world.restart()
    world.offer(1, 2, 3)
    assert world.done == [1, 1]
    assert [world.take(), world.take(), world.done] == [0, 3, [1, 1, 2]]


def test_a_note_of_another_run_or_no_note_at_all_is_not_believed(world: World) -> None:
    """Steps have the same numbers in every run."""
    world.offer(1)
    assert world.take() == 1
    world.restart("another")
    assert b"not registered" in bytes(world.desk.ask())  # type: ignore[arg-type]
    world.path.write_text("{torn")
    world.restart()
    assert world.desk.registration is None


@pytest.mark.parametrize("told_before", [True, False])
def test_the_last_batch_is_done_with_when_the_trainer_hears_that_there_is_no_more(
    world: World, told_before: bool
) -> None:
    """It never asks again after its last step, so nothing later can say it."""
    world.offer(1)
    assert world.take() == 1
    if told_before:
        assert [world.take(), world.done] == [0, []]
        world.desk.end()
    else:
        world.desk.end()
        assert world.done == []
        assert world.take() == 0
    assert world.done == [1]
    assert world.take() == 0


def test_who_is_not_registered_or_wants_another_size_is_told(tmp_path: Path) -> None:
    """In the words that these trainers print, with both numbers."""
    world = World(tmp_path, registered=False)
    world.offer(1)
    assert b"Call /register first" in bytes(world.desk.ask())  # type: ignore[arg-type]
    problem = world.desk.register(Registration(batch_size=32, max_token_len=64))
    assert "batches of 32 sequences, the orchestrator forms batches of 8" in problem
    early = World(tmp_path, registered=False)
    assert early.desk.register(Registration(batch_size=32, max_token_len=64)) == ""
    early.offer(1)
    assert b"forms batches of 8" in bytes(early.desk.ask())  # type: ignore[arg-type]


def test_an_item_has_what_these_trainers_read() -> None:
    """Groups stay together; prompts are -100 in masks and 1.0 in log-probabilities, as in Atropos."""
    batch = received(3)
    items = msgspec.json.decode(encode(batch).body)["batch"]
    assert [len(item["tokens"]) for item in items] == [4, 4]
    sequences = {tuple(sequence.tokens.tolist()): sequence for sequence in batch.sequences}
    for item in items:
        assert {"tokens", "masks", "scores", "advantages", "inference_logprobs", "overrides"} <= set(item)
        assert len(item) == 14
        for row, tokens in enumerate(item["tokens"]):
            sequence = sequences[tuple(tokens)]
            sampled = sequence.mask != 0
            assert item["masks"][row] == np.where(sampled, sequence.tokens, -100).tolist()
            assert np.asarray(item["inference_logprobs"][row])[sampled] == pytest.approx(
                sequence.logprobs[sampled]
            )
            assert set(np.asarray(item["inference_logprobs"][row])[~sampled]) <= {1.0}
            assert item["scores"][row] == pytest.approx(sequence.reward)
            heat = sequence.temperature
            assert item["overrides"][row] == ({} if heat is None else {"temperature": heat})
