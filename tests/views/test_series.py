"""Columns over steps: what is in them, how they are thinned out, and what has changed since somebody looked."""

import math
from typing import Any

import msgspec
import pytest

from orchestrator.views.series import MAX_METRICS, MAX_POINTS, Series
from tests.support.step_records import NAMES, step_record


def series_of(last: int, **changes: Any) -> Series:
    series = Series()
    series.put([step_record(step, **changes) for step in range(1, last + 1)])
    return series


def test_few_steps_are_shown_as_they_were() -> None:
    """Every record is a point of its own, of the run, of each env and of the trainer."""
    told = series_of(5).buckets()
    record = step_record(3)
    assert (told["width"], told["from"], told["last"], told["steps"]) == (1, 0, 5, [1, 2, 3, 4, 5])
    assert told["run"]["reward"][2] == pytest.approx(record.reward, rel=1e-4)
    assert told["run"]["time rollouts"][2] == pytest.approx(record.time["rollouts"], rel=1e-4)
    assert told["run"]["staleness_mean"][2] == pytest.approx((30 + 16) / 128, rel=1e-4)
    assert told["run"]["staleness_max"][2] == 2
    assert list(told["envs"]) == list(NAMES)
    assert told["envs"]["agree"]["share"][2] == pytest.approx(record.envs["agree"].share, rel=1e-4)
    assert told["envs"]["agree"]["metric turns"][2] == pytest.approx(
        record.envs["agree"].metrics["turns"], rel=1e-4
    )
    assert told["trainer"]["loss"][2] == pytest.approx(record.trainer["loss"], rel=1e-4)


@pytest.mark.parametrize("last", [999, 1000, 1001, 4000, 10_000])
def test_many_steps_become_bounded_points_that_are_means(last: int) -> None:
    """No column is longer than a screen is wide, and a point is the mean of its steps, the last one's too."""
    series = series_of(last, envs=("one",))
    told = series.buckets()
    width = told["width"]
    assert width == 2 ** math.ceil(math.log2(last / MAX_POINTS)) if last > MAX_POINTS else width == 1
    assert len(told["steps"]) == math.ceil(last / width) <= MAX_POINTS
    assert told["steps"][-1] == last
    for place in (0, len(told["steps"]) - 1):
        steps = range(place * width + 1, min(last, (place + 1) * width) + 1)
        mean = sum(step_record(step, envs=("one",)).reward for step in steps) / len(steps)
        assert told["run"]["reward"][place] == pytest.approx(mean, rel=1e-3)
        assert told["run"]["version"][place] == steps[-1] - 1


def test_what_is_not_known_is_null_in_json() -> None:
    """A number that an env did not have in a step is a gap, not a zero, and does not spoil its bucket."""
    records = [step_record(step) for step in range(1, 2001)]
    records[6].envs["agree"].reward = None
    for record in records[8:10]:
        record.envs["agree"].reward = None
    series = Series()
    series.put(records)
    told = msgspec.json.decode(msgspec.json.encode(series.buckets()))
    assert told["width"] == 2
    column = told["envs"]["agree"]["reward"]
    assert column[3] == pytest.approx(records[7].envs["agree"].reward, rel=1e-4)
    assert column[4] is None


def test_only_what_changed_is_asked_for() -> None:
    """Buckets from a step on have the same values as all of them have there."""
    series = series_of(2500)
    before = series.revision
    assert series.changed_since(before) is None
    series.put([step_record(step) for step in (2501, 2502)])
    since = series.changed_since(before)
    assert since == 2501
    part, whole = series.buckets(since), series.buckets()
    assert part["from"] == 2500 // part["width"]
    assert part["steps"] == whole["steps"][part["from"] :]
    assert part["envs"]["agree"]["reward"] == whole["envs"]["agree"]["reward"][part["from"] :]


def test_a_report_that_comes_late_changes_its_step() -> None:
    """The trainer speaks after the batch was formed; a step that is read again without news changes nothing."""
    series = Series()
    records = [step_record(step) for step in (1, 2, 3)]
    late = dict(records[1].trainer)
    records[1].trainer = {}
    series.put(records)
    before = series.revision
    series.put(records)
    assert series.revision == before
    records[1].trainer = late
    series.put(records)
    assert series.changed_since(before) == 2
    assert series.buckets()["trainer"]["loss"][1] == pytest.approx(late["loss"], rel=1e-4)
    assert series.totals()["agree"]["outcomes"]["failed"] == 3


def test_columns_are_bounded_whatever_environments_send() -> None:
    """Names of metrics beyond the first are left out, and with very many envs there are fewer points."""
    envs = tuple(f"env{place}" for place in range(80))
    series = Series()
    for step in range(1, 301):
        record = step_record(step, envs=envs)
        for name, env in record.envs.items():
            env.metrics = {f"{name} {metric}": 1.0 for metric in range(20)}
        series.put([record])
    told = series.buckets()
    assert len(told["envs"]) == 64
    assert sum(name.startswith("metric ") for name in told["envs"]["env0"]) == MAX_METRICS
    assert sum(len(column) for columns in told["envs"].values() for column in columns.values()) < 500_000
    assert told["width"] > 1


def test_histograms_are_of_the_last_steps() -> None:
    """Ages and lengths add up over the last fifty batches."""
    told = series_of(60).histograms()
    assert told["steps"] == [11, 60]
    assert told["staleness"] == [50 * n for n in (90, 30, 8)]
