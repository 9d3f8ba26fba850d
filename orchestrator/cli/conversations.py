"""How groups, conversations and failures look in a terminal, whatever its width."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from orchestrator.archive import ArchivedFailure, ArchivedGroup, ArchivedRollout, OutcomeCount
from orchestrator.archive.records import content_text, tool_calls_of
from orchestrator.views.terminal import plain, plain_lines

LEFT_OUT_FIRST = ("seconds", "tokens", "ended", "rewards", "version", "task")
"""Columns that a narrow terminal does without, before a name is cut to less than `NAME_WIDTH`."""
NAME_WIDTH = 14

HEADINGS = (
    *("", "#", "env", "task", "step", "version", "reward", "outcome"),
    *("rewards", "tokens", "seconds", "ended"),
)
WORDS = ("", "env", "outcome", "rewards", "ended")
GAP = 2

DETAIL_LINES = 8
"""Of a traceback: where it ended."""

_ROLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}


def print_table(
    console: Console, groups: Sequence[ArchivedGroup], counts: Sequence[OutcomeCount], *, more: bool
) -> None:
    """A row for each group; a dot stands before those that have conversations."""
    rows = [_cells(group) for group in groups]
    widths = _fitting(rows, console.width)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, GAP, 0, 0))
    for heading, width in widths.items():
        justify: JustifyMethod = "left" if heading in WORDS else "right"
        table.add_column(heading, justify=justify, no_wrap=True, width=width)
    for row in rows:
        table.add_row(*(Text(row[heading], style="" if heading else "green") for heading in widths))
    console.print(table)
    totals: Counter[str] = Counter()
    for count in counts:
        totals[count.outcome] += count.groups
    ordered = sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    told = ", ".join(f"{n} {outcome}" for outcome, n in ordered) or "none yet"
    console.print(Text(plain(f"groups: {told}"), style="dim"))
    if groups:
        hint = "● has conversations: --show N." + (" There are more: --limit." if more else "")
        console.print(Text(hint, style="dim"))


def _fitting(rows: Sequence[Mapping[str, str]], width: int) -> dict[str, int]:
    """The columns that fit, and their widths: numbers are never cut; names share what is left."""
    widths = {
        heading: max([cell_len(heading), 1, *(cell_len(row[heading]) for row in rows)])
        for heading in HEADINGS
    }
    env, outcome = widths["env"], widths["outcome"]
    for heading in (*LEFT_OUT_FIRST, ""):
        left = width - GAP * len(widths) - sum(widths.values()) + env + outcome
        if not heading or left >= min(env, NAME_WIDTH) + min(outcome, NAME_WIDTH):
            break
        del widths[heading]
    widths["outcome"] = min(outcome, max(left // 2, left - env, 1))
    widths["env"] = min(env, max(left - widths["outcome"], 1))
    return widths


def _cells(group: ArchivedGroup) -> dict[str, str]:
    return {
        "": "●" if group.has_text else "",
        "#": str(group.seq),
        "env": plain(group.env),
        "task": str(group.task),
        "step": "" if group.step is None else str(group.step),
        "version": _span(group),
        "reward": "" if group.mean_reward is None else f"{group.mean_reward:.3f}",
        "outcome": plain(group.outcome),
        "rewards": _rewards(group),
        "tokens": f"{group.tokens:,}",
        "seconds": f"{group.seconds:.1f}",
        "ended": time.strftime("%m-%d %H:%M:%S", time.localtime(group.finished_at)),
    }


def _span(group: ArchivedGroup) -> str:
    same = group.version_end <= group.version
    return str(group.version) if same else f"{group.version}–{group.version_end}"


def _rewards(group: ArchivedGroup) -> str:
    if group.min_reward is None or group.max_reward is None:
        return ""
    return f"{group.size} × {group.min_reward:.2f}…{group.max_reward:.2f}"


def print_group(console: Console, group: ArchivedGroup, *, member: int | None) -> None:
    """A group: what is known of it, then its rollouts one after the other, or one of them."""
    facts = [
        f"{group.id} (#{group.seq})",
        f"env {group.env}, task {group.task}, epoch {group.epoch}; {group.outcome}"
        + ("" if group.step is None else f", step {group.step}")
        + f"; version {_span(group)}",
        f"{group.size} rollouts, {group.tokens:,} tokens, {group.truncated} truncated, {group.seconds:.1f} s, ended "
        + time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(group.finished_at)),
    ]
    if group.rewards:
        facts.append("rewards " + "  ".join(f"{reward:.3f}" for reward in group.rewards))
    for fact in facts:
        console.print(Text(plain(fact)))
    if not group.has_text:
        console.print(
            Text(
                "No conversation of this group was kept: they are, of a few groups of each env and step.",
                style="dim",
            )
        )
        return
    for rollout in group.rollouts if member is None else [group.rollouts[member - 1]]:
        console.print()
        _print_rollout(console, rollout, group.size)


def _print_rollout(console: Console, rollout: ArchivedRollout, size: int) -> None:
    title = f"rollout {rollout.number + 1} of {size}: reward {rollout.reward:.3f}"
    console.print(Rule(Text(title, style="bold"), align="left", style="dim"))
    facts = [f"{rollout.tokens:,} tokens"] if rollout.tokens else []
    facts += [rollout.stop_reason] if rollout.stop_reason else []
    facts += ["truncated"] if rollout.truncated else []
    facts += [f"{name} {seconds:.2f} s" for name, seconds in rollout.timings.items()]
    facts += [f"{name} = {value:g}" for name, value in rollout.metrics.items()]
    facts += [f"seat {name or '(none)'} earned {reward:g}" for name, reward in rollout.seats.items()]
    console.print(Text(plain(", ".join(facts)), style="dim"))
    for message in rollout.messages:
        _print_message(console, message)


def _print_message(console: Console, message: Mapping[str, Any]) -> None:
    role = str(message.get("role") or "message")
    named = [str(message[key]) for key in ("name", "seat") if message.get(key)]
    console.print(Text(plain(" ".join([role, *named])), style=f"bold {_ROLES.get(role, 'blue')}"))
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        console.print(Padding(Text(plain_lines(reasoning), style="dim italic"), (0, 0, 0, 2), expand=False))
    text = content_text(message.get("content"))
    if text:
        console.print(Padding(Text(plain_lines(text)), (0, 0, 0, 2), expand=False))
    for name, called_with in tool_calls_of(message):
        console.print(
            Padding(Text(plain_lines(f"→ {name}({called_with})"), style="yellow"), (0, 0, 0, 2), expand=False)
        )


def print_failures(console: Console, failures: Sequence[ArchivedFailure], *, limit: int) -> None:
    """What went wrong, the most frequent first, with where the last one was raised."""
    if not failures:
        console.print("No rollout failed, as far as this run was archived.")
    for failure in failures[:limit]:
        times = "once" if failure.count == 1 else f"{failure.count:,} times"
        head = Text(plain(f"{failure.env}: {failure.kind}"), style="bold red")
        last = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failure.last_at))
        head.append(f"  {times}, last {last}, task {failure.task}", style="not bold default")
        console.print(head)
        console.print(Padding(Text(plain_lines(failure.text)), (0, 0, 0, 2), expand=False))
        detail = failure.detail.strip().splitlines()[-DETAIL_LINES:]
        if detail:
            console.print(
                Padding(Text(plain_lines("\n".join(detail)), style="dim"), (0, 0, 0, 4), expand=False)
            )
    if len(failures) > limit:
        console.print(Text(f"There are {len(failures) - limit} more: --limit.", style="dim"))
