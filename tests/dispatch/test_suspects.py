"""A task that kills its server is found, and those that were there by accident lose nothing."""

import pytest

from orchestrator.dispatch.suspects import SHARE, Suspects
from orchestrator.dispatch.work import Attempt
from orchestrator.simulate.neighbours import Behaviour
from tests.support.worlds import NEVER, TestedWorld, make_pending, make_world


class Poisoned:
    """Rollouts take ten seconds; a server dies one second after a certain task was sent to it."""

    def __init__(self, world: TestedWorld, position: int) -> None:
        self.world = world
        self.position = position
        self.deaths = 0
        self._seen = 0

    def watch(self) -> bool:
        """To be called after every event; False, so that it can stand in a condition."""
        fresh, self._seen = self.world.starts[self._seen :], len(self.world.starts)
        if any(attempt.group.task.position == self.position for attempt in fresh):
            self.world.at(1.0, self._die)
        return False

    def _die(self) -> None:
        self.deaths += 1
        self.world.kill_server("a", 0, away_s=1.0)


def among(count: int, *, latency: float = 10.0) -> TestedWorld:
    """As many slots, all on one server; every rollout is a group."""
    return make_world(
        {"a": Behaviour(latency=lambda rng: latency)},
        group_size=1,
        batch_size=count,
        max_inflight=count,
        max_versions=9,
        train_s=1.0,
    )


@pytest.mark.parametrize("position", [0, 17, 59])
def test_a_poison_among_sixty_is_given_up_and_no_bystander_is_charged(position: int) -> None:
    """After max_attempts deaths alone, and a bounded number of deaths in all."""
    world = among(60)
    world.turn()
    world.run.stop(0.0)  # no other task comes between
    poisoned = Poisoned(world, position)
    assert world.play(until=lambda: poisoned.watch() or world.run.idle)
    assert world.journal.tasks == [("a", position, "given_up:server_lost")]
    assert {attempt.group.task.position for attempt in world.starts if attempt.number > 1} == {position}
    # Sixty together, seven of them, and then alone until its attempts are used up.
    assert poisoned.deaths <= 5
    assert {group.task.position for group in world.journal.groups} == set(range(60)) - {position}


@pytest.mark.parametrize("position", [17])
def test_a_poison_is_found_while_new_tasks_come_in(position: int) -> None:
    """The same in a run that goes on: the slots that suspects may not have are used by others meanwhile."""
    world = among(60)
    poisoned = Poisoned(world, position)
    assert world.play(until=lambda: poisoned.watch() or world.steps() >= 20)
    assert world.journal.tasks == [("a", position, "given_up:server_lost")]
    assert {attempt.group.task.position for attempt in world.starts if attempt.number > 1} == {position}
    assert poisoned.deaths <= 5


def test_a_server_that_dies_by_accident_charges_nobody() -> None:
    """Its requests are asked again a few at a time, and all of them end."""
    world = among(60, latency=NEVER)
    world.turn()
    world.kill_server("a", 0, away_s=0.0)
    world.envs["a"].revive(0)
    world.turn()
    again = [attempt for attempt in world.starts[60:] if attempt.suspect]
    assert len(again) == 60 // SHARE
    while world.parts.dispatcher._waiting.suspected():
        for attempt in [attempt for attempt in world.starts if not attempt.ended]:
            world.finish(attempt, [1.0])
        world.turn()
    assert world.journal.tasks == []
    assert all(attempt.number == 1 for attempt in world.starts)


def test_while_suspects_are_asked_one_by_one_the_others_go_on() -> None:
    """New tasks use the slots that suspects may not have."""
    world = among(60, latency=NEVER)
    world.turn()
    world.kill_server("a", 0, away_s=0.0)
    world.envs["a"].revive(0)
    world.turn()
    assert world.ledger.total_inflight == 60


def suspect(position: int = 0, *, again: bool = True) -> Attempt:
    return Attempt(group=make_pending(position, [1.0]), count=1, suspect=int(again))


def lose(suspects: Suspects, attempts: list[Attempt]) -> list[bool]:
    """A server dies under these, and each is asked again; which of them are charged."""
    charged = []
    for attempt in attempts:
        charged.append(suspects.lost(attempt, len(attempts)))
        if attempt.suspect:
            suspects.ended(attempt)
    for attempt in attempts:
        suspects.add(Attempt(group=attempt.group, count=1, suspect=attempt.suspect + 1))
    return charged


def start(suspects: Suspects, server: str) -> list[Attempt]:
    """As many suspects as may be are in flight on a server."""
    started = []
    while (attempt := suspects.next()) is not None:
        attempt.server = server
        suspects.started(attempt)
        started.append(attempt)
    return started


def requests(count: int, server: str = "first") -> list[Attempt]:
    made = [suspect(position, again=False) for position in range(count)]
    for attempt in made:
        attempt.server = server
    return made


def test_the_one_that_was_alone_is_guilty() -> None:
    """And the only suspect among others is too, whichever of them is told of first."""
    assert lose(Suspects(), requests(1)) == [True]
    suspects = Suspects()
    assert lose(suspects, requests(8)) == [False] * 8
    (alone,) = start(suspects, "second")
    others = requests(3, "second")
    assert lose(suspects, [others[0], alone, *others[1:]]) == [False, True, False, False]


def test_fewer_are_asked_at_once_with_every_death_down_to_one() -> None:
    """An eighth, and then one by one those under which a server died twice, before all others."""
    suspects = Suspects()
    lose(suspects, requests(64))
    few = start(suspects, "second")
    assert len(few) == 8
    assert lose(suspects, few) == [False] * 8
    (first,) = start(suspects, "third")
    assert first.group in [attempt.group for attempt in few]
    other = Suspects()
    lose(other, requests(64))
    assert len(start(other, "second")) == 8


def test_a_suspect_of_a_group_that_was_closed_is_forgotten() -> None:
    """Nobody waits for it any more."""
    suspects = Suspects()
    gone = requests(1)
    lose(suspects, gone)
    gone[0].group.closed = True
    assert suspects.next() is None
    assert not suspects.waiting
