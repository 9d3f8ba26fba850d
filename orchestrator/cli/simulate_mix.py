"""`orchestrator simulate CONFIG --mix-only`: what each mix strategy would deliver, imagined in virtual time.

Takes envs, ratios, minimums, group sizes, caps and slots from the configuration, latencies and losses from flags
or from the summary of an earlier run, and prints every strategy side by side. Starts nothing.
"""

import argparse
import json
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from orchestrator.config import Config, load_config
from orchestrator.config.domains import domain_of
from orchestrator.errors import ConfigError
from orchestrator.mix import STRATEGIES, EnvShare, build_mix, mix_targets
from orchestrator.mix.delivered import largest_deviation
from orchestrator.mix.strategy import EnvMixStrategy
from orchestrator.service.imagined import envs_by_tasks, needs_tasks
from orchestrator.simulate import MixBuilder, MixResult, Scenario, SimEnv, percentile, simulate

MINUTES = 10.0
"""Virtual time, where neither a time nor a number of steps is asked for."""

PLOT_COLUMNS = 40
BARS = "▁▂▃▄▅▆▇"
FIGURES = (
    "batches",
    "off target",
    "… per batch",
    "… p95 of batches",
    "rollouts per delivered",
    "step time",
    "step time, p95",
    "delivered per second",
)


def run(args: argparse.Namespace) -> int:
    """Simulate and print."""
    config = load_config(args.config, getattr(args, "overrides", ()))
    scenario = build_scenario(config, args)
    outcomes = {name: simulate(scenario, build) for name, build in build_strategies(config, scenario).items()}
    print_comparison(scenario, outcomes, Console())
    return 0


def build_scenario(config: Config, args: argparse.Namespace) -> Scenario:
    """The scenario that the configuration and the flags describe."""
    if config.batch.unit != "sequences":
        raise ConfigError("simulate counts sequences; add --batch.unit sequences --batch.size N")
    names = [env.label for env in config.train.env]
    latencies, losses, tasks = (pairs(args, flag, names) for flag in ("latency", "loss", "tasks"))
    if args.run_dir is not None:
        earlier = _earlier_run(args.run_dir)
        for name in names:
            numbers = earlier.get(name, {})
            latencies.setdefault(name, numbers.get("mean_latency_s") or 1.0)
            losses.setdefault(name, 1.0 - numbers.get("acceptance", 1.0))
            if numbers.get("num_tasks"):
                tasks.setdefault(name, numbers["num_tasks"])
    targets = mix_targets(_shares(config, tasks), batch_size=config.batch.size, domains=config.mix.domains)
    try:
        envs = [
            SimEnv(
                name=env.label,
                weight=target,
                latency_s=latencies.get(env.label, 1.0),
                loss=losses.get(env.label, 0.0),
                group_size=env.group_size or config.train.group_size,
                max_inflight=env.max_inflight,
                minimum=env.min_batch_allocation,
            )
            for env, target in zip(config.train.env, targets, strict=True)
        ]
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return Scenario(
        envs=envs,
        max_inflight=config.dispatch.max_inflight,
        batch_size=config.batch.size,
        steps=args.steps or 10**9,
        duration_s=float("inf") if args.steps else (args.minutes or MINUTES) * 60,
        spread=args.spread,
        seed=config.seed if args.seed is None else args.seed,
    )


def print_comparison(scenario: Scenario, outcomes: Mapping[str, MixResult], console: Console) -> None:
    """All strategies side by side; the configured one comes first."""
    print_envs(scenario, console)
    table = Table(title="deviations in percentage points of the largest", title_justify="left")
    table.add_column("")
    for name in outcomes:
        table.add_column(_heading(name), justify="right")
    rows = [_figures(outcome) for outcome in outcomes.values()]
    for heading in rows[0]:
        table.add_row(heading, *(row[heading] for row in rows))
    console.print(table)
    table = Table(title="delivered share", title_justify="left")
    for heading in ("env", "target", *map(_heading, outcomes)):
        table.add_column(heading, justify="left" if heading == "env" else "right")
    shares = {name: outcome.shares() for name, outcome in outcomes.items()}
    targets = next(iter(outcomes.values())).targets
    for env, target in targets.items():
        table.add_row(env, f"{target:.3f}", *(f"{shares[name][env]:.3f}" for name in outcomes))
    console.print(table)
    print_plot(targets, outcomes, console)
    for name, outcome in outcomes.items():
        for time_s, env, change in outcome.quarantines[:10]:
            console.print(f'{name}: env "{env}" {change} at {time_s:.0f} s', highlight=False)


def print_envs(scenario: Scenario, console: Console) -> None:
    """What was assumed."""
    table = Table(title="assumed", title_justify="left")
    for heading in ("env", "latency", "loss", "group", "cap"):
        table.add_column(heading, justify="left" if heading == "env" else "right")
    for env in scenario.envs:
        cap = "" if env.max_inflight is None else str(env.max_inflight)
        table.add_row(env.name, f"{env.latency_s:.3g} s", f"{env.loss:.0%}", str(env.group_size), cap)
    console.print(table)


def print_plot(targets: Mapping[str, float], outcomes: Mapping[str, MixResult], console: Console) -> None:
    """Each env's share over time, one row of bars per strategy and env."""
    title = (
        f"delivered mix over time ({BARS[3]} on target, {BARS[0]} half of it or less, {BARS[-1]} half more)"
    )
    table = Table(title=title, title_justify="left", show_header=False)
    for name, outcome in outcomes.items():
        for index, (env, target) in enumerate(targets.items()):
            last = index == len(targets) - 1
            table.add_row(name if index == 0 else "", env, sparkline(outcome, env, target), end_section=last)
    console.print(table)


def sparkline(outcome: MixResult, env: str, target: float) -> str:
    """The env's share in each stretch of the run, as a row of bars."""
    batches = outcome.batches
    columns = min(PLOT_COLUMNS, len(batches))
    bars = []
    for column in range(columns):
        counts = Counter[str]()
        for batch in batches[column * len(batches) // columns : (column + 1) * len(batches) // columns]:
            counts.update(batch.counts)
        ratio = counts[env] / counts.total() / target if target else 1.0
        middle = len(BARS) // 2
        bars.append(BARS[max(0, min(len(BARS) - 1, round(middle + (ratio - 1.0) * 2 * middle)))])
    return "".join(bars)


def _figures(outcome: MixResult) -> dict[str, str]:
    if not outcome.batches:
        return dict.fromkeys(FIGURES, "–") | {FIGURES[0]: "0"}
    deviations = outcome.batch_deviations()
    steps = outcome.step_times()
    values = (
        str(len(outcome.batches)),
        f"{largest_deviation(outcome.shares(), outcome.targets):.2f}",
        f"{statistics.mean(deviations):.2f}",
        f"{percentile(deviations, 0.95):.2f}",
        f"{outcome.rollouts_per_delivered:.2f}",
        f"{statistics.mean(steps):.1f} s",
        f"{percentile(steps, 0.95):.1f} s",
        f"{outcome.delivered_per_s:.1f}",
    )
    return dict(zip(FIGURES, values, strict=True))


def _heading(strategy: str) -> str:
    """The name with places to break the line."""
    return strategy if ":" in strategy else strategy.replace("_", " ")


def build_strategies(config: Config, scenario: Scenario) -> dict[str, MixBuilder]:
    """The configured strategy with its options, then the others with their defaults."""
    sizes = {env.name: env.group_size for env in scenario.envs}

    def builder(strategy: str, options: Mapping[str, Any]) -> MixBuilder:
        def build(names: Sequence[str], weights: Sequence[float], rng: random.Random) -> EnvMixStrategy:
            return build_mix(strategy, names, weights, rng=rng, group_sizes=sizes, **options)

        return build

    configured = config.mix.strategy
    others = [name for name in STRATEGIES if name != configured]
    return {
        configured: builder(configured, config.mix.arguments()),
        **{name: builder(name, {}) for name in others},
    }


def _shares(config: Config, tasks: Mapping[str, float]) -> list[EnvShare]:
    shares = []
    by_tasks = envs_by_tasks(config)
    for env in config.train.env:
        if env.label in by_tasks and env.label not in tasks:
            raise needs_tasks(env.label)
        count = int(tasks[env.label]) if env.label in by_tasks else None
        domain = domain_of(env.label, env.ids, config.domains)
        group_size = env.group_size or config.train.group_size
        shares.append(EnvShare(env.label, env.ratio, count, env.min_batch_allocation, group_size, domain))
    return shares


def pairs(args: argparse.Namespace, flag: str, names: Sequence[str]) -> dict[str, float]:
    """What `--latency math=5` and the like say, by env."""
    found = {}
    for text in getattr(args, flag):
        name, _, value = text.rpartition("=")
        if name not in names:
            raise ConfigError(
                f'--{flag} {text}: no train env is named "{name}"; there are: {", ".join(names)}'
            )
        try:
            found[name] = float(value)
        except ValueError:
            raise ConfigError(f'--{flag} {text}: "{value}" is not a number') from None
    return found


def _earlier_run(run_dir: Path) -> dict[str, dict[str, Any]]:
    path = run_dir / "summary.json"
    try:
        envs = json.loads(path.read_text(encoding="utf-8"))["envs"]
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: there is no such file; --from takes the directory of a finished run"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not the summary of a run: {error}") from None
    if not isinstance(envs, dict):
        raise ConfigError(f'{path}: not the summary of a run: "envs" is not a table')
    return envs
