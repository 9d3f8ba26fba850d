"""How long there may be no ready server, measured once for all of an environment's servers."""

import asyncio

import pytest

from orchestrator.env_servers.absence import Absence
from orchestrator.errors import EnvLostError


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def absence(clock: Clock) -> Absence:
    return Absence("e", most_s=60.0, explain=lambda: "nobody is there", clock=clock)


def test_the_measure_begins_when_the_last_one_goes_and_ends_when_one_is_back() -> None:
    """Told again and again that there is none, it does not begin anew."""
    clock = Clock()
    one = absence(clock)
    assert one.left_s() is None
    one.note(available=False)
    clock.now += 50
    one.note(available=False)
    assert one.left_s() == 10.0
    one.note(available=True)
    assert one.left_s() is None
    one.note(available=False)
    assert one.left_s() == 60.0


async def test_moments_without_any_server_do_not_add_up() -> None:
    """A server that is back in time, however briefly, begins the measure anew."""
    clock = Clock()
    one = absence(clock)
    running = asyncio.create_task(one.run())
    for _ in range(3):
        one.note(available=False)
        clock.now += 59
        one.note(available=True)
        one.note(available=False)
        clock.now += 59
        for _ in range(3):
            await asyncio.sleep(0)
        assert not running.done()
        one.note(available=True)
    running.cancel()


async def test_what_was_missed_before_anybody_tried_to_reconnect_counts_for_nothing() -> None:
    """Servers may be lost while the rest of a run starts; the time to come back begins with the supervision."""
    clock = Clock()
    one = absence(clock)
    one.note(available=False)
    clock.now += 1000
    running = asyncio.create_task(one.run())
    await asyncio.sleep(0)
    assert one.left_s() == 60.0
    running.cancel()


async def test_servers_that_stay_away_are_lost_with_the_reason() -> None:
    """The line says for how long and what is known of them."""
    one = Absence("e", most_s=0.01, explain=lambda: "nobody is there")
    one.note(available=False)
    with pytest.raises(EnvLostError, match=r'^env "e": no server was ready for 0\.01 s; nobody is there$'):
        await one.run()
