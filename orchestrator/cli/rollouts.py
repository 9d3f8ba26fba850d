"""`orchestrator rollouts`: look at the rollouts of a run, while it runs, after a crash, or when it is done.

A table of groups, one group as conversations, the reasons of failures, or a file for other programs. Everything shown comes
from environments and models, so it is stripped of control characters and never read as markup.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import ConfigError

if TYPE_CHECKING:
    from orchestrator.archive import RolloutReader

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

ROWS = 20
"""Groups that the table shows unless --limit says otherwise."""


def register(commands: "Commands") -> None:
    """Add the command."""
    parser = commands.add_parser(
        "rollouts",
        help="read the rollouts of a run: find groups, show conversations, tell failures, export",
        description="Read the rollouts of a run, newest first. Every group has a row; conversations are kept of a sample, "
        "and of what is recent.",
    )
    parser.add_argument("run_dir", type=Path, help="run directory")
    parser.add_argument(
        "--show", metavar="N", help="show the conversations of a group, by its number in the table or its id"
    )
    parser.add_argument("--member", type=int, metavar="M", help="with --show: only this rollout of the group")
    parser.add_argument(
        "--failures", action="store_true", help="tell why rollouts failed, with an example each"
    )
    parser.add_argument(
        "--export", type=Path, metavar="FILE", help="write what is found to FILE.jsonl or FILE.parquet"
    )
    which = parser.add_argument_group("which groups")
    which.add_argument("--env", help="of this environment; evaluations are named eval-NAME")
    which.add_argument("--split", choices=("train", "eval"), help="for training, or of evaluations")
    which.add_argument("--step", type=_bounds, metavar="N or A-B", help="in the batches of these steps")
    which.add_argument("--version", type=_bounds, metavar="N or A-B", help="sampled by these policy versions")
    which.add_argument("--min-reward", type=float, help="with a rollout of at least this reward")
    which.add_argument("--max-reward", type=float, help="with a rollout of at most this reward")
    which.add_argument("--outcome", help="trained, queued, evaluated, equal_rewards, stale, …")
    which.add_argument("--task", type=int, help="of this task, by its index")
    which.add_argument(
        "--contains", metavar="TEXT", help="with this text in a message, in upper or lower case"
    )
    which.add_argument("--readable", action="store_true", help="with conversations that can be shown")
    which.add_argument(
        "--limit", type=_count, help=f"at most so many; {ROWS} in the table, all of them in a file"
    )
    which.add_argument("--oldest", action="store_true", help="oldest first")
    parser.set_defaults(run=rollouts_command)


def rollouts_command(arguments: argparse.Namespace) -> int:
    """Read and print."""
    from rich.console import Console

    from orchestrator.archive import RolloutReader
    from orchestrator.cli.conversations import print_failures, print_group, print_table

    console = Console(highlight=False)
    with RolloutReader(arguments.run_dir) as reader:
        if arguments.failures:
            print_failures(console, reader.failures(arguments.env), limit=arguments.limit or ROWS)
        elif arguments.show is not None:
            print_group(console, _group(reader, arguments), member=arguments.member)
        elif arguments.export is not None:
            return _export(reader, arguments)
        else:
            limit = arguments.limit or ROWS
            groups = list(reader.groups(**_filters(arguments), limit=limit, texts=False))
            print_table(console, groups, reader.counts(), more=len(groups) == limit)
    return 0


def _group(reader: "RolloutReader", arguments: argparse.Namespace) -> Any:
    key = arguments.show
    group = reader.group(int(key) if key.isdecimal() else key)
    if group is None:
        raise ConfigError(
            f'{arguments.run_dir}: there is no group "{key}"; the table of `orchestrator rollouts` has their numbers'
        )
    if arguments.member is not None and not 1 <= arguments.member <= group.size:
        raise ConfigError(
            f"{group.id} has {group.size} rollouts, --member {arguments.member} is none of them"
        )
    return group


def _export(reader: "RolloutReader", arguments: argparse.Namespace) -> int:
    from orchestrator.archive.export import export

    groups = reader.groups(**_filters(arguments), limit=arguments.limit)
    written = export(groups, arguments.export)
    print(f"{written} rollouts in {arguments.export}")
    return 0


def _filters(arguments: argparse.Namespace) -> dict[str, Any]:
    names = (
        "env",
        "split",
        "step",
        "version",
        "min_reward",
        "max_reward",
        "outcome",
        "task",
        "contains",
        "readable",
    )
    return {**{name: getattr(arguments, name) for name in names}, "newest_first": not arguments.oldest}


def _bounds(text: str) -> int | tuple[int, int]:
    """A number, or two with a dash between them."""
    first, dash, last = text.partition("-")
    try:
        return (int(first), int(last)) if dash else int(first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor two like 3-9") from None


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)
