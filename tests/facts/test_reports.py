"""What a trainer reports: kept by name within bounds, and a mismatch that leaves its usual range is told."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.facts.reports import IN_A_ROW, MISMATCH, MOST_NAMES, WINDOW, Reports


def reported(values: list[float], start: int = 1) -> Reports:
    reports = Reports()
    for step, value in enumerate(values, start):
        assert reports.add(step, {MISMATCH: value}) == ""
    return reports


def test_the_last_values_stay_with_their_steps() -> None:
    """As many as the window holds, oldest first; a step that is reported again replaces its report."""
    reports = Reports()
    for step in range(1, WINDOW + 11):
        reports.add(step, {"loss": float(step), "kl": 0.5})
    reports.add(WINDOW + 10, {"loss": -1.0})
    values = list(reports.names["loss"].values)
    assert len(values) == WINDOW
    assert values[0] == (11, 11.0)
    assert values[-2:] == [(WINDOW + 9, WINDOW + 9.0), (WINDOW + 10, -1.0)]
    assert len(reports.names["kl"].values) == WINDOW


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused_and_leaves_no_trace(value: float) -> None:
    """Not even of the numbers beside it."""
    reports = Reports()
    assert reports.add(3, {"loss": 1.0, "kl": value}) == "kl of step 3 is not a finite number"
    assert reports.names == {}


def test_names_are_bounded() -> None:
    """Each is a label in the metrics; those that are known go on."""
    reports = Reports()
    for number in range(MOST_NAMES):
        assert reports.add(1, {f"name{number}": 1.0}) == ""
    assert "at most 64 names" in reports.add(1, {"one_more": 1.0})
    assert reports.add(2, {"name0": 2.0}) == ""
    assert len(reports.names) == MOST_NAMES


def test_a_mismatch_beyond_its_usual_range_is_told_after_three_reports_in_a_row() -> None:
    """One bad step is chance; the sentence has the step, the value and what is usual."""
    usual = [0.02, 0.03, 0.025] * 6
    assert reported([*usual, 0.2, 0.2, 0.03, 0.2]).trouble == ""
    trouble = reported([*usual, 0.2, 0.2, 0.2]).trouble
    assert "logprob_mismatch is 0.2 at step 21" in trouble
    assert "3 reports in a row above 0.125, usually 0.025" in trouble
    assert reported([*usual, 0.2, 0.2, 0.2, 0.03]).trouble == ""


def test_a_mismatch_at_the_first_step_is_told_without_a_usual_range() -> None:
    """Engines with other weights differ by whole nats from the beginning."""
    assert reported([4.9] * (IN_A_ROW - 1)).trouble == ""
    assert "above 0.5" in reported([4.9] * IN_A_ROW).trouble
    assert reported([0.3] * 20).trouble == ""


def test_rounding_is_no_mismatch() -> None:
    """However small it usually is."""
    assert reported([1e-6] * 20 + [0.009] * 5).trouble == ""


def test_a_repeated_report_does_not_count_twice() -> None:
    """A rank that asks again after a reconnect, or several ranks."""
    reports = reported([4.9, 4.9])
    for _ in range(5):
        reports.add(2, {MISMATCH: 4.9})
    assert reports.trouble == ""


def test_other_names_are_never_judged() -> None:
    """Nobody knows what is usual for them."""
    reports = Reports()
    for step in range(30):
        reports.add(step, {"loss": 10.0**step})
    assert reports.trouble == ""


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(allow_nan=False, allow_infinity=False)), max_size=80))
def test_a_later_process_goes_on_with_the_same_values(entries: list[tuple[int, float]]) -> None:
    """Whatever was reported."""
    reports, later = Reports(), Reports()
    for step, value in entries:
        reports.add(step, {MISMATCH: value, "loss": -value})
    later.load_state_dict(reports.state_dict())
    assert {name: list(told.values) for name, told in later.names.items()} == {
        name: list(told.values) for name, told in reports.names.items()
    }
