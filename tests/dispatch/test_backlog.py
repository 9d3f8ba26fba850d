"""What can still be trained in time, and what the next batch must have for it, by arithmetic alone."""

import itertools
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.dispatch.backlog import Backlog, Work, plan_next

LEFT = {0: 1, 1: 2, 2: 3}
"""Batches left for each of three versions."""


def backlog(work: Work, **minimums: int) -> Backlog:
    return Backlog(work, left=LEFT.__getitem__, batch=4, minimums=minimums)


def test_work_fits_as_long_as_each_version_has_batches_for_it() -> None:
    """Four of the oldest version, eight of the two oldest, twelve of all."""
    assert backlog({("a", 0): 4, ("a", 1): 4, ("b", 2): 4}).holds
    assert not backlog({("a", 0): 5}).holds
    assert not backlog({("a", 0): 4, ("b", 1): 5}).holds


def test_a_minimum_is_room_that_others_cannot_have() -> None:
    """Each batch has one of b in it, so that only three are left for a."""
    assert backlog({("a", 0): 3}, b=1).holds
    assert not backlog({("a", 0): 4}, b=1).holds
    assert backlog({("a", 0): 3, ("b", 0): 1}, b=1).holds


def test_what_an_env_must_have_at_once_is_not_made_up_for_by_its_later_minimums() -> None:
    """Three of b in the next batch leave one place in it; the batches after it have their minimum of b all the same."""
    assert backlog({("b", 0): 3, ("a", 1): 4}, b=1).holds
    assert not backlog({("b", 0): 3, ("a", 1): 5}, b=1).holds


def test_a_group_is_admitted_beside_the_whole_groups_that_minimums_will_need() -> None:
    """A minimum of one in each of three batches takes a group of two and another one."""
    work = backlog({("a", 2): 7}, b=1)
    assert work.admits("a", 1, 2, {"b": 4})
    assert not work.admits("a", 2, 2, {"b": 4})
    assert work.admits("b", 2, 2, {"b": 4})


def test_the_next_batch_takes_what_could_not_be_trained_after_it() -> None:
    """Version 0 has one batch left: all of it is taken, and the newer work waits."""
    plan = plan_next({("a", 0): 2, ("b", 2): 6}, {}, LEFT.__getitem__, batch=4, minimums={}, due={})
    assert plan.least == {"a": 2, "b": 0}
    assert plan.held_by is None
    assert plan.fits({("a", 0): 2, ("b", 2): 2})
    assert not plan.fits({("b", 2): 4})


def test_where_any_env_would_do_each_gives_what_it_is_due() -> None:
    """Four of eight must go, and no env gives more than its due while another has not given it."""
    queued = {("a", 1): 4, ("b", 1): 4}
    plan = plan_next(queued, {}, LEFT.__getitem__, batch=4, minimums={}, due={"a": 1, "b": 3})
    assert plan.least == {"a": 1, "b": 3}
    short = plan_next(queued, {}, LEFT.__getitem__, batch=4, minimums={}, due={"a": 0, "b": 3})
    assert sum(short.least.values()) == 4, "what is due is a preference, what must be is taken"


def test_the_next_batch_waits_for_work_in_flight_that_it_would_leave_behind() -> None:
    """The group of a has no other batch left."""
    plan = plan_next({("b", 2): 6}, {("a", 0): 2}, LEFT.__getitem__, batch=4, minimums={}, due={})
    assert plan.held_by == ("a", 0)
    later = plan_next({("b", 2): 6}, {("a", 1): 2}, LEFT.__getitem__, batch=4, minimums={}, due={})
    assert later.held_by is None


def test_nothing_is_forced_where_not_all_can_be_trained() -> None:
    """More than a batch of a version that has one left: the batch is then made as if there were no hurry."""
    plan = plan_next({("a", 0): 3, ("b", 0): 3}, {}, LEFT.__getitem__, batch=4, minimums={}, due={})
    assert plan.least == {"a": 0, "b": 0}
    assert plan.held_by is None


def can_be_trained(work: Mapping[tuple[str, int], int], batches: int, minimums: Mapping[str, int]) -> bool:
    """Tries every way to fill batch after batch; what is not there of a minimum will have come by then."""
    if not any(work.values()):
        return True
    if batches == 0:
        return False
    keys = sorted(key for key, size in work.items() if size)
    offset = 3 - batches  # batches formed since
    keys_due = [key for key in keys if LEFT[key[1]] - offset == 1]
    for taken in itertools.product(*(range(work[key] + 1) for key in keys)):
        amounts = dict(zip(keys, taken, strict=True))
        if any(amounts[key] < work[key] for key in keys_due):
            continue
        room = sum(
            max(least, sum(size for (env, _), size in amounts.items() if env == name))
            for name, least in {**dict.fromkeys((env for env, _ in keys), 0), **minimums}.items()
        )
        if room <= 4 and can_be_trained(
            {key: work[key] - amounts[key] for key in keys}, batches - 1, minimums
        ):
            return True
    return False


amounts = st.dictionaries(
    st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 2)), st.integers(1, 3), max_size=4
)


@given(work=amounts, least=st.integers(0, 2))
def test_it_agrees_with_trying_every_way(work: dict[tuple[str, int], int], least: int) -> None:
    """The one condition for each version is necessary and sufficient."""
    minimums = {"b": least} if least else {}
    assert backlog(work, **minimums).holds == can_be_trained(work, 3, minimums)


@given(queued=amounts, coming=amounts, least=st.integers(0, 2))
def test_what_fits_still_fits_after_a_batch_that_was_not_held_back(
    queued: dict[tuple[str, int], int], coming: dict[tuple[str, int], int], least: int
) -> None:
    """The least of each env, of its oldest work, is enough: so nothing that was promised is ever given up."""
    minimums = {"b": least} if least else {}
    both = {key: queued.get(key, 0) + coming.get(key, 0) for key in queued.keys() | coming.keys()}
    if not backlog(both, **minimums).holds:
        return
    plan = plan_next(queued, coming, LEFT.__getitem__, batch=4, minimums=minimums, due={})
    if plan.held_by is not None:
        assert coming
        return
    taken, to_take = {}, dict(plan.least)
    for env, version in sorted(queued, key=lambda key: key[1]):
        taken[env, version] = min(queued[env, version], to_take[env])
        to_take[env] -= taken[env, version]
    assert sum(taken.values()) <= 4
    assert plan.fits(taken)
