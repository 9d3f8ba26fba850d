"""Ranks that ask for the run to be set back, message by message."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.trainer.protocol import (
    PROTOCOL,
    Ack,
    Checkpointed,
    Join,
    Leave,
    Missing,
    Next,
    Ping,
    Pong,
    Publish,
    Refused,
    Report,
    Updated,
    Updating,
    Welcome,
)
from tests.support.journal_groups import make_batch
from tests.support.trainer_links import UpdatesAtOnce
from tests.trainer_link.test_leases import Service

LAST = 9


class Rewindable(Service):
    """A service of an old run that keeps nothing; what it is asked for is in `begun`."""

    def __init__(self, world_size: int, **options: Any) -> None:
        self.begun: list[int] = []
        self.decide: Callable[[str], bool] = lambda obstacle: False
        super().__init__(world_size, last_step=LAST, **{"begin_rewind": self._begin, **options})
        for rank in range(world_size):
            self.join(rank)

    def _begin(self, step: int, decide: Callable[[str], bool]) -> None:
        self.begun.append(step)
        self.decide = decide

    def ask(self, rank: int, after: int, *, rewind: bool = True) -> None:
        self.sent.clear()
        self.tell(b"peer%d" % rank, Next(after, after, rewind))

    def refused(self) -> dict[bytes, str]:
        return {peer: answer.reason for peer, answer in self.sent if isinstance(answer, Missing)}


def test_the_run_is_set_back_when_every_rank_asks_for_the_same_step() -> None:
    """Not before; nobody is answered, because all of them wait for the batch behind that step."""
    service = Rewindable(2)
    service.ask(0, 3)
    assert (service.begun, service.refused()) == ([], {})
    service.ask(1, 3)
    assert (service.begun, service.refused()) == ([3], {})
    assert service.decide("")


def test_a_rank_that_goes_on_while_it_is_looked_into_has_it_refused() -> None:
    """What was refused is not carried out a moment later; asked for anew, it is."""
    service = Rewindable(2)
    for rank in (0, 1):
        service.ask(rank, 3)
    looked_into = service.decide
    service.ask(1, LAST, rewind=False)
    assert "rank 1 goes on with step 10" in service.refused()[b"peer0"]
    assert not looked_into("")
    for rank in (0, 1):
        service.ask(rank, 3)
    assert not looked_into("")
    assert service.decide("")


def test_ranks_that_do_not_agree_are_refused_with_their_numbers() -> None:
    """Both of them, so that neither waits for ever."""
    service = Rewindable(2)
    service.ask(0, 3)
    service.ask(1, 4)
    assert service.begun == []
    assert set(service.refused()) == {b"peer0", b"peer1"}
    assert "rank 0 to step 3, rank 1 to step 4" in service.refused()[b"peer0"]


@pytest.mark.parametrize("after", [LAST, LAST - 2])
def test_a_rank_that_goes_on_has_it_refused(after: int) -> None:
    """Whether its batch is there or not; it is answered as ever."""
    service = Rewindable(3)
    service.ask(0, 3)
    service.ask(1, 3)
    service.ask(2, after, rewind=False)
    refused = service.refused()
    assert {b"peer0", b"peer1"} <= set(refused)
    assert f"rank 2 goes on with step {after + 1}" in refused[b"peer0"]
    service.ask(2, 3)
    assert service.begun == []


def test_a_rank_that_is_gone_does_not_count() -> None:
    """It asks again when it is back; leaving and dying are the same."""
    service = Rewindable(2)
    service.ask(0, 3)
    service.leases.lose(b"peer0")
    service.ask(1, 3)
    service.tell(b"peer1", Leave())
    assert service.begun == []
    service.join(0)
    service.ask(0, 3)
    service.join(1)
    assert service.begun == []
    service.ask(1, 3)
    assert service.begun == [3]


def test_what_a_process_asked_for_that_was_replaced_does_not_count() -> None:
    """Its successor may want something else, and is not to find the run set back."""
    service = Rewindable(2)
    service.ask(0, 3)
    service.join(0, peer=b"successor", client="another process")
    service.ask(1, 3)
    assert (service.begun, service.refused()) == ([], {})
    service.tell(b"successor", Next(1, LAST))
    assert "rank 0 goes on with step 10" in service.refused()[b"peer1"]


def test_what_stands_in_the_way_is_told_to_all() -> None:
    """And they may ask again."""
    service = Rewindable(2)
    for rank in (0, 1):
        service.ask(rank, 3)
    service.sent.clear()
    assert not service.decide("the weights are gone")
    assert service.refused() == {b"peer0": "the weights are gone", b"peer1": "the weights are gone"}
    for rank in (0, 1):
        service.ask(rank, 5)
    assert service.begun == [3, 5]


@pytest.mark.parametrize(
    ("after", "options", "said"),
    [
        (3, {"begin_rewind": None}, "`orchestrator run CONFIG --rewind-to 3` .*trainer.allow_rewind"),
        (0, {}, "`orchestrator run CONFIG --fresh`"),
        (40, {}, "the run's last batch is step 9"),
    ],
)
def test_where_it_cannot_be_the_command_is_named(after: int, options: dict[str, Any], said: str) -> None:
    """Not allowed, before the first step, behind the last one."""
    service = Rewindable(1, **options)
    service.ask(0, after)
    assert re.search(said, service.refused()[b"peer0"])
    assert service.begun == []


def test_a_batch_that_is_kept_is_served_and_nothing_is_set_back() -> None:
    """Also to a rank that would have it set back."""
    service = Rewindable(1, can_load=True)
    service.ask(0, 3)
    assert (service.served, service.begun) == ([(b"peer0", 0, 4)], [])


BACK_TO = 4


def set_back(protocol: int = PROTOCOL, **options: Any) -> Service:
    """A service whose run was set back to step 4, and has formed steps 5 to 7 anew; one rank has joined and was served nothing."""
    service = Service(1, last_step=BACK_TO, rewound=[BACK_TO], **options)
    for step in (5, 6, 7):
        service.leases.offer(make_batch(step))
    assert isinstance(service.tell(b"peer0", Join(protocol, 0, 1, "c")), Welcome)
    return service


@pytest.mark.parametrize("step", [5, 6, 7])
@pytest.mark.parametrize("protocol", [1, PROTOCOL])
def test_what_comes_of_steps_that_were_given_up_does_not_count(step: int, protocol: int) -> None:
    """A process that does not know of the rewind, because it is older or was started from a checkpoint of what was given up, is told with
    each thing that it says; a step of that number is there again, but it was never served with it.
    """
    updates = UpdatesAtOnce()
    service = set_back(protocol, updates=updates)
    for message in (
        Next(1, step),
        Ack(2, step),
        Publish(3, 99, "weights", step),
        Publish(4, step, "weights"),
        Updating(5, 99, step),
        Updated(6, 99, step),
        Report(7, step, {"loss": 1.0}),
        Checkpointed(8, step),
    ):
        answer = service.tell(b"peer0", message)
        assert isinstance(answer, Missing), message
        assert f"step {step}, which it was never served" in answer.reason
        assert f"set back to step {BACK_TO}" in answer.reason
    assert (service.events, service.served, updates.told) == ([], [], [])


def test_what_it_was_served_since_counts() -> None:
    """And so does the step that the run was set back to."""
    service = set_back()
    service.tell(b"peer0", Next(1, BACK_TO))
    assert service.served == [(b"peer0", 0, BACK_TO + 1)]
    for message in (
        Publish(2, BACK_TO, step=BACK_TO),
        Publish(3, 5, "weights", step=5),
        Updating(4, 5, 5),
        Report(5, 5, {"loss": 1.0}),
        Next(6, 5),
    ):
        assert not isinstance(service.tell(b"peer0", message), Missing), message


def test_a_process_that_joined_before_the_rewind_may_not_join_again() -> None:
    """It would take the place of the trainer that was started from the checkpoint. Who never joined, or asks for the rewind, may."""
    service = set_back()
    answer = service.tell(b"old", Join(PROTOCOL, 0, 1, "survivor", rewinds=0))
    assert isinstance(answer, Refused)
    assert f"restart it from its checkpoint of step {BACK_TO}" in answer.reason
    assert service.tell(b"peer0", Ping()) == Pong()
    welcome = service.tell(b"new", Join(PROTOCOL, 0, 1, "other"))
    assert isinstance(welcome, Welcome)
    assert welcome.rewinds == 1
    assert isinstance(service.tell(b"new", Join(PROTOCOL, 0, 1, "other", rewinds=1)), Welcome)
