"""The concurrency controllers, in virtual time against a small model of an engine."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.inference import AdaptiveConcurrency, EngineMetrics, FixedConcurrency
from orchestrator.inference.concurrency import ConcurrencyController

READING = st.one_of(
    st.none(),
    st.builds(
        EngineMetrics,
        running=st.integers(0, 500),
        waiting=st.integers(0, 500),
        cache_usage=st.floats(0, 1),
        preemptions=st.integers(0, 50),
        generated_tokens=st.integers(0, 10**6),
    ),
)


@dataclass
class CacheBoundEngine:
    """Holds `fits` requests in its cache and `slots` in a batch; beyond that it queues, or preempts if it overcommits."""

    fits: int
    slots: int = 10**6
    overcommits: bool = True
    preemptions: int = 0
    history: list[int] = field(default_factory=list)

    def read(self, inflight: int) -> EngineMetrics:
        running = min(inflight, self.slots)
        if self.overcommits:
            self.preemptions += max(0, running - self.fits)
        else:
            running = min(running, self.fits)
        return EngineMetrics(
            running=running,
            waiting=inflight - running,
            cache_usage=min(1.0, running / self.fits),
            preemptions=self.preemptions,
        )


def drive(
    controller: ConcurrencyController,
    engine: CacheBoundEngine,
    *,
    seconds: int,
    demand: int = 10**6,
    now: float = 0.0,
) -> list[int]:
    """One reading a second, with as much in flight as the limit and the demand allow. The limits seen."""
    limits = []
    for second in range(seconds):
        inflight = min(controller.limit, demand)
        controller.observe(engine.read(inflight), inflight=inflight, now=now + second)
        limits.append(controller.limit)
    return limits


def build(low: int = 1, high: int = 1000, **options: float) -> ConcurrencyController:
    [controller] = AdaptiveConcurrency(min_inflight=low, max_inflight=high, **options).controllers(1)  # type: ignore[arg-type]  # options are numbers
    return controller


def test_a_fixed_limit_is_shared_out_whole() -> None:
    """Shares of a fixed limit are even and sum to it."""
    assert [controller.limit for controller in FixedConcurrency(10).controllers(3)] == [4, 3, 3]


def test_no_endpoint_is_left_without_a_share() -> None:
    """With fewer rollouts than endpoints each endpoint may still have one."""
    assert [controller.limit for controller in FixedConcurrency(2).controllers(3)] == [1, 1, 1]


def test_it_grows_to_the_maximum_while_everything_fits() -> None:
    """An engine that is never full gets all that is allowed, within a dozen readings."""
    assert drive(build(low=8, high=500), CacheBoundEngine(fits=10_000), seconds=12)[-1] == 500


def test_it_does_not_grow_while_the_limit_is_not_used() -> None:
    """A limit that demand does not reach is no sign that more would fit."""
    assert drive(build(low=8), CacheBoundEngine(fits=10_000), seconds=50, demand=5)[-1] == 8


def test_it_stays_below_the_cache_without_a_single_preemption_if_use_follows_at_once() -> None:
    """Steps are sized by the room that is left, so a cache that fills in step with the limit is never overrun."""
    engine = CacheBoundEngine(fits=100)
    limits = drive(build(), engine, seconds=600)
    assert engine.preemptions == 0
    assert 70 <= limits[-1] <= 90


def test_preemptions_cut_by_a_quarter_of_what_was_in_flight() -> None:
    """The level that preempted is the one that was reached, not the one that was allowed."""
    controller = build(start_inflight=200)
    controller.observe(EngineMetrics(running=100, cache_usage=0.85), inflight=100, now=0.0)
    controller.observe(EngineMetrics(running=100, cache_usage=0.85, preemptions=1), inflight=100, now=1.0)
    assert controller.limit == 75


def test_after_preemptions_the_limit_settles_below_what_preempted() -> None:
    """After a cut the level that preempted is avoided: no preemption, hardly any movement."""
    controller = build(start_inflight=200, high=200)
    engine = CacheBoundEngine(fits=100)
    drive(controller, engine, seconds=62)
    before = engine.preemptions
    limits = drive(controller, engine, seconds=300, now=62.0)
    assert engine.preemptions == before
    assert 60 <= min(limits) <= max(limits) <= 100


def test_a_queue_that_lasts_trims_and_a_short_one_does_not() -> None:
    """Three readings in a row with a queue take a step down; two do not."""
    controller = build(start_inflight=100)
    queued = EngineMetrics(running=50, waiting=50)
    for now in (0.0, 1.0):
        controller.observe(queued, inflight=100, now=now)
    assert controller.limit == 100
    controller.observe(queued, inflight=100, now=2.0)
    assert controller.limit == 75


def test_a_batch_limit_of_the_engine_is_found_from_above() -> None:
    """An engine with 64 slots and a long queue ends near 64, not at the minimum."""
    limits = drive(build(start_inflight=400), CacheBoundEngine(fits=10_000, slots=64), seconds=400)
    assert 58 <= min(limits[-200:]) <= max(limits[-200:]) <= 72


def test_a_full_cache_trims() -> None:
    """A cache above the mark takes the limit down a small step."""
    controller = build(start_inflight=100)
    controller.observe(EngineMetrics(running=100, cache_usage=0.99), inflight=100, now=0.0)
    assert controller.limit == 94


def test_it_waits_for_a_decrease_to_take_effect() -> None:
    """While more is in flight than the limit, further preemptions say nothing about the limit."""
    controller = build(start_inflight=100, high=100)
    for now, preemptions in enumerate((0, 1, 2, 3, 4)):
        controller.observe(EngineMetrics(running=100, preemptions=preemptions), inflight=100, now=float(now))
    assert controller.limit == 75


def test_it_freezes_when_readings_stop() -> None:
    """No reading, no change; what happened unseen is not held against the limit afterwards."""
    controller = build(start_inflight=100, stale_s=10)
    controller.observe(EngineMetrics(running=100, cache_usage=0.85), inflight=100, now=0.0)
    for now in range(1, 100):
        controller.observe(None, inflight=100, now=float(now))
    controller.observe(EngineMetrics(running=100, cache_usage=0.85, preemptions=9), inflight=100, now=100.0)
    assert controller.limit == 100


def test_a_restarted_engines_counters_are_not_taken_for_preemptions() -> None:
    """Counters begin again at zero; the first reading after a restart is a new start of counting."""
    controller = build(start_inflight=100)
    controller.observe(EngineMetrics(running=100, cache_usage=0.85, preemptions=5), inflight=100, now=0.0)
    controller.reset()
    controller.observe(EngineMetrics(running=100, cache_usage=0.85, preemptions=7), inflight=100, now=1.0)
    assert controller.limit == 100


def test_room_that_opens_later_is_found_again() -> None:
    """The level that did not fit is tried again now and then, so a change of work is noticed."""
    controller = build(start_inflight=200)
    engine = CacheBoundEngine(fits=100)
    drive(controller, engine, seconds=100)
    engine.fits = 400
    assert drive(controller, engine, seconds=4000, now=100.0)[-1] > 200


@given(
    low=st.integers(1, 50),
    extra=st.integers(0, 200),
    start=st.one_of(st.none(), st.integers(1, 1000)),
    readings=st.lists(st.tuples(READING, st.integers(0, 400), st.floats(0, 100)), max_size=80),
)
def test_the_limit_never_leaves_its_bounds(
    low: int, extra: int, start: int | None, readings: list[tuple[EngineMetrics | None, int, float]]
) -> None:
    """Whatever an engine says, in whatever order, the limit stays between the minimum and the maximum."""
    [controller] = AdaptiveConcurrency(low, low + extra, start_inflight=start).controllers(1)
    now = 0.0
    for metrics, inflight, pause in readings:
        now += pause
        before = controller.limit
        controller.observe(metrics, inflight=inflight, now=now)
        assert low <= controller.limit <= low + extra
        if metrics is None:
            assert controller.limit == before


@given(
    fits=st.integers(4, 2000),
    slots=st.integers(4, 2000),
    start=st.integers(1, 4000),
    overcommits=st.booleans(),
)
def test_every_engine_is_used_well_and_hardly_ever_overrun(
    fits: int, slots: int, start: int, overcommits: bool
) -> None:
    """From any start it comes within reach of what the engine carries, and almost never preempts from then on."""
    controller = build(high=4000, start_inflight=start)
    engine = CacheBoundEngine(fits=fits, slots=slots, overcommits=overcommits)
    drive(controller, engine, seconds=1500)
    before = engine.preemptions
    limits = drive(controller, engine, seconds=1000, now=1500.0)
    carries = min(fits, slots)
    assert min(limits) >= 0.5 * carries - 2
    assert max(limits) <= 1.15 * carries + 3
    overrun = [limit for limit in limits if limit > fits]
    assert len(overrun) <= 0.05 * len(limits)
    assert engine.preemptions - before <= sum(limit - fits for limit in overrun) + 3


@pytest.mark.parametrize("bounds", [(0, 5), (6, 5), (-1, -1)])
def test_bounds_that_make_no_sense_are_refused(bounds: tuple[int, int]) -> None:
    """A minimum below one or above the maximum is an error, not a silent change."""
    with pytest.raises(ValueError, match="min_inflight and max_inflight"):
        AdaptiveConcurrency(*bounds)
