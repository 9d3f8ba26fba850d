"""The circuit breaker in front of every strategy."""

import json
import random
from collections import Counter

import pytest

from orchestrator.mix import STRATEGIES, Change, CircuitBreaker, MixError, Transition, build_mix


def make(strategy: str = "flow", weights: tuple[float, ...] = (0.4, 0.3, 0.3)) -> CircuitBreaker:
    return build_mix(strategy, ["a", "b", "c"][: len(weights)], weights, rng=random.Random(0))


def finish(mix: CircuitBreaker, env: str, times: int, accepted: int, now: float = 1.0, n: int = 1) -> None:
    for _ in range(times):
        mix.on_dispatch(env, n, now=now)
        mix.on_finish(env, n, accepted, now=now)


def keep_picking(mix: CircuitBreaker, times: int, failing: str, slots: int = 40) -> Counter[str]:
    """A dispatcher with slots, first in first out, in which one env always fails."""
    picked: Counter[str] = Counter()
    flying: list[str] = []
    for step in range(times):
        while len(flying) < slots:
            env = mix.pick()
            picked[env] += 1
            mix.on_dispatch(env, 1, now=step)
            flying.append(env)
        done = flying.pop(0)
        mix.on_finish(done, 1, int(done != failing), now=step)
    return picked


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_an_env_that_always_fails_is_only_probed(strategy: str) -> None:
    """A failing env is quarantined, the others keep their proportions, and it gets at most 5 % of the picks."""
    mix = make(strategy)
    keep_picking(mix, 1000, failing="c")
    assert mix.quarantined == {"c"}
    assert mix.drain_transitions()[0].env == "c"
    assert mix.targets == pytest.approx((4 / 7, 3 / 7, 0))
    picked = keep_picking(mix, 4000, failing="c")
    assert 0.01 < picked["c"] / picked.total() <= 0.051
    assert picked["a"] / (picked["a"] + picked["b"]) == pytest.approx(4 / 7, abs=0.05)


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_an_env_that_recovers_returns_without_its_debt(strategy: str) -> None:
    """Probes that succeed restore the env; it is not owed what it could not deliver."""
    mix = make(strategy)
    keep_picking(mix, 1000, failing="c")
    keep_picking(mix, 2000, failing="nobody")
    assert mix.quarantined == frozenset()
    assert [transition.change for transition in mix.drain_transitions()] == [
        Change.QUARANTINED,
        Change.RESTORED,
    ]
    assert mix.targets == pytest.approx((0.4, 0.3, 0.3))
    picked = keep_picking(mix, 1000, failing="nobody")
    assert picked["c"] / picked.total() == pytest.approx(0.3, abs=0.06)


def test_every_change_is_reported_once_with_the_acceptance_that_decided_it() -> None:
    """Transitions are drained in order: below 0.1 quarantined, above 0.25 restored."""
    mix = make()
    finish(mix, "b", 40, accepted=0)
    finish(mix, "b", 20, accepted=1)
    down, up = mix.drain_transitions()
    assert (down.env, down.change, up.env, up.change) == ("b", "quarantined", "b", "restored")
    assert down.acceptance < 0.1
    assert up.acceptance > 0.25
    assert mix.drain_transitions() == []


def test_a_handful_of_failures_at_the_start_is_not_enough() -> None:
    """The breaker does not trip on the first few reports, whatever the group size."""
    for n in (1, 8):
        mix = make()
        finish(mix, "a", 20, accepted=0, n=n)
        assert mix.quarantined == frozenset()
        finish(mix, "a", 20, accepted=0, n=n)
        assert mix.quarantined == {"a"}


def test_groups_that_are_lost_as_a_whole_do_not_trip_a_healthy_env() -> None:
    """With a third of the groups accepted, no run of bad luck quarantines the env: reports count, not rollouts."""
    mix = make()
    rng = random.Random(2)
    for _ in range(5000):
        mix.on_dispatch("a", 8, now=0.0)
        mix.on_finish("a", 8, 8 * (rng.random() < 0.33), now=0.0)
    assert mix.drain_transitions() == []


def test_rollouts_that_are_dropped_later_count_against_an_env() -> None:
    """An env of which everything is thrown away after it was accepted is quarantined too."""
    mix = make()
    for _ in range(100):
        finish(mix, "a", 1, accepted=8, n=8)
        mix.on_drop("a", 8, now=1.0)
    assert mix.quarantined == {"a"}
    assert mix.numbers(1.0)["a"].acceptance == 0.0


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_rollouts_that_were_stopped_by_us_do_not_count_against_an_env(strategy: str) -> None:
    """Cancelled rollouts leave flight; acceptance, debts and quarantine stay as they were."""
    mix = make(strategy)
    finish(mix, "a", 10, accepted=1)
    before = [mix.owed(name) for name in mix.env_names]
    for _ in range(100):
        mix.on_dispatch("a", 8, now=2.0)
        mix.on_cancel("a", 8, now=2.0)
    numbers = mix.numbers(3.0)["a"]
    assert (numbers.inflight, numbers.cancelled, numbers.finished, numbers.acceptance) == (0, 800, 10, 1.0)
    assert mix.quarantined == frozenset()
    assert [mix.owed(name) for name in mix.env_names] == before
    mix.on_cancel("ghost", 3, now=3.0)
    assert mix.unknown["ghost"] == 3


def test_all_envs_failing_can_be_told_from_a_pause() -> None:
    """How long every env has been in quarantine is known, and 0 as soon as one is back."""
    mix = make(weights=(0.5, 0.5))
    finish(mix, "a", 40, accepted=0, now=10.0)
    assert mix.all_quarantined_for(15.0) == 0.0
    finish(mix, "b", 40, accepted=0, now=20.0)
    assert mix.all_quarantined_for(50.0) == 30.0
    assert mix.pick() in {"a", "b"}
    finish(mix, "a", 20, accepted=1, now=60.0)
    assert mix.all_quarantined_for(70.0) == 0.0


def test_an_env_of_zero_weight_does_not_keep_the_rest_from_being_all() -> None:
    """Only envs that are in the mix count as failing or not."""
    mix = make(weights=(1.0, 0.0))
    finish(mix, "a", 40, accepted=0, now=1.0)
    assert mix.all_quarantined_for(2.0) == 1.0
    finish(mix, "b", 80, accepted=0)
    assert mix.quarantined == {"a"}


def test_probes_are_bounded_when_nothing_else_may_run() -> None:
    """With only quarantined envs eligible there are a few probes in flight, at least one, and no spin."""
    mix = make(weights=(0.5, 0.5))
    for _ in range(200):
        mix.on_dispatch("b", 1, now=0.0)  # 200 in flight at most: room for 10 probes
    finish(mix, "a", 40, accepted=0)
    started = 0
    while mix.try_pick({"a"}) is not None:
        mix.on_dispatch("a", 1, now=2.0)
        started += 1
        assert started < 50
    assert started == pytest.approx(10, abs=1)
    mix.on_finish("a", started, 0, now=3.0)
    assert mix.try_pick({"a"}) == "a"
    assert mix.pick({"a"}) == "a"


def test_an_env_with_a_small_share_is_not_probed_more_often_than_its_share() -> None:
    """Quarantine never raises how often an env is picked."""
    mix = build_mix("flow", ["big", "tiny"], [0.99, 0.01], rng=random.Random(0))
    finish(mix, "tiny", 40, accepted=0)
    picked = keep_picking(mix, 5000, failing="tiny")
    assert 0.005 < picked["tiny"] / picked.total() <= 0.0101


def test_many_quarantined_envs_leave_the_slots_to_the_healthy_one() -> None:
    """Probes of all quarantined envs together stay a minority."""
    names = [f"env{index}" for index in range(20)]
    mix = build_mix("flow", names, [1.0] * 20, rng=random.Random(0))
    for name in names[1:]:
        finish(mix, name, 40, accepted=0)
    picked = Counter(mix.pick() for _ in range(2000))
    assert picked["env0"] / picked.total() >= 0.75
    assert all(picked[name] for name in names)


def test_without_the_breaker_nothing_is_quarantined() -> None:
    """`breaker = false` leaves failing envs in the mix."""
    mix = build_mix("flow", ["a", "b"], [1, 1], rng=random.Random(0), breaker=False)
    finish(mix, "a", 500, accepted=0)
    assert mix.quarantined == frozenset()


def test_quarantine_survives_a_restart() -> None:
    """The state holds who is in quarantine; an env that left the mix meanwhile is no longer."""
    mix = make()
    finish(mix, "b", 40, accepted=0)
    finish(mix, "c", 40, accepted=0)
    state = json.loads(json.dumps(mix.state_dict()))
    other = build_mix("flow", ["a", "b"], [0.5, 0.5], rng=random.Random(0))
    other.load_state_dict(state)
    assert other.quarantined == {"b"}
    assert other.targets == (1.0, 0.0)
    finish(other, "b", 20, accepted=1)
    (back,) = other.drain_transitions()
    assert back == Transition("b", Change.RESTORED, back.acceptance)
    assert other.targets == (0.5, 0.5)


def test_numbers_tell_what_each_env_does() -> None:
    """Counts, acceptance, latency, in flight and debt per env, for any strategy."""
    mix = make("weighted_random")
    mix.on_dispatch("a", 4, now=0.0)
    mix.on_finish("a", 2, 2, now=10.0)
    mix.on_drop("a", 1, now=11.0)
    numbers = mix.numbers(12.0)["a"]
    assert (numbers.dispatched, numbers.finished, numbers.inflight) == (4, 2, 2)
    assert (numbers.accepted, numbers.dropped) == (2, 1)
    assert numbers.acceptance == 0.5
    assert numbers.mean_latency_s == (4 * 10 + 2 * 2) / 2
    assert (numbers.target, numbers.configured, numbers.quarantined) == (0.4, 0.4, False)
    assert mix.numbers(12.0)["b"].acceptance == 1.0
    flow = make()
    finish(flow, "a", 10, accepted=1)
    assert flow.numbers(1.0)["b"].owed == pytest.approx(3.0)
    assert flow.owed("a") == pytest.approx(-6.0)


def test_an_impossible_report_is_refused() -> None:
    """More accepted than finished is a mistake of the caller."""
    with pytest.raises(ValueError, match="9 of 8"):
        make().on_finish("a", 8, 9, now=0.0)


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_an_env_left_out_by_hand_gets_no_probes_and_returns_by_hand_alone(strategy: str) -> None:
    """Whatever ends meanwhile, and over a restart of which the state knows nothing."""
    mix = make(strategy)
    mix.on_dispatch("a", 40, now=0.0)
    mix.hold("a")
    assert set(keep_picking(mix, 400, failing="nobody")) == {"b", "c"}
    mix.on_finish("a", 40, 40, now=1.0)
    assert mix.try_pick(["a"]) is None
    assert mix.quarantined == mix.held == {"a"}
    assert mix.numbers(1.0)["a"].held
    later = make(strategy)
    later.hold("a")
    later.load_state_dict(json.loads(json.dumps(mix.state_dict())))
    assert later.try_pick(["a"]) is None
    freed = make(strategy)
    freed.load_state_dict(json.loads(json.dumps(mix.state_dict())))
    assert freed.try_pick(["a"]) == "a"
    mix.release("a")
    assert keep_picking(mix, 400, failing="nobody")["a"] > 100
    assert mix.drain_transitions() == []


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_weights_change_while_a_mix_runs(strategy: str) -> None:
    """From then on the picks follow the new ones; ones that make no mix change nothing."""
    mix = make(strategy)
    keep_picking(mix, 300, failing="nobody")
    with pytest.raises(MixError, match="every weight is 0"):
        mix.set_weights([0.0, 0.0, 0.0])
    assert mix.configured == pytest.approx((0.4, 0.3, 0.3))
    mix.set_weights([6.0, 0.0, 2.0])
    assert mix.configured == mix.targets == (0.75, 0.0, 0.25)
    picked = keep_picking(mix, 1000, failing="nobody")
    assert "b" not in picked
    assert picked["a"] / picked.total() == pytest.approx(0.75, abs=0.05)


def test_weights_that_change_keep_who_is_left_out() -> None:
    """An env in quarantine stays there, unless it has no share any more."""
    mix = make()
    finish(mix, "c", 60, accepted=0)
    mix.hold("b")
    mix.set_weights([1.0, 1.0, 1.0])
    assert mix.quarantined == {"b", "c"}
    assert mix.held == {"b"}
    assert mix.targets == (1.0, 0.0, 0.0)
    mix.set_weights([1.0, 1.0, 0.0])
    assert mix.quarantined == {"b"}
