"""Who joins and who leaves by the answers of a source, in virtual time."""

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.discovery import Followed, Patience, parse_source
from orchestrator.discovery.following import MOST_MEMBERS
from orchestrator.discovery.source import SERVERS

PATIENCE = Patience(look_every_s=3.0, look_within_s=5.0, leave_after_s=10.0, empty_after_s=60.0)


def followed() -> Followed:
    return Followed(parse_source("dns+tcp://envs:7000", SERVERS), PATIENCE)


def test_whoever_is_named_joins_once() -> None:
    """The first answer brings all of them, a later one only who is new."""
    one = followed()
    assert one.trouble
    assert one.answered(["a", "b"], 0.0) == (["a", "b"], [])
    assert one.answered(["b", "c"], 3.0) == (["c"], [])
    assert not one.trouble


def test_whoever_is_missing_leaves_when_that_has_lasted() -> None:
    """One answer without it is not enough, and being named in between starts the time anew."""
    one = followed()
    one.answered(["a", "b"], 0.0)
    assert one.answered(["b"], 3.0) == ([], [])
    assert one.answered(["b"], 12.9) == ([], [])
    assert one.answered(["a", "b"], 13.0) == ([], [])
    assert one.answered(["b"], 14.0) == ([], [])
    assert one.answered(["b"], 24.0) == ([], ["a"])
    assert one.answered(["a", "b"], 25.0) == (["a"], [])


def test_answers_that_name_nobody_remove_nobody_until_they_have_lasted() -> None:
    """A resolver that knows nothing for a while costs nothing; a service without servers loses them in the end."""
    one = followed()
    one.answered(["a", "b"], 0.0)
    assert [one.answered([], now)[1] for now in (3.0, 30.0, 62.9)] == [[], [], []]
    assert one.trouble == "it names no server"
    assert one.answered([], 63.0) == ([], ["a", "b"])
    assert one.answered([], 66.0) == ([], [])
    assert one.answered(["a"], 69.0) == (["a"], [])


def test_a_look_that_fails_removes_nobody_and_starts_every_absence_anew() -> None:
    """What nobody could tell says nothing about who is there."""
    one = followed()
    one.answered(["a", "b"], 0.0)
    one.answered(["a"], 1.0)
    for _ in range(100):
        one.failed("it cannot be resolved")
    assert list(one.members) == ["a", "b"]
    assert str(one) == "dns+tcp://envs:7000: it cannot be resolved"
    assert one.answered(["a"], 500.0) == ([], [])
    assert one.answered(["a"], 510.0) == ([], ["b"])
    one.answered([], 511.0)
    one.failed("it cannot be resolved")
    assert one.answered([], 600.0) == ([], [])


def test_more_than_can_be_reached_is_no_answer() -> None:
    """A wrong name with thousands of addresses brings down nothing."""
    one = followed()
    one.answered(["a"], 0.0)
    assert one.answered(map(str, range(MOST_MEMBERS + 1)), 1.0) == ([], [])
    assert "at most" in one.trouble or "the most" in one.trouble
    assert list(one.members) == ["a"]


@given(
    st.lists(
        st.tuples(st.floats(0.1, 20.0), st.one_of(st.none(), st.frozensets(st.sampled_from("abcd")))),
        max_size=60,
    )
)
def test_joins_and_leaves_take_turns_and_nobody_leaves_early(
    looks: list[tuple[float, frozenset[str] | None]],
) -> None:
    """Whatever is answered: who is a member follows from joins and leaves, and a leave has its full absence behind it."""
    one, now = followed(), 0.0
    there: set[str] = set()
    absent: dict[str, float] = {}
    for pause, answer in looks:
        now += pause
        if answer is None:
            one.failed("no")
            absent.clear()
            continue
        joined, left = one.answered(sorted(answer), now)
        assert not there & set(joined)
        assert set(left) <= there
        there = (there | set(joined)) - set(left)
        assert there == set(one.members)
        assert answer <= there
        for name in "abcd":
            if name in answer:
                absent.pop(name, None)
            else:
                absent.setdefault(name, now)
        for name in left:
            assert now - absent[name] >= PATIENCE.leave_after_s
