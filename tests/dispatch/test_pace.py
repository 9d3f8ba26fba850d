"""How far ahead of the trainer work may run, and which batch may be formed, by arithmetic alone."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.dispatch.backlog import plan_next
from orchestrator.dispatch.pace import Mode, Pace, Room
from orchestrator.dispatch.versions import Versions


def paced(max_versions: int = 1, batch_size: int = 8, mode: Mode = "pace") -> tuple[Versions, Pace]:
    versions = Versions(max_versions=max_versions)
    return versions, Pace(versions, mode=mode, capacity=lambda: batch_size)


def room(pace: Pace, queued: Mapping[str, int] | None = None, **minimums: int) -> Room:
    """What may be started; what is queued is of the first version."""
    work = {(env, 0): size for env, size in (queued or {}).items()}
    return pace.room(
        work, minimums, lambda batches: {env: batches * least for env, least in minimums.items()}
    )


def held_back_by(
    pace: Pace, queued: Mapping[tuple[str, int], int], available: set[str]
) -> tuple[str, int] | None:
    plan = pace.plan_next(queued, available, {}, {})
    return plan.held_by if plan is not None else None


def test_work_for_the_next_batches_only_is_admitted() -> None:
    """With max_versions = 1 two batches may be under way: the one trained next and one after it."""
    _, pace = paced()
    admitted = 0
    while room(pace).admits("a", 4):
        pace.opened("a", 0, 4)
        admitted += 4
    assert admitted == 16
    assert pace.reserved == 16
    assert pace.coming == {"a": 16}


def test_every_loss_gives_its_budget_back() -> None:
    """A group that ends, however, makes room for another."""
    _, pace = paced()
    for _ in range(4):
        pace.opened("a", 0, 4)
    assert not room(pace).admits("a", 4)
    pace.closed("a", 0, 4)
    assert room(pace).admits("a", 4)


def test_queued_and_formed_work_counts_too() -> None:
    """Staleness includes the time in the queue and in formed batches."""
    versions, pace = paced()
    assert not room(pace, {"a": 16}).admits("a", 4)
    versions.formed = 2
    assert not room(pace).admits("a", 4)
    versions.trained = versions.serving = 1
    versions.publish(1)
    assert room(pace).admits("a", 4)


def test_a_version_that_is_published_and_not_yet_served_costs_budget() -> None:
    """What is sampled before the engines have the new weights is one version older."""
    versions, pace = paced(max_versions=0)
    versions.formed = versions.trained = 1
    versions.publish(1)
    assert pace.engines_behind
    assert not room(pace).admits("a", 4), "nobody could train on it"
    versions.serving = 1
    assert not pace.engines_behind
    assert room(pace).admits("a", 4)


def test_what_minimums_will_ask_for_is_kept_free() -> None:
    """An env does not take what every batch must have of another one."""
    _, pace = paced()
    assert room(pace, b=4).admits("a", 8)
    pace.opened("a", 0, 8)
    assert not room(pace, b=4).admits("a", 4)
    assert room(pace, b=4).admits("b", 8)
    assert room(pace, b=4).holds
    assert not room(pace, b=5).holds


def test_a_batch_waits_for_older_work_that_it_would_leave_behind() -> None:
    """Newer groups are queued, but the remaining steps cannot hold all the old ones in flight."""
    versions, pace = paced(max_versions=1)
    pace.opened("a", 0, 16)
    versions.publish(1)
    versions.serving = 1
    versions.formed = versions.trained = 1
    assert held_back_by(pace, {("a", 1): 8}, {"a"}) == ("a", 0)
    assert held_back_by(pace, {("a", 1): 8}, set()) is None, "an env without a server is not waited for"
    pace.closed("a", 0, 16)
    assert held_back_by(pace, {("a", 1): 8}, {"a"}) is None


def test_drop_admits_freely_and_never_waits() -> None:
    """What becomes too old is given up instead."""
    _, pace = paced(max_versions=0, mode="drop")
    pace.opened("a", 0, 800)
    assert room(pace, {"a": 800}).admits("a", 4)
    assert held_back_by(pace, {("a", 0): 8}, {"a"}) is None


def test_a_trainer_that_publishes_rarely_does_not_block() -> None:
    """Steps without a new version do not age the data."""
    versions, pace = paced(max_versions=1)
    versions.formed = versions.trained = 5
    assert room(pace).admits("a", 4)


works = st.dictionaries(
    st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 3)), st.integers(1, 8), max_size=6
)


@given(queued=works, coming=works, formed=st.integers(3, 6), max_versions=st.integers(0, 4))
def test_a_plan_that_sums_alone_allow_is_the_plan_of_every_env(
    queued: dict[tuple[str, int], int],
    coming: dict[tuple[str, int], int],
    formed: int,
    max_versions: int,
) -> None:
    """Where nothing is urgent nobody works out what each env has: it would have come to the same."""
    versions, pace = paced(max_versions=max_versions)
    versions.formed, versions.trained = formed, 3
    for version in (1, 2, 3):
        versions.publish(version)
    for (env, version), size in coming.items():
        pace.opened(env, version, size)
    found = pace.plan_next(queued, {"a", "b"}, {}, {})
    timely = {key: size for key, size in coming.items() if versions.steps_left(key[1]) >= 1}
    wanted = plan_next(queued, timely, versions.steps_left, batch=8, minimums={}, due={})
    assert found is not None
    assert found.held_by == wanted.held_by
    assert {env: size for env, size in found.least.items() if size} == {
        env: size for env, size in wanted.least.items() if size
    }
    assert found.fits({}) == wanted.fits({})
