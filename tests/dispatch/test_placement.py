"""Where rollouts go, real and imagined: the same rules for both."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from orchestrator.discovery import Membership, look_up
from orchestrator.dispatch.placement import even_shares, fits, least_loaded, next_in_turn
from orchestrator.inference.roster import Roster
from orchestrator.simulate.neighbours import Server, VirtualPool


@dataclass(slots=True)
class Engine:
    inflight: int
    limit: int


@pytest.mark.parametrize(
    ("count", "inflight", "capacity", "expected"),
    [(1, 0, 4, True), (4, 1, 4, False), (3, 1, 4, True), (9, 0, 4, True), (1, 4, 4, False)],
)
def test_a_server_takes_what_it_has_room_for(
    count: int, inflight: int, capacity: int, expected: bool
) -> None:
    """A group larger than the server gets it to itself."""
    assert fits(count, inflight, capacity) is expected


def test_the_least_loaded_server_with_room_is_taken() -> None:
    """Whether it is the least loaded of all or not; the first of several alike."""
    small, full, free, like = (
        Server(2, inflight=1),
        Server(8, inflight=8),
        Server(8, inflight=3),
        Server(8, inflight=3),
    )
    servers = [small, full, free, like]
    assert least_loaded(servers, 1) is small
    assert least_loaded(servers, 2) is free
    assert least_loaded(servers, 6) is None


@pytest.mark.parametrize(
    ("loads", "turn", "expected"),
    [
        ([], 0, None),
        ([(1, 8), (1, 4)], 0, 0),
        ([(2, 8), (2, 16)], 0, 1),
        ([(0, 8), (0, 8), (0, 8)], 1, 1),
        ([(0, 8), (0, 8), (0, 8)], 3, 0),
        ([(0, 8), (5, 8)], 1, 0),
    ],
)
def test_the_engine_with_the_most_room_for_its_limit_is_next(
    loads: Sequence[tuple[int, int]], turn: int, expected: int | None
) -> None:
    """Ties go round."""
    assert next_in_turn([Engine(*load) for load in loads], turn) == expected


def test_what_may_be_in_flight_is_shared_evenly() -> None:
    """In whole numbers, and with something for everybody."""
    assert even_shares(10, 3) == [4, 3, 3]
    assert even_shares(2, 3) == [1, 1, 1]
    assert even_shares(5, 0) == []


def test_imagined_engines_are_chosen_as_real_ones() -> None:
    """Over any row of rollouts that come and go."""
    urls = [f"http://{number}/v1" for number in range(3)]
    real = Roster(
        urls,
        membership=Membership([], of="inference", listed=urls, look=look_up),
        suspect_after=3,
        trust_s=0.0,
        clock=lambda: 0.0,
    )
    for endpoint, share in zip(real.endpoints, even_shares(11, 3), strict=True):
        real.set_limit(endpoint, share)
        real.enter(endpoint)
    imagined = VirtualPool(11, 3)
    assert imagined.limit == real.limit == 11
    for n, freed in [(4, None), (1, None), (1, None), (2, 0), (4, 1), (1, None), (3, 2), (2, None), (1, 0)]:
        ours, theirs = real.acquire(n), imagined.acquire(n)
        assert ours is not None
        assert theirs is not None
        assert real.endpoints.index(ours) == imagined.endpoints.index(theirs)
        if freed is not None:
            gone = real.endpoints[freed].inflight
            real.release(real.endpoints[freed], gone)
            imagined.release(imagined.endpoints[freed], gone)
