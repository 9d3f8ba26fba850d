"""Who may start and which batch may be formed, by arithmetic alone."""

from orchestrator.dispatch.staleness import Staleness

from orchestrator.dispatch.limits import Ramp, TokenBucket


def paced(max_versions: int = 1, batch_size: int = 8) -> Staleness:
    return Staleness(batch_size=batch_size, max_versions=max_versions, mode="pace")


def test_work_for_the_next_batches_only_is_admitted() -> None:
    """With max_versions = 1 two batches may be under way: the one trained next and one after it."""
    staleness = paced()
    admitted = 0
    while staleness.admits(4, queued=0, stuck=False):
        staleness.opened("a", 0, 4)
        admitted += 4
    assert admitted == 16


def test_every_loss_gives_its_budget_back() -> None:
    """A group that ends, however, makes room for another."""
    staleness = paced()
    for _ in range(4):
        staleness.opened("a", 0, 4)
    assert not staleness.admits(4, queued=0, stuck=False)
    staleness.closed("a", 0, 4)
    assert staleness.admits(4, queued=0, stuck=False)


def test_queued_and_formed_work_counts_too() -> None:
    """Staleness includes the time in the queue and in formed batches."""
    staleness = paced()
    assert not staleness.admits(4, queued=16, stuck=False)
    staleness.formed = 2
    assert not staleness.admits(4, queued=0, stuck=False)
    staleness.trained = staleness.serving = 1
    staleness.publish(1)
    assert staleness.admits(4, queued=0, stuck=False)


def test_a_version_that_is_published_and_not_yet_served_costs_budget() -> None:
    """What is sampled before the engines have the new weights is one version older."""
    staleness = paced(max_versions=0)
    staleness.formed = staleness.trained = 1
    staleness.publish(1)
    assert not staleness.admits(4, queued=0, stuck=False)
    assert "load version 1" in staleness.explain()
    assert not staleness.admits(4, queued=0, stuck=True), "not even when stuck: nobody could train on it"
    staleness.serving = 1
    assert staleness.admits(4, queued=0, stuck=False)


def test_a_stuck_queue_with_nothing_in_flight_lets_one_more_group_in() -> None:
    """Seven sequences of eight and no budget left: without this the run would wait for ever."""
    staleness = paced(max_versions=0)
    assert not staleness.admits(4, queued=7, stuck=False)
    assert staleness.admits(4, queued=7, stuck=True)
    staleness.opened("a", 0, 4)
    assert not staleness.admits(4, queued=7, stuck=True)


def test_a_batch_waits_for_older_work_that_it_would_leave_behind() -> None:
    """Newer groups are queued, but the remaining steps cannot hold all the old ones in flight."""
    staleness = paced(max_versions=1)
    staleness.opened("a", 0, 16)
    staleness.publish(1)
    staleness.serving = 1
    staleness.formed = staleness.trained = 1
    assert staleness.held_back_by({1: 8}, {"a"}) == ("a", 0)
    assert staleness.held_back_by({1: 8}, set()) is None, "an env without a server is not waited for"
    staleness.closed("a", 0, 16)
    assert staleness.held_back_by({1: 8}, {"a"}) is None


def test_drop_admits_freely_and_never_waits() -> None:
    """What becomes too old is given up instead."""
    staleness = Staleness(batch_size=8, max_versions=0, mode="drop")
    staleness.opened("a", 0, 800)
    assert staleness.admits(4, queued=800, stuck=False)
    assert staleness.held_back_by({0: 8}, {"a"}) is None


def test_a_trainer_that_publishes_rarely_does_not_block() -> None:
    """Steps without a new version do not age the data."""
    staleness = paced(max_versions=1)
    staleness.formed = staleness.trained = 5
    assert staleness.version_at(6) == 0
    assert staleness.admits(4, queued=0, stuck=False)


def test_versions_are_counted_whatever_their_numbers() -> None:
    """A trainer that numbers by its own global step is two versions ahead, not two thousand."""
    staleness = paced(max_versions=2)
    staleness.publish(1000)
    staleness.publish(2000)
    staleness.formed = staleness.trained = 2
    assert staleness.age(0, 3) == 2
    assert staleness.oldest_allowed(3) == 0
    staleness.publish(3000)
    assert staleness.oldest_allowed(4) == 1000 + 1000


def test_the_history_of_versions_survives_a_restart_and_stays_short() -> None:
    """Ages are the same afterwards."""
    staleness = paced(max_versions=1)
    for version in range(1, 500):
        staleness.publish(version * 10)
    later = paced(max_versions=1)
    later.load_state_dict(staleness.state_dict(), formed=9, trained=9)
    assert later.published == later.serving == 4990
    assert later.age(4980, 10) == 1
    assert len(staleness.state_dict()["published"]) < 100


def test_a_bucket_holds_its_rate() -> None:
    """Sixty a minute: a burst, then one a second."""
    bucket = TokenBucket(60, burst=4, now=0.0)
    assert bucket.ready_at(4, 0.0) == 0.0
    bucket.take(4, 0.0)
    assert bucket.ready_at(4, 0.0) == 4.0
    assert bucket.ready_at(2, 1.0) == 2.0


def test_a_ramp_follows_down_at_once_and_up_slowly() -> None:
    """A lowered limit holds immediately."""
    ramp = Ramp(ramp_s=10.0, now=0.0)
    assert ramp.limit(100, 5.0) == 50
    assert ramp.limit(20, 5.0) == 20
    assert ramp.settled(20)
    assert ramp.limit(100, 6.0) == 30
