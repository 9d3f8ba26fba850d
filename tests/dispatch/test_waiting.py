"""What waits to be started is found in its order, without a look at envs for which nothing waits."""

from orchestrator.dispatch.ledger import Lane
from orchestrator.dispatch.suspects import Suspects
from orchestrator.dispatch.waiting import Waiting
from orchestrator.dispatch.work import Attempt
from tests.support.worlds import make_pending

A, B, C = ((Lane.TRAIN, env) for env in "abc")


def firsts(waiting: Waiting) -> list[Attempt]:
    """What may be next; each is named with its env."""
    found = list(waiting.firsts())
    assert all(key == (one.group.lane, one.group.env) for key, one in found)
    return [one for _, one in found]


def attempt(env: str, position: int = 0, *, suspect: int = 0) -> Attempt:
    return Attempt(group=make_pending(position, [1.0], env=env), count=1, suspect=suspect)


def test_envs_come_in_their_order_and_attempts_in_that_of_their_line() -> None:
    """However they came in; one that has waited before goes first."""
    waiting = Waiting([A, B, C])
    late, early, again = attempt("c"), attempt("a", 1), attempt("a", 2)
    waiting.add(C, [late])
    waiting.add(A, [early])
    waiting.add_first(A, again)
    assert firsts(waiting) == [again, late]
    waiting.started(A, again)
    assert firsts(waiting) == [early, late]
    assert waiting.without(Lane.TRAIN, ["a", "b", "c"]) == ["b"]


def test_a_suspect_stands_beside_its_line() -> None:
    """The env may start either; its line counts as empty without attempts that nobody suspects."""
    waiting = Waiting([A, B])
    suspect, other = attempt("a", 1, suspect=1), attempt("a", 2)
    waiting.add_suspect(A, suspect)
    assert firsts(waiting) == [suspect]
    assert waiting.without(Lane.TRAIN, ["a", "b"]) == ["a", "b"]
    assert waiting.suspected() == ["a"]
    waiting.add(A, [other])
    assert firsts(waiting) == [other, suspect]
    suspect.server = object()
    waiting.started(A, suspect)
    waiting.started(A, other)
    assert firsts(waiting) == []
    assert waiting.suspected() == []


def test_what_belongs_to_a_closed_group_is_skipped() -> None:
    """The line goes on with the next one."""
    waiting = Waiting([A])
    gone, suspect, left = attempt("a", 1), attempt("a", 2, suspect=1), attempt("a", 3)
    gone.group.closed = suspect.group.closed = True
    waiting.add(A, [gone])
    waiting.add_suspect(A, suspect)
    assert firsts(waiting) == []
    waiting.add(A, [left])
    assert firsts(waiting) == [left]


class Watched(Suspects):
    """None, and whoever asks is noted."""

    def __init__(self, number: int, looks: list[int]) -> None:
        super().__init__()
        self._number = number
        self._looks = looks

    @property
    def waiting(self) -> int:
        self._looks.append(self._number)
        return 0


def test_envs_for_which_nothing_waits_are_not_looked_at() -> None:
    """Neither those that never had anything nor, after one look, those that have nothing any more."""
    keys = [(Lane.TRAIN, f"env{number}") for number in range(100)]
    waiting = Waiting(keys)
    looks: list[int] = []
    for number, key in enumerate(keys):
        waiting.suspects[key] = Watched(number, looks)
    first, second = attempt("env7"), attempt("env40")
    waiting.add(keys[7], [first])
    waiting.add(keys[40], [second])
    waiting.started(keys[7], first)
    assert firsts(waiting) == [second]
    assert set(looks) == {7, 40}
    looks.clear()
    assert firsts(waiting) == [second]
    assert set(looks) == {40}
