"""How numbers are written for people."""

import pytest

from orchestrator.views.numbers import amount, duration, latency, sparkline


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (37.4, "37"),
        (999.4, "999"),
        (999.6, "1.0k"),
        (9123, "9.1k"),
        (9970, "10k"),
        (12345, "12k"),
        (3.42e6, "3.4M"),
        (2e9, "2.0G"),
    ],
)
def test_amounts_are_short(value: float, text: str) -> None:
    """Two digits that matter, and a unit."""
    assert amount(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (61.7, "62 s"),
        (119, "119 s"),
        (120, "2 min"),
        (754, "13 min"),
        (7200, "2.0 h"),
        (200_000, "2.3 d"),
    ],
)
def test_times_have_the_unit_that_people_think_in(seconds: float, text: str) -> None:
    """Seconds, minutes, hours, days."""
    assert duration(seconds) == text
    assert latency(0.25) == "250 ms"
    assert latency(61.7) == "62 s"


def test_a_trend_goes_from_its_lowest_to_its_highest_value() -> None:
    """Unknown values are gaps; many values share a bar; nothing known is nothing."""
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, None, 1.0], 8) == "▁ █"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert len(sparkline([float(n) for n in range(60)], 12)) == 12
    assert len(sparkline([float(n) for n in range(61)], 12)) <= 12
    assert sparkline([None, None], 8) == ""
    assert sparkline([], 8) == ""


def test_noise_is_no_trend() -> None:
    """Values that hardly differ are on one level."""
    assert len(set(sparkline([0.500, 0.501, 0.499, 0.500], 8))) <= 2
    assert set(sparkline([0.0, 0.0], 8)) == {"▅"}
