"""Mix strategies without anything around them: picks, reports, states."""

import json
import math
import random
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import ConfigError
from orchestrator.mix import (
    STRATEGIES,
    Adaptive,
    CircuitBreaker,
    EnvMixStrategy,
    Flow,
    WeightedRandom,
    WeightedRoundRobin,
    build_mix,
)

CLASSES: list[type[EnvMixStrategy]] = [WeightedRandom, WeightedRoundRobin, Adaptive, Flow]
quick = settings(deadline=None, max_examples=60)
weight_lists = st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0, 2.5, 400.0]), min_size=1, max_size=8).filter(
    any
)


def names_for(weights: Sequence[float]) -> list[str]:
    return [f"env{index}" for index in range(len(weights))]


class CountingRandom(random.Random):
    """Counts how many numbers were taken."""

    taken = 0

    def random(self) -> float:
        self.taken += 1
        return super().random()


class LastOne(EnvMixStrategy):
    """A strategy of somebody's own, named "module:Class"."""

    def __init__(self, env_names: Sequence[str], weights: Sequence[float], **options: Any) -> None:
        self.flavour = options.pop("flavour", "plain")
        super().__init__(env_names, weights, **options)

    def pick(self, eligible: Collection[str] | None = None) -> str:
        return [name for name in self.env_names if eligible is None or name in eligible][-1]


class Churn:
    """Drives a strategy like a dispatcher does, from a random stream of its own."""

    def __init__(self, mix: EnvMixStrategy, seed: int) -> None:
        self.mix = mix
        self.rng = random.Random(seed)
        self.now = 0.0
        self.flying: list[tuple[str, int]] = []

    def step(self) -> str:
        env, size = self.mix.pick(), self.rng.choice([1, 8])
        self.now += self.rng.random()
        self.mix.on_dispatch(env, size, now=self.now)
        self.flying.append((env, size))
        if len(self.flying) > 6:
            done, count = self.flying.pop(self.rng.randrange(len(self.flying)))
            accepted = self.rng.randint(0, count)
            self.mix.on_finish(done, count, accepted, now=self.now)
            if accepted and self.rng.random() < 0.1:
                self.mix.on_drop(done, accepted, now=self.now)
        return env


@pytest.mark.parametrize("strategy", CLASSES)
@pytest.mark.parametrize(
    ("names", "weights", "complaint"),
    [
        ([], [], "at least one env"),
        (["a"], [1.0, 2.0], "1 envs but 2 weights"),
        (["a", "a"], [1.0, 2.0], '"a" is in the mix 2 times'),
        (["a", "b"], [1.0, -0.1], '"b": weight -0.1'),
        (["a", "b"], [math.nan, 1.0], '"a": weight nan'),
        (["a", "b"], [math.inf, 1.0], '"a": weight inf'),
        (["a", "b"], [0.0, 0.0], "every weight is 0"),
    ],
)
def test_weights_that_make_no_mix_are_refused(
    strategy: type[EnvMixStrategy], names: list[str], weights: list[float], complaint: str
) -> None:
    """No envs, and negative, NaN, infinite or only zero weights are a ValueError that says which."""
    with pytest.raises(ValueError, match=complaint) as caught:
        strategy(names, weights, rng=random.Random(0))
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_weights_are_normalised(scale: float) -> None:
    """Targets sum to 1 whatever the size of the weights."""
    mix = Flow(["a", "b"], [3 * scale, 1 * scale], rng=random.Random(0))
    assert mix.targets == pytest.approx((0.75, 0.25))


@quick
@given(weights=weight_lists, strategy=st.sampled_from(list(STRATEGIES)), seed=st.integers(0, 99))
def test_an_env_of_zero_weight_is_never_picked(weights: list[float], strategy: str, seed: int) -> None:
    """Zero weight is never picked, whatever happens to the others."""
    mix = build_mix(strategy, names_for(weights), weights, rng=random.Random(seed))
    churn = Churn(mix, seed)
    picked = {churn.step() for _ in range(150)}
    assert picked <= {name for name, weight in zip(mix.env_names, weights, strict=True) if weight > 0}


@quick
@given(weights=weight_lists, strategy=st.sampled_from(list(STRATEGIES)), data=st.data())
def test_a_pick_is_one_of_the_eligible_envs(weights: list[float], strategy: str, data: st.DataObject) -> None:
    """`eligible` restricts a pick; if it leaves nothing to pick, that is a ValueError."""
    names = names_for(weights)
    mix = build_mix(strategy, names, weights, rng=random.Random(0))
    for _ in range(20):
        eligible = data.draw(st.sets(st.sampled_from([*names, "stranger"])))
        possible = {
            name for name, weight in zip(names, weights, strict=True) if weight > 0 and name in eligible
        }
        if possible:
            env = mix.pick(eligible)
            assert env in possible
            mix.on_dispatch(env, 1, now=0.0)
        else:
            with pytest.raises(ValueError, match="can be picked"):
                mix.pick(eligible)


@pytest.mark.parametrize("strategy", CLASSES)
def test_an_unknown_env_is_counted_and_never_fatal(strategy: type[EnvMixStrategy]) -> None:
    """Reports about an env that is not in the mix are counted and change nothing else."""
    for mix in (
        strategy(["a"], [1], rng=random.Random(0)),
        CircuitBreaker(strategy(["a"], [1], rng=random.Random(0))),
    ):
        before = mix.state_dict()
        mix.on_dispatch("ghost", 2, now=1.0)
        mix.on_finish("ghost", 2, 1, now=2.0)
        mix.on_drop("ghost", 1, now=3.0)
        assert mix.unknown == Counter(ghost=5)
        assert {**mix.state_dict(), "unknown": {}} == {**before, "unknown": {}}


def test_weighted_random_takes_one_number_per_pick() -> None:
    """One draw per pick, restricted or not, so that the same seed gives the same sequence."""
    rng = CountingRandom(7)
    mix = build_mix("weighted_random", ["a", "b", "c"], [4, 3, 3], rng=rng)
    picks = [mix.pick() for _ in range(500)] + [mix.pick({"b"}) for _ in range(10)]
    assert rng.taken == 510
    again = WeightedRandom(["a", "b", "c"], [4, 3, 3], rng=random.Random(7))
    assert picks[:500] == [again.pick() for _ in range(500)]
    assert set(picks[500:]) == {"b"}


def test_weighted_random_draws_in_proportion() -> None:
    """Shares of picks approach the weights, also among the eligible."""
    mix = WeightedRandom(["a", "b", "c"], [4, 3, 3], rng=random.Random(1))
    counts = Counter(mix.pick() for _ in range(20_000))
    assert counts["a"] / 20_000 == pytest.approx(0.4, abs=0.02)
    counts = Counter(mix.pick(["a", "c"]) for _ in range(20_000))
    assert counts["a"] / 20_000 == pytest.approx(4 / 7, abs=0.02)


@quick
@given(weights=st.lists(st.floats(0.001, 1.0), min_size=1, max_size=20))
def test_round_robin_is_within_one_pick_of_every_share_after_any_prefix(weights: list[float]) -> None:
    """Smooth: after k picks every env was picked k times its share, give or take less than one."""
    names = names_for(weights)
    mix = WeightedRoundRobin(names, weights, rng=random.Random(0))
    counts: Counter[str] = Counter()
    for k in range(1, 300):
        counts[mix.pick()] += 1
        for name, share in zip(names, mix.targets, strict=True):
            assert abs(counts[name] - k * share) < 1 + 1e-6


def test_round_robin_remembers_what_an_ineligible_env_is_owed() -> None:
    """An env that could not run for a while gets its picks afterwards; the others share as before meanwhile."""
    mix = WeightedRoundRobin(["a", "b", "c"], [2, 1, 1], rng=random.Random(0))
    counts = Counter(mix.pick({"a", "b"}) for _ in range(30))
    assert counts["a"] == pytest.approx(20, abs=1)
    counts.update(mix.pick() for _ in range(30))
    assert {name: counts[name] for name in "abc"} == pytest.approx({"a": 30, "b": 15, "c": 15}, abs=1)


@pytest.mark.parametrize("strategy", ["weighted_random", "weighted_round_robin"])
def test_shares_are_of_rollouts_even_if_groups_differ(strategy: str) -> None:
    """An env with groups twice the size is picked half as often."""
    mix = build_mix(strategy, ["a", "b"], [1, 1], rng=random.Random(3), group_sizes={"a": 16, "b": 8})
    counts = Counter(mix.pick() for _ in range(9_000))
    assert counts["a"] / counts["b"] == pytest.approx(0.5, abs=0.03)


def test_adaptive_follows_target_over_actual_after_its_warm_up() -> None:
    """Before 50 accepted rollouts the base weights count, then base × clamp(target/actual, 0.1, 10)."""
    rng = random.Random(5)
    mix = Adaptive(["a", "b"], [0.5, 0.5], rng=rng)
    mix.on_finish("a", 49, 49, now=0.0)
    before = Counter(mix.pick() for _ in range(20_000))
    assert before["a"] / 20_000 == pytest.approx(0.5, abs=0.02)
    mix.on_finish("b", 1, 1, now=0.0)  # shares .98 and .02: factors 0.51 and 10
    after = Counter(mix.pick() for _ in range(20_000))
    assert after["b"] / after["a"] == pytest.approx(10 / (0.5 / 0.98), rel=0.1)


def test_adaptive_learns_of_drops() -> None:
    """Accepted rollouts that were thrown away later do not count as delivered."""
    mix = Adaptive(["a", "b"], [0.5, 0.5], rng=random.Random(5))
    mix.on_finish("a", 100, 100, now=0.0)
    mix.on_finish("b", 100, 100, now=0.0)
    mix.on_drop("a", 75, now=1.0)  # 25 against 100: factors 2.5 and 0.625
    counts = Counter(mix.pick() for _ in range(20_000))
    assert counts["a"] / counts["b"] == pytest.approx(4.0, rel=0.1)


def reference_flow(
    mix: Flow, events: list[tuple[str, str, int, int, float]], gain: float, keep: float
) -> str:
    """The formula of flow, computed from scratch from everything that happened."""
    now = events[-1][4] if events else 0.0
    score = {}
    need, inflight, owed, cost = {}, {}, {}, {}
    delivered = sum(a for kind, _, _, a, _ in events if kind == "finish")
    delivered -= sum(n for kind, _, n, _, _ in events if kind == "drop")
    for env, target in zip(mix.env_names, mix.targets, strict=True):
        area, done, good, flying, last, own = 1e-6, 0.0, 0.0, 0, 0.0, 0
        for kind, name, n, accepted, time in events:
            if name != env:
                continue
            if kind == "drop":
                good, own = max(0.0, good - n), own - n
                continue
            area, last = area + flying * (time - last), time
            if kind == "dispatch":
                flying += n
            else:
                flying -= n
                area, done, good = area * keep**n, done * keep**n + n, good * keep**n + accepted
                own += accepted
        cost[env] = (done + 2) / (good + 2)
        need[env] = target * (area + flying * (now - last)) / (done + 1) * cost[env]
        inflight[env], owed[env] = flying, target * delivered - own
    slots = sum(inflight.values()) + 1
    for env in mix.env_names:
        score[env] = slots * need[env] / sum(need.values()) - inflight[env] + gain * owed[env] * cost[env]
    return max(score, key=lambda env: score[env])


@quick
@given(seed=st.integers(0, 10_000), gain=st.sampled_from([0.5, 1.0]))
def test_flow_is_its_formula(seed: int, gain: float) -> None:
    """The incremental computation picks what the formula picks when it is evaluated over the whole history."""
    rng = random.Random(seed)
    mix = Flow(["a", "b", "c"], [0.37, 0.33, 0.3], rng=rng, gain=gain, window=50)
    events: list[tuple[str, str, int, int, float]] = []
    now = 0.0
    flying: list[tuple[str, int]] = []
    for _ in range(60):
        now += rng.random()
        env = mix.pick()
        assert env == reference_flow(mix, events, gain, 1 - 1 / 50)
        size = rng.choice([1, 4])
        mix.on_dispatch(env, size, now=now)
        events.append(("dispatch", env, size, 0, now))
        flying.append((env, size))
        if len(flying) > 5:
            done, count = flying.pop(rng.randrange(5))
            accepted = rng.randint(0, count)
            mix.on_finish(done, count, accepted, now=now)
            events.append(("finish", done, count, accepted, now))
            if accepted and rng.random() < 0.2:
                mix.on_drop(done, accepted, now=now)
                events.append(("drop", done, accepted, 0, now))
        assert sum(mix.owed(name) for name in mix.env_names) == pytest.approx(0, abs=1e-6)


def test_flow_keeps_the_proportions_of_the_others_while_an_env_is_at_its_cap() -> None:
    """What a capped env is owed is not forgotten, and does not distort the mix among the others."""
    mix = Flow(["big", "small", "capped"], [0.45, 0.05, 0.5], rng=random.Random(0))
    counts: Counter[str] = Counter()
    flying: list[str] = []
    for step in range(4_000):
        env = mix.pick({"big", "small"})
        mix.on_dispatch(env, 1, now=step)
        flying.append(env)
        if len(flying) > 20:
            done = flying.pop(0)
            mix.on_finish(done, 1, 1, now=step)
            counts[done] += 1
    assert counts["small"] / counts.total() == pytest.approx(0.1, abs=0.01)
    assert mix.owed("capped") == pytest.approx(counts.total() * 0.5, rel=0.01)
    assert mix.pick() == "capped"


def test_flow_makes_up_for_what_was_dropped() -> None:
    """Rollouts that were thrown away after they were accepted are owed again."""
    mix = Flow(["a", "b"], [0.5, 0.5], rng=random.Random(0))
    for env in ("a", "b"):
        mix.on_dispatch(env, 10, now=0.0)
        mix.on_finish(env, 10, 10, now=1.0)
    mix.on_drop("b", 6, now=2.0)
    assert mix.owed("b") == pytest.approx(3)
    assert mix.owed("a") == pytest.approx(-3)
    assert mix.pick() == "b"


@quick
@given(
    strategy=st.sampled_from(list(STRATEGIES)),
    seed=st.integers(0, 1000),
    steps=st.integers(0, 120),
    weights=st.lists(st.sampled_from([0.0, 1.0, 2.0, 7.0]), min_size=2, max_size=5).filter(any),
)
def test_a_restored_state_goes_on_exactly_like_the_original(
    strategy: str, seed: int, steps: int, weights: list[float]
) -> None:
    """The state survives JSON, and the restored mix makes the same picks on the same reports."""
    names = names_for(weights)
    mix = build_mix(strategy, names, weights, rng=random.Random(seed))
    churn = Churn(mix, seed)
    for _ in range(steps):
        churn.step()
    state = json.loads(json.dumps(mix.state_dict()))
    other = build_mix(strategy, names, weights, rng=random.Random(seed + 1))
    assert other.load_state_dict(state) == []
    assert other.state_dict() == mix.state_dict()
    twin = Churn(other, 0)
    twin.rng.setstate(churn.rng.getstate())
    twin.now, twin.flying = churn.now, list(churn.flying)
    assert [churn.step() for _ in range(60)] == [twin.step() for _ in range(60)]


@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_a_state_of_other_envs_and_weights_is_adapted_and_says_so(strategy: str) -> None:
    """Resuming with an env added, one removed and one re-weighted works and reports each."""
    mix = build_mix(strategy, ["a", "b", "c"], [0.5, 0.3, 0.2], rng=random.Random(0))
    churn = Churn(mix, 1)
    for _ in range(200):
        churn.step()
    other = build_mix(strategy, ["a", "b", "d"], [0.5, 0.1, 0.4], rng=random.Random(0))
    notes = other.load_state_dict(json.loads(json.dumps(mix.state_dict())))
    other.forget_inflight()
    assert 'env "c" left the mix' in notes
    assert 'env "d" joined the mix with a share of 0.400' in notes
    assert 'env "b" has a share of 0.100 now, 0.300 before' in notes
    assert not any('"a"' in note for note in notes)
    assert sum(other.owed(name) for name in other.env_names) == pytest.approx(0, abs=1e-6)
    churn = Churn(other, 2)
    assert {churn.step() for _ in range(200)} == {"a", "b", "d"}


def test_flow_counts_nothing_in_flight_after_a_restart() -> None:
    """A new process has nothing in flight, whatever the saved state says; what was measured stays."""
    mix = build_mix("flow", ["a", "b"], [1, 1], rng=random.Random(0))
    mix.on_dispatch("a", 100, now=0.0)
    mix.on_finish("a", 50, 50, now=10.0)
    mix.load_state_dict(mix.state_dict())
    assert mix.numbers(10.0)["a"].inflight == 50
    mix.forget_inflight()
    numbers = mix.numbers(1e9)["a"]
    assert (numbers.inflight, numbers.accepted, numbers.mean_latency_s) == (0, 50, 20.0)
    mix.on_dispatch("a", 1, now=5.0)
    assert mix.pick() == "b"


def test_a_strategy_can_be_named_by_module_and_class() -> None:
    """Any subclass of EnvMixStrategy can be plugged in, with options, behind the breaker."""
    mix = build_mix(f"{__name__}:LastOne", ["a", "b"], [1, 1], rng=random.Random(0), flavour="sour")
    assert isinstance(mix, EnvMixStrategy)
    assert isinstance(mix.strategy, LastOne)
    assert mix.strategy.flavour == "sour"
    assert mix.pick() == "b"


@pytest.mark.parametrize(
    ("strategy", "options", "complaint"),
    [
        ("flo", {}, 'no mix strategy is named "flo"; use one of flow, adaptive'),
        ("no_such_module:Class", {}, "there is no module no_such_module"),
        ("orchestrator.mix:Nothing", {}, 'has no "Nothing"'),
        ("orchestrator.errors:ConfigError", {}, "not a subclass of EnvMixStrategy"),
        ("flow", {"gian": 1}, 'has no option "gian"; it has: gain, window'),
        ("flow", {"gain": math.nan}, "gain of nan"),
        ("flow", {"window": 0}, "window of 0"),
        ("adaptive", {"warmup": -1}, "warm-up of -1"),
        ("flow", {"breaker": {"tripp": 1}}, 'breaker has no option "tripp"; it has: trip'),
        ("flow", {"breaker": {"trip": 0.5}}, "trip <= restore"),
        ("flow", {"breaker": {"probe": 0}}, "probe share of 0"),
        ("weighted_random", {"group_sizes": {"a": 0, "b": 1}}, "group size of 0"),
    ],
)
def test_a_strategy_that_cannot_be_built_says_why(
    strategy: str, options: dict[str, Any], complaint: str
) -> None:
    """Unknown strategies and options are configuration errors that name what there is."""
    with pytest.raises(ConfigError, match=complaint):
        build_mix(strategy, ["a", "b"], [1, 1], rng=random.Random(0), **options)
