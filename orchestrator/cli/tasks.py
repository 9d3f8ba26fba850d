"""`orchestrator tasks`: what a run knows about its tasks, while it runs, after a crash, or when it is done.

Per env, how many tasks were tried and how well they are solved; then single tasks, sorted by what people look for. Read
from the journal, which is not changed.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import ConfigError
from orchestrator.views.terminal import plain

if TYPE_CHECKING:
    from orchestrator.curriculum import TaskStatistics

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

ROWS = 20
"""Tasks of each env that the table shows unless --limit says otherwise."""

SORTS = {
    "task": "task",
    "groups": "groups",
    "reward": "reward",
    "solve-rate": "solve_rate",
    "equal": "equal_share",
    "version": "version",
}
"""What tasks can be sorted by, and the name that it has in a row."""


def register(commands: "Commands") -> None:
    """Add the command."""
    parser = commands.add_parser(
        "tasks",
        help="show what a run knows about its tasks: how often each was tried, and how well it is solved",
        description="Show what a run knows about its tasks: how often each was tried, its mean reward, its recent solve rate, "
        "and how many of its groups had equal rewards. Tasks that were never tried are counted, not listed.",
    )
    parser.add_argument("run_dir", type=Path, help="run directory")
    parser.add_argument("--env", help="of this environment alone")
    parser.add_argument("--sort", choices=SORTS, default="solve-rate", help="by what to sort (solve-rate)")
    parser.add_argument("--descending", action="store_true", help="the largest first")
    parser.add_argument(
        "--limit",
        type=_count,
        help=f"at most so many of each env; {ROWS} in the table, all of them with --json",
    )
    parser.add_argument("--json", action="store_true", help="print it for programs")
    parser.set_defaults(run=tasks_command)


def tasks_command(arguments: argparse.Namespace) -> int:
    """Read and print."""
    found = read_tasks(
        arguments.run_dir,
        env=arguments.env,
        sort=SORTS[arguments.sort],
        descending=arguments.descending,
        limit=arguments.limit or (None if arguments.json else ROWS),
    )
    if arguments.json:
        json.dump(found, sys.stdout, indent=1)
        print()
    else:
        _print(found)
    return 0


def read_tasks(
    run_dir: Path, *, env: str | None, sort: str, descending: bool, limit: int | None
) -> dict[str, dict[str, Any]]:
    """Per env, the numbers of all its tasks and rows of single ones; ConfigError for an env that the run has not."""
    from orchestrator.journal import JournalReader, identity_from_meta

    with JournalReader(run_dir) as reader:
        envs, learned = identity_from_meta(reader.meta()).envs, reader.learned()
    if env is not None and env not in envs:
        raise ConfigError(
            f'{run_dir}: there is no train env "{env}"; it has: {", ".join(envs) or "none yet"}'
        )
    found = {}
    for name, identity in envs.items():
        if env in (None, name):
            statistics, pools = _known(identity.num_tasks, identity.curriculum, learned.get(name))
            tried = [statistics.row(place) for place in statistics.groups.nonzero()[0].tolist()]
            rows = sorted(tried, key=lambda row: (row[sort], row["task"]), reverse=descending)
            found[name] = {
                "num_tasks": identity.num_tasks,
                "strategy": identity.curriculum.get("strategy", "uniform"),
                "tried": statistics.seen,
                "groups": int(statistics.groups.sum(dtype="int64")),
                "equal_groups": int(statistics.equal.sum(dtype="int64")),
                "solve_rates": statistics.histogram,
                "pools": pools,
                "tasks": rows[:limit],
            }
    return found


def _known(num_tasks: int | None, told: Any, learned: Any) -> tuple["TaskStatistics", dict[str, int]]:
    """The statistics, and the pools of a curriculum that comes along with this package."""
    from orchestrator.curriculum import STRATEGIES, CurriculumSettings, TaskStatistics, build_curriculum

    statistics = TaskStatistics(num_tasks, reward_range=told.get("reward_range", (0.0, 1.0)))
    if learned is not None:
        statistics.load(learned)
    if num_tasks is None or told.get("strategy") not in STRATEGIES:
        return statistics, {}
    strategy = build_curriculum(CurriculumSettings(told["strategy"], told["options"]), statistics, env="")
    assert strategy is not None
    strategy.on_load()
    return statistics, {name: count for name, count in strategy.pools().items() if name != "open"}


def _print(found: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for name, env in found.items():
        total = "without end" if env["num_tasks"] is None else f"{env['num_tasks']:,}"
        equal = env["equal_groups"] / max(1, env["groups"])
        console.print(Text.assemble((plain(name), "bold"), f": {plain(env['strategy'])}"))
        console.print(
            f"tasks {total}, tried {env['tried']:,}; groups {env['groups']:,}, {equal:.1%} of them with equal rewards",
            markup=False,
        )
        if env["pools"]:
            console.print("pools: " + ", ".join(f"{pool} {n:,}" for pool, n in env["pools"].items()))
        if not env["tried"]:
            continue
        console.print("by recent solve rate: " + _bins(env["solve_rates"]), markup=False)
        table = Table(box=None, pad_edge=False, header_style="dim")
        for heading in ("task", "groups", "rollouts", "reward", "solve rate", "equal rewards", "version"):
            table.add_column(heading, justify="right")
        for row in env["tasks"]:
            rates = (f"{row['reward']:.3f}", f"{row['solve_rate']:.1%}", f"{row['equal_share']:.0%}")
            table.add_row(
                str(row["task"]), str(row["groups"]), str(row["rollouts"]), *rates, str(row["version"])
            )
        console.print(table)
        if len(env["tasks"]) < env["tried"]:
            console.print(f"and {env['tried'] - len(env['tasks']):,} more (--limit)", style="dim")


def _bins(counts: list[int]) -> str:
    width = 100 // len(counts)
    return "  ".join(
        f"{place * width}-{(place + 1) * width} %: {count:,}" for place, count in enumerate(counts) if count
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)
