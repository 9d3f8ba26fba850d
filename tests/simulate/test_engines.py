"""Engines that share their speed among what runs at once."""

import pytest

from orchestrator.simulate.engines import Engine, Speeds

TABLE = [(1, 100.0), (4, 200.0)]


def test_speed_lies_on_lines_between_the_points() -> None:
    """Beyond the last point nothing is gained."""
    speeds = Speeds(TABLE)
    assert [speeds.at(running) for running in (1, 2.5, 4, 9)] == [100, 150, 200, 200]
    assert Speeds([(4, 200.0)]).each(1) == 50
    assert speeds.best == 200


def test_rollouts_share_the_speed_and_end_in_the_order_of_their_tokens() -> None:
    """Two of 100 and 200 tokens: both at 66.7 a second, then the longer one alone at 100."""
    engine, done = Engine(Speeds(TABLE), 0.0), list[str]()
    engine.add(200, 1, lambda: done.append("long"), 0.0)
    engine.add(100, 1, lambda: done.append("short"), 0.0)
    first = engine.next_at() or 0.0
    assert first == pytest.approx(100 / (133.33 / 2), rel=1e-3)
    engine.finish(first)
    assert done == ["short"]
    second = engine.next_at() or 0.0
    assert second == pytest.approx(first + 1.0)
    engine.finish(second)
    assert (done, engine.next_at()) == (["short", "long"], None)
    assert engine.sampled == pytest.approx(300)


def test_one_that_is_removed_leaves_its_speed_to_the_others() -> None:
    """And is not told to be done."""
    engine, done = Engine(Speeds(TABLE), 0.0), list[str]()
    number = engine.add(50, 1, lambda: done.append("gone"), 0.0)
    engine.add(100, 1, lambda: done.append("kept"), 0.0)
    engine.remove(number, 1, 0.0)
    assert engine.next_at() == 1.0
    engine.finish(1.0)
    assert done == ["kept"]


def test_an_engine_that_stands_still_makes_no_progress() -> None:
    """As while it loads weights."""
    engine = Engine(Speeds(TABLE), 0.0)
    engine.add(100, 1, lambda: None, 0.0)
    engine.advance(0.5)
    engine.stopped = True
    assert engine.next_at() is None
    engine.advance(9.5)
    engine.stopped = False
    assert engine.next_at() == pytest.approx(10.0)
