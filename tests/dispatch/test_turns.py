"""For whom the next batch waits so that later ones are not crowded, by arithmetic alone. Batches of 8, groups of 2."""

from collections.abc import Mapping

import pytest

from orchestrator.dispatch.pace import Pace
from orchestrator.dispatch.turns import Turns
from orchestrator.dispatch.versions import Versions

EVEN = {"quick": 4.0, "slow": 4.0}
QUICK = {("quick", 1): 8}


class Book:
    """A run after its first step: what version 1 samples may be in the next three batches."""

    def __init__(self, *, formed: int = 1, max_versions: int = 2) -> None:
        self.versions = Versions(max_versions=max_versions)
        self.pace = Pace(self.versions, mode="pace", capacity=lambda: 8)
        self.turns = Turns(self.versions, self.pace)
        for _ in range(formed):
            self.versions.formed = self.versions.trained = self.versions.formed + 1
            self.versions.publish(self.versions.formed)
            self.versions.serving = self.versions.formed

    def start(self, env: str, groups: int) -> None:
        for _ in range(groups):
            self.pace.opened(env, self.versions.serving, 2)

    def awaited(
        self,
        queued: Mapping[tuple[str, int], int] = QUICK,
        shares: Mapping[str, float] = EVEN,
        available: tuple[str, ...] = ("quick", "slow"),
    ) -> str | None:
        found = self.turns.awaited(queued, shares, available, lambda env: 2)
        return None if found is None else found[0]


def test_a_batch_waits_for_its_share_of_what_was_started_for_three() -> None:
    """Without it the two after it would have more than theirs."""
    book = Book()
    book.start("slow", 6)
    assert book.awaited() == "slow"
    assert book.awaited({**QUICK, ("slow", 1): 2}) == "slow"
    assert book.awaited({**QUICK, ("slow", 1): 4}) is None


def test_what_later_batches_have_room_for_is_not_waited_for() -> None:
    """Each of the two after it may have four."""
    book = Book()
    book.start("slow", 4)
    assert book.awaited({("quick", 1): 12}) is None


def test_the_first_batch_waits_for_nobody() -> None:
    """That engines and trainer fit together is seen at once."""
    book = Book(formed=0)
    book.start("slow", 6)
    assert book.awaited({("quick", 0): 8}) is None


def test_an_env_without_a_server_is_not_waited_for() -> None:
    """What it has in flight may never come."""
    book = Book()
    book.start("slow", 6)
    assert book.awaited(available=("quick",)) is None


def test_half_a_group_is_not_waited_for() -> None:
    """An env that has a hundredth of the batch would hold up every one for a single group."""
    book = Book()
    book.start("slow", 1)
    book.start("quick", 4)
    assert book.awaited(shares={"quick": 7.1, "slow": 0.9}) is None


def test_a_wait_ends_though_everything_is_lost_and_started_again() -> None:
    """After as many groups as were in flight when it began; the next batch waits anew."""
    book = Book()
    book.start("slow", 6)
    for _ in range(6):
        assert book.awaited() == "slow"
        book.pace.closed("slow", 1, 2)
        book.start("slow", 1)
    assert book.awaited() is None
    book.versions.formed = book.versions.trained = 2
    book.versions.publish(2)
    assert book.awaited({("quick", 1): 8}) == "slow"


def test_a_wait_that_is_given_up_begins_anew_with_the_next_batch() -> None:
    """Whoever gives it up knows of this batch only."""
    book = Book()
    book.start("slow", 6)
    assert book.turns.awaited(QUICK, EVEN, ("slow",), lambda env: 2) == ("slow", 1)
    book.turns.give_up("slow")
    assert book.awaited() is None
    book.versions.formed = book.versions.trained = 2
    book.versions.publish(2)
    assert book.awaited() == "slow"


@pytest.mark.parametrize("max_versions", [0, 2])
def test_where_room_is_not_shared_out_nobody_is_waited_for(max_versions: int) -> None:
    """With a single batch ahead, and where the trainer does not publish with every step."""
    book = Book(max_versions=max_versions)
    book.versions.trained = book.versions.formed = 1 if max_versions == 0 else 9
    book.start("slow", 6)
    assert book.awaited() is None
