"""Is the delivered mix the configured mix, and what does a pick cost?

Deviations are percentage points of the env that is furthest off, in virtual time, as the median over seeds; the
peer is the published target-over-actual rule (`adaptive`) in the same scenario. Costs are CPU time, with the
breaker in front and the list of eligible envs that a dispatcher passes. Whole runs have the real dispatch, queue and
trainer's pace in virtual time, with the default configuration but for what a figure names.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from benchmarks.frame import Effort, Figure, median_and_spread
from envs.logs import configure_logging
from orchestrator.config import Config
from orchestrator.mix import EnvMixStrategy, build_mix
from orchestrator.service.imagined import env_names, imagine
from orchestrator.simulate import MixBuilder, MixResult, Regime, Scenario, SimEnv, percentile, simulate
from orchestrator.simulate.behaviour import assumed, parse_behaviour
from orchestrator.simulate.rehearsal import Rehearsal

THREE = (SimEnv("a", 0.4, 1.0, 0.0), SimEnv("b", 0.3, 5.0, 0.1), SimEnv("c", 0.3, 20.0, 0.4))
BASE = Scenario(THREE)
FIXED = replace(BASE, spread=0.0)
GROUPS = replace(BASE, envs=[replace(env, group_size=8) for env in THREE])
ZIPF = replace(
    BASE,
    envs=[
        SimEnv(f"e{k}", 1 / k, (1.0, 2.0, 5.0, 10.0, 20.0)[k * 3 % 5], 0.1 * (k * 7 % 5))
        for k in range(1, 21)
    ],
)
SWAPPED = replace(BASE, regime=Regime(5_120, {"a": (20.0, 0.4), "c": (1.0, 0.0)}))
RARE = replace(BASE, envs=[SimEnv("a", 0.5), SimEnv("b", 0.49), SimEnv("rare", 0.01, 50.0)], steps=200)

Measure = Callable[[MixResult], float]


def using(strategy: str, *, breaker: bool = True) -> MixBuilder:
    def build(names: Sequence[str], weights: Sequence[float], rng: random.Random) -> EnvMixStrategy:
        return build_mix(strategy, names, weights, rng=rng, breaker=breaker)

    return build


def first(count: int) -> Measure:
    return lambda outcome: outcome.deviation(0, count)


def batches(summary: Callable[[Sequence[float]], float], start: int = 4, stop: int = 40) -> Measure:
    return lambda outcome: summary(outcome.batch_deviations(start, stop))


def p95(values: Sequence[float]) -> float:
    return percentile(values, 0.95)


# What is measured of each scenario, with the goal in percentage points where there is one.
DEVIATIONS: Sequence[tuple[str, Scenario, Sequence[tuple[str, Measure, float | None]]]] = (
    (
        "latencies 1/5/20, losses 0/10/40 %",
        BASE,
        (
            ("first 1,000", first(1_000), 2.0),
            ("first 10,000", first(10_000), 0.25),
            ("batches 5–40, mean", batches(statistics.mean), 2.5),
            ("batches 5–40, p95", batches(p95), 5.0),
        ),
    ),
    (
        "the same, spread 0.5",
        replace(BASE, spread=0.5),
        (
            ("first 1,000", first(1_000), 2.0),
            ("first 10,000", first(10_000), 0.25),
            ("batches 5–40, mean", batches(statistics.mean), 2.5),
            ("batches 5–40, p95", batches(p95), 5.0),
        ),
    ),
    (
        "fixed latencies",
        FIXED,
        (
            ("batches 5–40, mean", batches(statistics.mean), 3.0),
            ("first 10,000", first(10_000), 0.25),
        ),
    ),
    (
        "groups of 8",
        GROUPS,
        (
            ("first 10,000", first(10_000), None),
            ("batches 5–40, mean (a group is 3.1)", batches(statistics.mean), None),
        ),
    ),
    (
        "20 envs, Zipf weights",
        ZIPF,
        (
            ("first 1,000", first(1_000), None),
            ("first 10,000", first(10_000), None),
            ("batches 5–40, mean", batches(statistics.mean), None),
        ),
    ),
    (
        "fast and slow swap after batch 20",
        SWAPPED,
        (
            ("batches 21–24, mean", batches(statistics.mean, 20, 24), None),
            ("batches 25–40, mean", batches(statistics.mean, 24, 40), None),
            ("first 10,000", first(10_000), None),
        ),
    ),
    (
        "rare and slow env (1 %, 50×)",
        RARE,
        (
            ("first 10,000 (few are back before)", first(10_000), None),
            ("first 50,000", first(50_000), None),
            ("batches 101–200, mean", batches(statistics.mean, 100, 200), None),
        ),
    ),
)


def figures(effort: Effort = Effort.FULL) -> list[Figure]:
    seeds = effort.pick(9, 3, 1)
    found = []
    for what, scenario, measures in DEVIATIONS[: effort.pick(None, None, 1)]:
        count = seeds if scenario is not RARE else max(1, seeds // 3)
        ours = [simulate(replace(scenario, seed=seed), using("flow")) for seed in range(count)]
        peers = [simulate(replace(scenario, seed=seed), using("adaptive")) for seed in range(count)]
        for part, measure, goal in measures:
            value, spread = median_and_spread([measure(outcome) for outcome in ours])
            peer = statistics.median(measure(outcome) for outcome in peers)
            found.append(
                Figure(
                    f"{what}: {part}",
                    value,
                    "pp",
                    peer,
                    "adaptive",
                    goal=f"< {goal}" if goal else "",
                    met=value < goal if goal else None,
                    spread=spread,
                )
            )
    found += [
        figure for versions in (2, 0, 4)[: effort.pick(3, 3, 1)] for figure in whole_runs(versions, effort)
    ]
    found += [failing(index, seeds) for index in (2, 0, 1)]
    found += [pick_cost(count, goal, effort) for count, goal in ((3, 10.0), (20, 30.0))]
    found.append(simulated_per_s())
    return found


def whole_runs(max_versions: int, effort: Effort) -> list[Figure]:
    """Batches of 256 in groups of 8 as the trainer gets them; the deviation is that of the env furthest off, mean over batches."""
    configure_logging("critical")
    seeds = range(effort.pick(3, 1, 1))

    @cache
    def played(mix: str, strategy: str) -> list[Rehearsal]:
        return [rehearse(max_versions, seed, effort, mix, strategy) for seed in seeds]

    def median(
        measure: Callable[[Rehearsal], float], mix: str = "even", strategy: str = "flow"
    ) -> tuple[float, tuple[float, ...]]:
        return median_and_spread([measure(run) for run in played(mix, strategy)])

    what = f"whole runs, groups of 8, losses 0/10/40 %, max_versions {max_versions}"
    even, spread = median(off_target)
    found = []
    for name, strategy in (("oldest", "flow"), ("adaptive", "adaptive")):
        found.append(
            Figure(
                f"{what}: batches from 5 on, mean, beside {name}",
                even,
                "pp",
                median(off_target, "oldest", strategy)[0],
                name,
                goal="at most 2.5",
                met=even <= 2.5,
                spread=spread,
            )
        )
    for part, measure, unit, goal in (
        ("throughput", per_s, "/s", "no lower"),
        ("staleness", staleness, "versions", "no more"),
    ):
        value, spread = median(measure)
        oldest = median(measure, "oldest")[0]
        met = value >= oldest if measure is per_s else value <= oldest
        found.append(Figure(f"{what}: {part}", value, unit, oldest, "oldest", goal, met, spread))
    # In the queue as well as in flight: nothing else lets a group be older when it is trained on.
    most, spread = median(oldest_trained_on)
    passed = f"at most {max_versions}"
    found.append(
        Figure(
            f"{what}: batches that a group saw formed before its own, at most",
            most,
            "",
            median(oldest_trained_on, "oldest")[0],
            "oldest",
            passed,
            most <= max_versions,
            spread,
        )
    )
    return found


def rehearse(max_versions: int, seed: int, effort: Effort, mix: str, strategy: str) -> Rehearsal:
    """A run of three envs, some of whose groups are filtered out."""
    config = Config(
        local={},
        batch={"mix": mix},
        mix={"strategy": strategy},
        train={
            "group_size": 8,
            "env": [{"id": "reverse", "name": env.name, "ratio": env.weight} for env in THREE],
        },
        staleness={"max_versions": max_versions},
    )
    around = assumed(env_names(config))
    stated = {env.name: {"latency_s": {"mean": env.latency_s}, "equal_rewards": env.loss} for env in THREE}
    parse_behaviour({"env": stated, "trainer": {"step_s": 5.0}}, around)
    imagined = imagine(config, around)
    run = Rehearsal(replace(imagined.settings, seed=seed), around, imagined.places, seed=seed)
    run.rehearse(steps=effort.pick(60, 40, 8), seconds=float("inf"))
    return run


def off_target(run: Rehearsal) -> float:
    """Between share and target of the env that is furthest off, mean over batches, once the first are formed."""
    return 100 * statistics.mean(
        max(abs(env.share - env.target) for env in step.envs.values()) for step in run.steps[4:]
    )


def per_s(run: Rehearsal) -> float:
    return sum(step.sequences for step in run.steps) / run.now


def staleness(run: Rehearsal) -> float:
    """Mean age of a sequence in versions."""
    ages = [age * count for step in run.steps for age, count in enumerate(step.staleness)]
    return sum(ages) / sum(step.sequences for step in run.steps)


def oldest_trained_on(run: Rehearsal) -> float:
    """Versions between the sampling of any sequence and its training, at the most; every step publishes one."""
    return float(max(age for step in run.steps for age, count in enumerate(step.staleness) if count))


def failing(index: int, seeds: int) -> Figure:
    """Throughput with one env failing always, against plain weighted draws.

    Where the failing env was a cheap one, plain draws deliver more of the cheapest that is left than its share,
    which no strategy that keeps the mix can match; so the goal is for the dearest one.
    """
    envs = [replace(env, loss=1.0) if k == index else env for k, env in enumerate(THREE)]
    scenario = replace(BASE, envs=envs, steps=30)
    ours, spread = median_and_spread(
        [simulate(replace(scenario, seed=seed), using("flow")).delivered_per_s for seed in range(seeds)]
    )
    peer = statistics.median(
        simulate(replace(scenario, seed=seed), using("weighted_random", breaker=False)).delivered_per_s
        for seed in range(seeds)
    )
    goal = "above the peer" if index == 2 else ""
    return Figure(
        f'env "{THREE[index].name}" (latency {THREE[index].latency_s:g}) fails always: throughput',
        ours,
        "/s",
        peer,
        "weighted_random",
        goal=goal,
        met=ours > peer if goal else None,
        spread=spread,
    )


def pick_cost(count: int, goal: float, effort: Effort) -> Figure:
    """CPU time of a pick of flow behind the breaker, in a mix that has run for a while."""
    names = [f"env{index}" for index in range(count)]
    mix = build_mix("flow", names, [1 / (k + 1) for k in range(count)], rng=random.Random(0))
    for step in range(3_000):
        env = mix.pick()
        mix.on_dispatch(env, 1, now=step * 0.01)
        if step >= 256:
            mix.on_finish(env, 1, 1, now=step * 0.01)
    rounds = effort.pick(10_000, 2_000, 100)
    samples = []
    for _ in range(7):
        start = time.process_time()
        for _ in range(rounds):
            mix.pick(names)
        samples.append((time.process_time() - start) / rounds * 1e6)
    value, spread = median_and_spread(samples)
    return Figure(
        f"a pick among {count} envs", value, "µs", goal=f"< {goal:g} µs", met=value < goal, spread=spread
    )


def simulated_per_s() -> Figure:
    """How much faster than life a simulation runs, at 256 in flight."""
    scenario = replace(BASE, steps=10**9, duration_s=600.0)
    start = time.process_time()
    simulate(scenario, using("flow"))
    took = time.process_time() - start
    return Figure("ten simulated minutes, 256 in flight", took, "s", goal="seconds", met=took < 10)
