"""The pause before another attempt."""

from envs.backoff import backoff_s


def test_the_pause_doubles_up_to_its_limit() -> None:
    """From the first attempt on, and without overflow however many there were."""
    assert [backoff_s(attempt, first_s=0.5, max_s=3.0) for attempt in range(1, 6)] == [0.5, 1, 2, 3, 3]
    assert backoff_s(1_000_000, first_s=0.1, max_s=60.0) == 60.0
