"""Limits in time: a rate, and a ramp."""

from orchestrator.dispatch.limits import Ramp, TokenBucket


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
