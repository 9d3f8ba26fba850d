"""How batches are handed to a trainer that acknowledges nothing: one at a time, each once, whoever dies."""

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from orchestrator.bridges.atropos import NONE, Desk, Refused, Registration, Served, encode
from orchestrator.trainer.batch import TrainingBatch, decode_batch
from orchestrator.trainer_link.encoding import encode_batch
from tests.support.journal_groups import make_batch

REGISTRATION = Registration(batch_size=8, max_token_len=4096)


def received(step: int) -> TrainingBatch:
    return decode_batch([bytearray(frame) for frame in encode_batch(make_batch(step), 0, 1)])


class World:
    """A desk with its note on disk; `restart` is what a kill and a new process make of it."""

    def __init__(self, directory: Path, *, registered: bool = True, ahead: int = 0) -> None:
        self.path = directory / "note.json"
        self.ahead = ahead
        self.done: list[int] = []
        self.desk = self.restart()
        if registered:
            assert self.desk.register(REGISTRATION) == ""

    def restart(self, run: str = "r") -> Desk:
        self.desk = Desk(self.path, run, ahead=self.ahead, on_done=self.done.append)
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
    with capture_logs() as logs:
        for _ in range(3):
            refused = early.desk.ask()
            assert isinstance(refused, Refused)
            assert "forms batches of 8" in refused.reason
    assert [log["event"] for log in logs] == ["bridge.trainer_refused"]


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


def test_a_kill_at_the_last_byte_is_told_at_the_restart(world: World) -> None:
    """Then alone: a batch of which less had arrived is not with the trainer, and one that is noted does not come again."""
    world.offer(1)
    served = world.desk.ask()
    assert isinstance(served, Served)
    with capture_logs() as said:
        world.restart()
        world.offer(1)
    assert said == []
    served = world.desk.ask()
    assert isinstance(served, Served)
    world.desk.finishing(served)
    with capture_logs() as said:
        world.restart()
        world.offer(1, 2)
    assert [(entry["event"], entry["step"]) for entry in said] == [("bridge.maybe_twice", 1)]
    assert world.take() == 1
    with capture_logs() as said:
        world.restart()
        world.offer(1, 2)
    assert said == []
    # A trainer that starts anew has nothing.
    world.desk.finishing(Served(1, b"", 0, 0, 0))
    world.desk.register(REGISTRATION)
    with capture_logs() as said:
        world.restart()
        world.offer(1)
    assert said == []


def test_a_trainer_that_fetches_ahead_is_done_with_what_is_so_many_before(tmp_path: Path) -> None:
    """Batch 1 is done with when batch 1 + ahead + 1 is asked for, whether that one is there or not, and only then."""
    world = World(tmp_path, ahead=2)
    world.offer(1, 2, 3)
    assert [world.take() for _ in range(6)] == [1, 0, 2, 0, 3, 0]
    assert world.done == []
    assert [world.take() for _ in range(4)] == [0] * 4
    assert world.done == [1]
    world.offer(4)
    assert [world.take(), world.done] == [4, [1]]
    assert [world.take(), world.take(), world.done] == [0, 0, [1, 2]]
    world.desk.end()
    assert world.done == [1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(20))
def test_a_prefetching_trainer_that_is_killed_loses_nothing(tmp_path: Path, seed: int) -> None:
    """A thread of it holds up to two batches that it has not trained on: whoever is killed when, no batch is acknowledged before it is trained
    on, and each is trained on. Where only the bridge is killed none comes twice."""
    rng, ahead, last = random.Random(seed), 2, 12
    world = World(tmp_path, ahead=ahead)
    offered = 0
    trained: list[int] = []
    fetched: list[int] = []

    def offer() -> None:
        nonlocal offered
        offered += 1
        world.offer(offered)

    while len(set(trained)) < last - ahead - 1:
        match rng.choice(["ask", "ask", "ask", "ask", "train", "train", "kill trainer", "kill bridge"]):
            case "ask" if len(fetched) <= ahead:
                while offered < min(last, max(world.done, default=0) + ahead + 2):
                    offer()
                if step := world.take():
                    fetched.append(step)
            case "train" if fetched:
                trained.append(fetched.pop(0))
            case "kill trainer":
                fetched.clear()
                assert world.desk.register(REGISTRATION) == ""
            case "kill bridge":
                world.restart()
                world.offer(*range(max(world.done, default=0) + 1, offered + 1))
        assert set(world.done) <= set(trained)
    assert sorted(set(trained)) == list(range(1, len(set(trained)) + 1))
    assert world.done == sorted(set(world.done))


def test_a_trainer_that_resumes_further_back_is_warned_of(world: World) -> None:
    """Its protocol has no way to ask for earlier batches; one that is where it was, or says nothing, is not."""
    world.offer(1, 2, 3)
    assert [world.take() for _ in range(5)] == [1, 0, 2, 0, 3]
    with capture_logs() as logs:
        for starting_step in (0, 2, 3, 1):
            registration = Registration(batch_size=8, max_token_len=4096, starting_step=starting_step)
            assert world.desk.register(registration) == ""
    behind = [log for log in logs if log["event"] == "bridge.trainer_behind"]
    assert [(log["starting_step"], log["done"]) for log in behind] == [(1, 2)]
