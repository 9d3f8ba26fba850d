"""A run that is not there to be asked: how far it came and how it ended, from what it left in its directory.

The journal says how far; `summary.json`, if it is newer than the last start, says that it ended in order; the log says what it
failed with; the lock says whether an orchestrator is there after all. Nothing is changed, and nothing is waited for.
"""

import json
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.journal import JournalReader
from orchestrator.journal.directory import DIRECTORY, LOCK
from orchestrator.views.lines import evaluations
from orchestrator.views.numbers import duration, number, sparkline
from orchestrator.views.terminal import plain

LOG = Path("logs", "orchestrator.log")
TAIL_BYTES = 256 * 1024
"""Of the log that are searched for the run's last words."""
TREND_STEPS = 60
TREND_WIDTH = 20

State = Literal["busy", "ended", "failed", "crashed"]


class Past(msgspec.Struct):
    """What a run directory tells."""

    run_dir: str
    state: State
    why: str
    at: float
    """When it ended, or gave its last sign of life; seconds since 1970."""
    step: int
    trained: int
    version: int
    reward: float | None
    first_reward: float | None
    last_step_at: float | None
    seconds: float
    """The run's own time, all its processes together."""
    rewards: list[float | None]
    """Of the last steps."""
    envs: dict[str, tuple[float | None, float | None]]
    """First and last reward."""
    evals: list[dict[str, Any]]


def read_past(run_dir: Path) -> Past:
    """Look into a run directory; JournalError when there is no journal that can be read."""
    with JournalReader(run_dir) as reader:
        states, batches = reader.states(), reader.batches(last=1)
        steps, evals = reader.steps(last=TREND_STEPS), reader.evals(last=50)
    facts: Mapping[str, Any] = states.get("facts", {})
    versions: Mapping[str, Any] = states.get("version", {})
    first, last = facts.get("rewards", (None, None))
    last_batch = batches[-1] if batches else None
    state, why, at = end_of(run_dir)
    return Past(
        run_dir=str(run_dir),
        state=state,
        why=why,
        at=at,
        step=0 if last_batch is None else last_batch.step,
        trained=max([versions.get("trained", 0), *(s.step for s in steps if s.acknowledged_at is not None)]),
        version=versions.get("serving", 0),
        reward=last,
        first_reward=first,
        last_step_at=None if last_batch is None else last_batch.formed_at,
        seconds=facts.get("seconds", 0.0),
        rewards=[step.sampled_reward for step in steps],
        envs={name: tuple(env["rewards"]) for name, env in facts.get("envs", {}).items()},
        evals=evals,
    )


def end_of(run_dir: Path) -> tuple[State, str, float]:
    """How the last process of the run ended, and when."""
    started = _modified(run_dir / "addresses.json")
    if _is_locked(run_dir / LOCK):
        return "busy", "an orchestrator uses the directory", started
    summary = run_dir / "summary.json"
    if _modified(summary) >= started and summary.exists():
        try:
            return "ended", str(json.loads(summary.read_text(encoding="utf-8"))["end"]), _modified(summary)
        except (OSError, ValueError, LookupError, TypeError):
            pass  # a summary that cannot be read says nothing
    for event in _last_events(run_dir / LOG):
        told_at = _time(event.get("time"))
        if event.get("event") == "run.failed" and told_at is not None and told_at >= started - 1:
            return "failed", str(event.get("error")), told_at
    # SQLite writes to the index of a WAL for readers too: looking at a run is no sign of its life.
    signs = [run_dir / LOG, *(p for p in (run_dir / DIRECTORY).glob("*") if not p.name.endswith("-shm"))]
    return "crashed", "there is no record of its end", max(map(_modified, signs), default=started)


def _last_events(path: Path) -> Iterator[dict[str, Any]]:
    """Of the log, the newest first."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return
    for line in reversed(lines):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


def _time(text: object) -> float | None:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _is_locked(path: Path) -> bool:
    """Whether a process holds the lock. Taking it to find out could turn away an orchestrator that starts."""
    try:
        found = path.stat()
        locks = Path("/proc/locks").read_text(encoding="utf-8")
    except OSError:
        return False
    name = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    return any(name in line.split() and "FLOCK" in line for line in locks.splitlines())


def render_past(past: Past, now: float, width: int, *, bars: str) -> Iterator[RenderableType]:
    """What people read of it."""
    yield Text.assemble((past.state, "bold"), f": {plain(past.why)}", (f" ({_when(past.at, now)})", "dim"))
    yield from render_progress(past, now, width, bars=bars)
    if past.envs:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for heading in ("env", "first reward", "last reward"):
            table.add_column(heading, justify="left" if heading == "env" else "right")
        for name, (first, last) in past.envs.items():
            table.add_row(Text(plain(name)), number(first), number(last))
        yield table


def render_progress(past: Past, now: float, width: int, *, bars: str) -> Iterator[Text]:
    """How far it came."""
    if past.last_step_at is None:
        yield Text("no batch was formed yet")
        return
    trend = sparkline(past.rewards, TREND_WIDTH, bars=bars)
    yield Text(
        f"step {past.step}, trained {past.trained}, version {past.version}, after {duration(past.seconds)}"
    )
    yield Text(
        f"reward {number(past.reward)}, at first {number(past.first_reward)}"
        + (f"   {trend}" if trend else "")
    )
    yield Text(f"the last batch was formed at {_when(past.last_step_at, now)}")
    yield from evaluations(past.evals, width)


def _when(at: float, now: float) -> str:
    clock = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"{clock}, {duration(max(0.0, now - at))} ago"
