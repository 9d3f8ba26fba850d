"""Mix strategies alone: their promises in virtual time, and `simulate --mix-only`, which prints them."""

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.cli import simulate as command
from orchestrator.cli import simulate_mix
from orchestrator.config import load_config
from orchestrator.errors import ConfigError, StalledError
from orchestrator.mix import STRATEGIES, EnvMixStrategy, build_mix
from orchestrator.simulate import MixBuilder, Regime, Scenario, SimEnv, percentile, simulate

THREE = (SimEnv("a", 0.4, 1.0, 0.0), SimEnv("b", 0.3, 5.0, 0.1), SimEnv("c", 0.3, 20.0, 0.4))
COSTS = st.tuples(st.sampled_from([0.5, 1.0, 3.0, 10.0, 15.0]), st.sampled_from([0.0, 0.3, 0.6, 0.9, 0.95]))


def using(strategy: str, **options: Any) -> MixBuilder:
    def build(names: Sequence[str], weights: Sequence[float], rng: random.Random) -> EnvMixStrategy:
        return build_mix(strategy, names, weights, rng=rng, **options)

    return build


@pytest.mark.parametrize("spread", [1.0, 0.5])
def test_flow_delivers_the_configured_mix(spread: float) -> None:
    """Latencies of 1, 5 and 20 and losses of 0, 10 and 40 % leave the delivered mix on target."""
    outcome = simulate(Scenario(THREE, spread=spread), using("flow"))
    deviations = outcome.batch_deviations(4, 40)
    assert outcome.deviation(0, 1_000) < 2
    assert outcome.deviation(0, 10_000) < 0.25
    assert statistics.mean(deviations) < 2.5
    assert percentile(deviations, 0.95) < 5
    assert outcome.quarantines == []


def test_flow_does_not_oscillate_with_fixed_latencies() -> None:
    """Rollouts that come back in waves do not upset the batches."""
    outcome = simulate(Scenario(THREE, spread=0.0), using("flow"))
    assert statistics.mean(outcome.batch_deviations(4, 40)) < 3
    assert outcome.deviation(0, 10_000) < 0.25


@pytest.mark.parametrize(("strategy", "off"), [("weighted_random", 9.7), ("adaptive", 4.7)])
def test_other_strategies_are_off_by_what_is_known_of_them(strategy: str, off: float) -> None:
    """The simulation reproduces the published bias of draws at dispatch and of target over actual."""
    assert simulate(Scenario(THREE), using(strategy)).deviation(0, 10_000) == pytest.approx(off, abs=1.0)


def test_an_env_that_always_fails_does_not_stop_the_others() -> None:
    """With the slowest env failing always, flow delivers more than plain weighted draws do."""
    scenario = Scenario((*THREE[:2], replace(THREE[2], loss=1.0)), steps=20)
    flow = simulate(scenario, using("flow"))
    assert flow.delivered_per_s > simulate(scenario, using("weighted_random", breaker=False)).delivered_per_s
    assert [(env, change) for _, env, change in flow.quarantines] == [("c", "quarantined")]
    assert flow.shares()["a"] == pytest.approx(4 / 7, abs=0.03)


def test_groups_are_delivered_in_the_configured_mix() -> None:
    """Groups of 8, lost as a whole or rollout by rollout, converge to the targets all the same."""
    for lose_groups in (True, False):
        envs = [replace(env, group_size=8) for env in THREE]
        outcome = simulate(Scenario(envs, lose_groups=lose_groups), using("flow"))
        assert outcome.deviation(0, 10_000) < 0.5


def test_groups_of_different_sizes_are_delivered_in_the_configured_mix() -> None:
    """Shares are of sequences, not of groups."""
    sizes = {"a": 16, "b": 4}
    envs = [SimEnv(name, 0.5, group_size=size) for name, size in sizes.items()]
    for strategy in STRATEGIES:
        outcome = simulate(Scenario(envs, spread=0.5), using(strategy, group_sizes=sizes))
        assert outcome.deviation(0, 10_000) < 3


def test_flow_follows_a_change_of_regime() -> None:
    """When fast and slow, reliable and lossy envs swap in mid-run, the mix is on target again soon after."""
    regime = Regime(5_120, {"a": (20.0, 0.4), "c": (1.0, 0.0)})
    outcome = simulate(Scenario(THREE, regime=regime), using("flow"))
    assert outcome.deviation(0, 10_000) < 0.25
    assert statistics.mean(outcome.batch_deviations(26, 40)) < 2.5


def test_flow_delivers_a_rare_and_slow_env() -> None:
    """An env with 1 % of the mix and 50 times the latency gets its 1 %."""
    envs = (SimEnv("a", 0.5), SimEnv("b", 0.49), SimEnv("rare", 0.01, 50.0))
    outcome = simulate(Scenario(envs, steps=120), using("flow"))
    assert outcome.shares()["rare"] == pytest.approx(0.01, abs=0.002)


def test_a_cap_does_not_distort_the_mix_of_the_others() -> None:
    """An env at its own limit delivers what it can, the others share the rest by their targets."""
    envs = (SimEnv("a", 0.4), SimEnv("b", 0.1), SimEnv("capped", 0.5, max_inflight=10))
    shares = simulate(Scenario(envs, max_inflight=100), using("flow")).shares()
    assert shares["capped"] == pytest.approx(0.1, abs=0.02)
    assert shares["a"] / shares["b"] == pytest.approx(4, rel=0.05)


def test_minimums_hold_in_every_batch() -> None:
    """Batches come from the real buffer: with a minimum each has at least that share."""
    envs = (*THREE[:2], replace(THREE[2], minimum=0.29))
    outcome = simulate(Scenario(envs, batch_size=100), using("flow"))
    assert min(batch.counts["c"] for batch in outcome.batches) >= 29


@settings(deadline=None, max_examples=20)
@given(
    costs=st.lists(COSTS, min_size=2, max_size=5),
    weights=st.lists(st.floats(0.1, 1.0), min_size=5, max_size=5),
    slots=st.sampled_from([1, 4, 24]),
    spread=st.sampled_from([0.0, 1.0]),
)
def test_flow_converges_for_any_latencies_and_losses(
    costs: list[tuple[float, float]], weights: list[float], slots: int, spread: float
) -> None:
    """Shares converge to the targets whatever rollouts take and lose, and no env is starved."""
    envs = [SimEnv(f"e{i}", weights[i], latency, loss) for i, (latency, loss) in enumerate(costs)]
    needed = sum(env.weight * env.latency_s / (1 - env.loss) for env in envs) / sum(
        env.weight for env in envs
    )
    duration_s = max(1_000 * needed / slots, 30 * max(env.latency_s / (1 - env.loss) for env in envs))
    scenario = Scenario(
        envs, max_inflight=slots, batch_size=16, steps=10**9, duration_s=duration_s, spread=spread
    )
    outcome = simulate(scenario, using("flow", breaker=False))
    assert outcome.deviation(0, len(outcome.deliveries)) < 3
    half = len(outcome.deliveries) // 2
    assert set(outcome.deliveries[half:]) == set(range(len(envs)))


@settings(deadline=None, max_examples=20)
@given(
    strategy=st.sampled_from(list(STRATEGIES)),
    costs=st.lists(COSTS.map(lambda cost: (cost[0], min(cost[1], 0.6))), min_size=2, max_size=4),
    seed=st.integers(0, 1000),
)
def test_no_strategy_starves_an_env(strategy: str, costs: list[tuple[float, float]], seed: int) -> None:
    """Every env keeps being delivered, breaker included, while it accepts at least some."""
    envs = [SimEnv(f"e{i}", 1.0, latency, loss) for i, (latency, loss) in enumerate(costs)]
    scenario = Scenario(envs, max_inflight=16, batch_size=16, steps=10**9, duration_s=400, seed=seed)
    outcome = simulate(scenario, using(strategy))
    for quarter in range(4):
        stretch = outcome.deliveries[
            quarter * len(outcome.deliveries) // 4 : (quarter + 1) * len(outcome.deliveries) // 4
        ]
        assert set(stretch) == set(range(len(envs)))


def test_a_group_larger_than_its_cap_is_an_error() -> None:
    """Nothing could ever start."""
    with pytest.raises(StalledError, match="cap is below its group size"):
        simulate(Scenario([SimEnv("a", 1.0, group_size=8, max_inflight=4)]), using("flow"))


def test_a_simulation_is_repeatable() -> None:
    """The same scenario and seed give the same run; another seed another one."""
    scenario = Scenario(THREE, steps=3)
    first, again = simulate(scenario, using("flow")), simulate(scenario, using("flow"))
    assert (first.deliveries, first.batches) == (again.deliveries, again.batches)
    assert simulate(replace(scenario, seed=1), using("flow")).deliveries != first.deliveries


def test_a_run_that_delivers_nothing_ends_with_an_error() -> None:
    """If every rollout is lost there is no batch, and the simulation says so instead of going on for ever."""
    with pytest.raises(StalledError, match="no batch after"):
        simulate(Scenario([SimEnv("a", 1.0, loss=1.0)], max_inflight=8, batch_size=8), using("flow"))


@pytest.mark.parametrize(("latency_s", "loss"), [(0.0, 0.0), (float("nan"), 0.0), (1.0, 1.1), (1.0, -0.1)])
def test_impossible_envs_are_refused(latency_s: float, loss: float) -> None:
    """Latencies are positive, losses between 0 and 1."""
    with pytest.raises(ValueError, match='env "a"'):
        SimEnv("a", 1.0, latency_s, loss)


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.register(parser.add_subparsers())
    return parser.parse_args(["simulate", *words, "--mix-only"])


def write_config(path: Path, *, ratios: bool = True, mix: str = "") -> str:
    envs = "".join(
        f'[[train.env]]\nid = "reverse"\nname = "{name}"\n' + (f"ratio = {ratio}\n" if ratios else "")
        for name, ratio in (("a", 0.4), ("b", 0.3), ("c", 0.3))
    )
    file = path / "config.toml"
    file.write_text(f"{mix}[local]\n[batch]\nsize = 64\n[train]\ngroup_size = 1\n{envs}", encoding="utf-8")
    return str(file)


def test_the_command_prints_every_strategy_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deviation, rollouts per delivered, step time, shares and a plot for all strategies."""
    monkeypatch.setenv("COLUMNS", "120")
    flags = ["--latency", "a=1", "--latency", "b=5", "--latency", "c=20", "--loss", "b=.1", "--loss", "c=.4"]
    args = parse(write_config(tmp_path), *flags, "--steps", "20")
    assert args.run(args) == 0
    printed = capsys.readouterr().out
    for word in (
        "flow",
        "adaptive",
        "weighted random",
        "weighted round robin",
        "per batch",
        "p95",
        "step time",
    ):
        assert word in printed
    assert "rollouts per delivered" in printed
    assert printed.count("▄") > 20


def test_the_configured_strategy_and_its_options_come_first(tmp_path: Path) -> None:
    """A strategy of one's own is simulated beside the built-in ones."""
    mix = '[mix]\nstrategy = "tests.mix.test_strategies:LastOne"\noptions = { flavour = "sour" }\n'
    args = parse(write_config(tmp_path, mix=mix), "--steps", "3")
    config = load_config(args.config)
    scenario = simulate_mix.build_scenario(config, args)
    builders = simulate_mix.build_strategies(config, scenario)
    assert list(builders) == ["tests.mix.test_strategies:LastOne", *STRATEGIES]
    outcome = simulate(scenario, builders["tests.mix.test_strategies:LastOne"])
    assert outcome.shares() == {"a": 0.0, "b": 0.0, "c": 1.0}


def test_latencies_and_losses_come_from_an_earlier_run(tmp_path: Path) -> None:
    """--from reads the run's summary, flags win over it, and the number of tasks stands in for ratios."""
    numbers = {
        "a": {"mean_latency_s": 2.0, "acceptance": 0.75, "num_tasks": 300},
        "b": {"mean_latency_s": 4.0, "acceptance": 1.0, "num_tasks": 50},
        "c": {"mean_latency_s": 0.0, "num_tasks": 50},
    }
    (tmp_path / "summary.json").write_text(json.dumps({"envs": numbers}), encoding="utf-8")
    config = write_config(tmp_path, ratios=False)
    args = parse(config, "--from", str(tmp_path), "--latency", "b=7", "--tasks", "b=150")
    scenario = simulate_mix.build_scenario(load_config(args.config), args)
    assert [(env.latency_s, env.loss) for env in scenario.envs] == [(2.0, 0.25), (7.0, 0.0), (1.0, 0.0)]
    assert [env.weight for env in scenario.envs] == pytest.approx([0.6, 0.3, 0.1])


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--latency", "math=1"], 'no train env is named "math"; there are: a, b, c'),
        (["--loss", "a=much"], '"much" is not a number'),
        (["--loss", "a=2"], "a loss of 2.0 is not between 0 and 1"),
        (["--latency", "a=0"], "not a positive number"),
        (["--from", "nowhere"], "there is no such file"),
    ],
)
def test_mistakes_on_the_command_line_are_explained(tmp_path: Path, flags: list[str], complaint: str) -> None:
    """One line says what is wrong."""
    args = parse(write_config(tmp_path), *flags)
    with pytest.raises(ConfigError, match=complaint):
        args.run(args)


def test_without_ratios_the_command_asks_for_task_counts(tmp_path: Path) -> None:
    """Simulating starts no env, so it cannot count tasks itself."""
    args = parse(write_config(tmp_path, ratios=False))
    with pytest.raises(ConfigError, match="add --tasks a=1000"):
        args.run(args)


def test_a_broken_summary_is_a_configuration_error(tmp_path: Path) -> None:
    """Whatever is wrong with the file, the message names it."""
    for text in ("{", "[]", '{"envs": 3}'):
        (tmp_path / "summary.json").write_text(text, encoding="utf-8")
        args = parse(write_config(tmp_path), "--from", str(tmp_path))
        with pytest.raises(ConfigError, match="not the summary of a run"):
            args.run(args)
