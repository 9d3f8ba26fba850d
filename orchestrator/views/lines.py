"""The lines of the display around its table: the run's numbers, its servers, its evaluations, its troubles.

Each number is a piece that is never cut; as many pieces go to a line as fit.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.text import Text

from orchestrator.facts import ReportStatus, Status
from orchestrator.views.numbers import amount, change, duration, number
from orchestrator.views.terminal import plain

GAP = "   "
NAME_LENGTH = 18
"""Of a name inside a line: an evaluation then fits into 50 columns."""
MOST_NAMED = 3
"""Envs that a line names; the others are counted."""
MOST_ALIKE = 4
"""Troubles of one kind that are told; the status has all of them."""
MOST_CHANGES = 4
MOST_REPORTED = 4
"""Numbers of the trainer that the display shows; the status has all of them."""
FAILED_SHARE = 0.1
"""From this share of failed rollouts on, the display tells what the last one said."""
LOW_DISK_BYTES = 2 * 1024**3


def facts(status: Status, width: int) -> Iterator[Text]:
    """The numbers of the run."""
    steps = f"{status.step}" if status.max_steps is None else f"{status.step}/{status.max_steps}"
    found = [
        Text.assemble(("step ", "dim"), (steps, "bold")),
        Text.assemble(("reward ", "dim"), (number(status.reward), "bold green")),
        Text.assemble(("version ", "dim"), f"{status.version}"),
        Text.assemble(("in flight ", "dim"), f"{status.inflight}/{status.limit}"),
        Text.assemble(("rollouts/s ", "dim"), f"{status.rollouts_per_s:.0f}"),
        Text.assemble(("tokens/s ", "dim"), amount(status.tokens_per_s)),
        Text.assemble(("queued ", "dim"), _queued(status)),
        Text(duration(status.seconds)),
    ]
    if status.eta_s is not None and status.state == "running":
        found.append(Text.assemble(("left ", "dim"), duration(status.eta_s)))
    found += [
        Text.assemble((f"{plain(name)} ", "dim"), f"{told.value:.4g}")
        for name, told in _shown(status.reports)
    ]
    return _in_lines(found, width)


def _queued(status: Status) -> str:
    """Sequences that wait, of those that a batch needs; more than a batch is told in batches."""
    if status.queued_sequences <= status.batch_size:
        return f"{status.queued_sequences}/{status.batch_size}"
    return f"{status.queued_sequences} ({status.queued_sequences / status.batch_size:.1f} batches)"


def health(status: Status) -> Text:
    """Inference servers and env servers in one line, with the envs that lack some."""
    healthy, engines = sum(endpoint.healthy for endpoint in status.endpoints), len(status.endpoints)
    ready = sum(env.servers_ready for env in status.envs.values())
    servers = sum(env.servers for env in status.envs.values())
    behind = [
        f"{_short(name)} {env.servers_ready}/{env.servers}"
        for name, env in status.envs.items()
        if env.servers_ready < env.servers
    ]
    told = f" ({_some(behind)})" if behind else ""
    return Text.assemble(
        (f"{healthy}/{engines} engines", "dim" if healthy == engines else "yellow"),
        (", ", "dim"),
        (f"{ready}/{servers} servers{told}", "yellow" if behind else "dim"),
    )


def changes(status: Status) -> Iterator[Text]:
    """What a person has changed while the run went on."""
    shown = status.changes[:MOST_CHANGES]
    yield from (Text(plain(f"by hand: {change}"), style="cyan") for change in shown)
    if len(status.changes) > MOST_CHANGES:
        yield Text(f"and {len(status.changes) - MOST_CHANGES} more changes by hand", style="cyan")


def evaluations(results: Iterable[Mapping[str, Any]], width: int) -> Iterator[Text]:
    """The last evaluation of each env, with its change against the one before."""
    by_env: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        by_env.setdefault(result["env"].removeprefix("eval-"), []).append(result)
    if not by_env:
        return iter(())
    return _in_lines([Text("evals", style="dim"), *(_evaluation(*item) for item in by_env.items())], width)


def _evaluation(env: str, results: list[Mapping[str, Any]]) -> Text:
    last = results[-1]
    name = f"avg@{last['k']}"
    score = last.get(name)
    before = [result[name] for result in results[:-1] if result.get(name) is not None]
    text = Text.assemble((f"{_short(env)} {name} ", "dim"), (number(score), "bold"))
    if score is not None and before:
        text.append(f" {change(score - before[-1])}", "green" if score >= before[-1] else "yellow")
    return text.append(f" (step {last['step']})", "dim")


def sources(status: Status) -> list[str]:
    """Where servers come from that are not listed, a line for each source."""
    return [
        f"{one.source} names {one.members} of {one.of}" + (f" ({one.trouble})" if one.trouble else "")
        for one in status.sources
    ]


def troubles(status: Status) -> list[str]:
    """What is not as it was asked for, a line each."""
    absent = [
        f'env "{name}" is missing from batches: {env.minimum_waived}'
        for name, env in status.envs.items()
        if env.minimum_waived
    ]
    failing = [
        f'env "{name}": {env.failed} of {env.failed + env.completed} rollouts did not end well, the last: {env.failure}'
        for name, env in status.envs.items()
        if env.failure and (env.quarantined or env.failed >= FAILED_SHARE * (env.failed + env.completed))
    ]
    lost = [
        f"inference server {endpoint.url}: {endpoint.error}"
        for endpoint in status.endpoints
        if endpoint.error and not endpoint.healthy
    ]
    silent = [f"source of {one.of}: {one.source}: {one.trouble}" for one in status.sources if one.trouble]
    lines = [line for found in (absent, failing, lost, silent) for line in _first(found)]
    lines += [
        f'tracker "{tracker.name}": {tracker.error}'
        + (f" ({tracker.lost} of {tracker.logged + tracker.lost} lines lost)" if tracker.lost else "")
        for tracker in status.trackers
        if tracker.error
    ]
    if status.disk_free_bytes is not None and status.disk_free_bytes < LOW_DISK_BYTES:
        lines.append(f"the disk of the run directory has {status.disk_free_bytes / 1e9:.1f} GB left")
    return [*lines, *filter(None, (status.refused, status.mismatch))]


def _first(lines: list[str]) -> list[str]:
    """The first ones, and how many there are like them."""
    more = len(lines) - MOST_ALIKE
    return lines if more <= 0 else [*lines[:MOST_ALIKE], f"and {more} more like this"]


def _shown(reports: Mapping[str, ReportStatus]) -> list[tuple[str, ReportStatus]]:
    """What the trainer reports, as far as there is room: the mismatch first, which says whether the data is right."""
    ordered = sorted(reports.items(), key=lambda entry: entry[0] != "logprob_mismatch")
    return ordered[:MOST_REPORTED]


def _in_lines(pieces: list[Text], width: int) -> Iterator[Text]:
    line = pieces[0]
    for piece in pieces[1:]:
        if line.cell_len + len(GAP) + piece.cell_len > width:
            yield line
            line = piece
        else:
            line = Text.assemble(line, GAP, piece)
    yield line


def _short(name: str) -> str:
    name = plain(name)
    return name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 1]}…"


def _some(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
