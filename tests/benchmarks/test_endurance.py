"""What is said of a run that went on for long."""

from dataclasses import replace

import pytest

from benchmarks.endurance import Look, endure, fallen_short, grown, summary
from tests.benchmarks.test_runs import report_of

FLAT = Look(rollouts_per_s=5000.0, memory_mib=200.0, descriptors=80, lag_p50_ms=0.5, lag_p99_ms=10.0)


def test_what_fills_up_at_the_beginning_is_not_growth() -> None:
    """The first quarter may be anything, and lag may vary."""
    first = replace(FLAT, memory_mib=90.0, descriptors=60)
    assert grown([first, first, *[FLAT, replace(FLAT, lag_p99_ms=15.0)] * 3]) == []


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("memory_mib", 215.0, "memory: 200.0 MiB, later 215.0"),
        ("descriptors", 81, "file descriptors: 80, later 81"),
        ("lag_p99_ms", 25.0, "lag p99: 10.0 ms, later 25.0"),
    ],
)
def test_what_the_last_quarter_has_more_of_is_said(name: str, value: float, said: str) -> None:
    """Each of the three by itself."""
    assert grown([FLAT] * 6 + [replace(FLAT, **{name: value})] * 2) == [said]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("looks", "said"),
    [
        ([FLAT] * 8, []),
        ([replace(FLAT, rollouts_per_s=4900.0)] * 8, []),
        (
            [replace(FLAT, rollouts_per_s=3000.0)] * 8,
            [
                "rate: 3000 rollouts/s over all, 5000 were asked for",
                "rate: 3000 rollouts/s in the last quarter, 5000 were asked for",
            ],
        ),
        (
            [FLAT] * 38 + [replace(FLAT, rollouts_per_s=4750.0)] * 10 + [FLAT] * 2,
            ["rate: 4792 rollouts/s in the last quarter, 5000 were asked for"],
        ),
    ],
)
def test_a_rate_that_was_not_kept_is_said(looks: list[Look], said: list[str]) -> None:
    """Also where it was kept at first: what is flat at half the rate says nothing about the whole."""
    assert fallen_short(looks, 5000) == said


def test_the_summary_says_what_came_out_when_and_where() -> None:
    """So that it can be put into a page as it is."""
    kept = summary([FLAT] * 8, 5000, report_of())
    assert kept.startswith(
        "5,000 rollouts a second of 16 tokens: kept, and flat: memory, file descriptors and lag."
    )
    assert "5,000 rollouts a second, 200 MiB, 80 descriptors, lag p50 0.5 ms and p99 10.0 ms" in kept
    assert "Measured on 2026-01-01 12:00 UTC at abc: 2 cores (a processor)" in kept
    slow = summary([replace(FLAT, rollouts_per_s=3000.0)] * 8, 5000, report_of())
    assert "rate: 3000 rollouts/s over all, 5000 were asked for" in slow
    assert "kept" not in slow


@pytest.mark.slow
def test_a_short_run_is_looked_at_as_often_as_asked() -> None:
    """A real service with stub servers: rollouts end, and every look has its numbers."""
    looks = endure(rate=200, every_s=1.0, times=2)
    assert len(looks) == 2
    for look in looks:
        assert look.rollouts_per_s > 0
        assert look.memory_mib > 1
        assert look.descriptors > 10
