"""The book of versions and steps, by arithmetic alone."""

import pytest

from orchestrator.dispatch.versions import Versions


def test_versions_are_counted_whatever_their_numbers() -> None:
    """A trainer that numbers by its own global step is two versions ahead, not two thousand."""
    versions = Versions(max_versions=2)
    versions.publish(1000)
    versions.publish(2000)
    versions.formed = versions.trained = 2
    assert versions.age(0, 3) == 2
    assert versions.oldest_allowed(3) == 0
    versions.publish(3000)
    assert versions.oldest_allowed(4) == 2000


def test_a_batch_behind_untrained_ones_will_be_trained_on_later_versions() -> None:
    """Each untrained batch before it publishes at most one version."""
    versions = Versions(max_versions=1)
    versions.formed = 2
    assert versions.version_at(3) == 2
    assert versions.age(0, 3) == 2
    assert versions.oldest_allowed(3) == 1
    assert versions.steps_left(0) == 0


def test_a_trainer_that_publishes_rarely_does_not_age_the_data() -> None:
    """Steps without a new version cost nothing."""
    versions = Versions(max_versions=1)
    versions.formed = versions.trained = 5
    assert versions.version_at(6) == 0
    assert versions.steps_left(0) == 2


def test_the_history_of_versions_survives_a_restart_and_stays_short() -> None:
    """Ages are the same afterwards."""
    versions = Versions(max_versions=1)
    for version in range(1, 500):
        versions.publish(version * 10)
    versions.serving = 4990
    later = Versions(max_versions=1)
    later.load_state_dict(versions.state_dict(), formed=9, trained=9)
    assert later.published == later.serving == 4990
    assert later.age(4980, 10) == 1
    assert len(versions.state_dict()["published"]) < 100


def test_a_version_that_was_published_and_never_loaded_is_told_apart_after_a_restart() -> None:
    """What the engines really have decides what may be trained on."""
    versions = Versions(max_versions=1)
    versions.publish(10)
    later = Versions(max_versions=1)
    later.load_state_dict(versions.state_dict(), formed=1, trained=1)
    assert (later.published, later.serving) == (10, 0)


def test_a_withdrawn_version_was_never_published() -> None:
    """Nothing grows older by it; the version in use cannot be withdrawn."""
    versions = Versions(max_versions=1)
    versions.publish(10)
    versions.withdraw(10)
    assert versions.published == 0
    assert versions.age(0, 1) == 0
    versions.withdraw(0)
    assert versions.published == 0


def test_a_withdrawn_version_that_is_published_again_takes_a_step_back() -> None:
    """Without it the others have a step more: one that none may wait for, as nobody knows whether it comes again."""
    versions = Versions(max_versions=1)
    versions.formed = versions.trained = 1
    versions.publish(1)
    assert versions.steps_left(0) == 1
    versions.withdraw(1)
    assert versions.steps_left(0) == 2
    versions.publish(1)
    assert versions.steps_left(0) == 1


def test_an_older_version_is_refused() -> None:
    """Versions go up."""
    versions = Versions(max_versions=1)
    versions.publish(10)
    with pytest.raises(ValueError, match="version 10 is not newer than 10"):
        versions.publish(10)


def test_a_trainer_that_leaves_steps_out_is_known() -> None:
    """One step without a version may be a publication that is late; two are none."""
    versions = Versions(max_versions=2)
    for step in range(1, 6):
        versions.publish(step)
        versions.formed = versions.trained = step
        assert versions.every_step
    versions.formed = versions.trained = 6
    assert versions.every_step
    versions.formed = versions.trained = 7
    assert not versions.every_step
    later = Versions(max_versions=2)
    later.load_state_dict(versions.state_dict(), formed=7, trained=7)
    assert not later.every_step
    for version, step in enumerate(range(8, 12), start=6):
        later.publish(version)
        later.formed = later.trained = step
    assert later.every_step


def test_a_state_that_does_not_say_when_versions_were_published_counts_as_one_with_every_step() -> None:
    """It was written by an earlier release."""
    versions = Versions(max_versions=2)
    versions.load_state_dict({"published": [7, 8, 9], "serving": 9}, formed=9, trained=9)
    assert versions.every_step
    versions.withdraw(9)
    assert versions.published == 9, "it is served"
