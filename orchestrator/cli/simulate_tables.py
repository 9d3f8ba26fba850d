"""What `orchestrator simulate` prints: what was assumed, what the run does, and several configurations side by side."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from orchestrator.simulate.answers import Answer, Answers, ages_of, with_spread

if TYPE_CHECKING:
    from orchestrator.cli.simulate import Setting, SimulateResult
    from orchestrator.simulate.behaviour import Surroundings
    from orchestrator.simulate.sweep import Point

Number = Callable[[Answer], float | None]

FIGURES: dict[str, tuple[Number, str]] = {
    "steps per hour": (lambda one: one.steps_per_hour, ".1f"),
    "sequences per second": (lambda one: one.sequences_per_s, ".2f"),
    "tokens per second": (lambda one: one.tokens_per_s, ".0f"),
    "trainer busy": (lambda one: one.trainer, ".0%"),
    "engines busy": (lambda one: one.engines, ".0%"),
    "in flight": (lambda one: one.inflight, ".1f"),
    "queued sequences": (lambda one: one.queue, ".1f"),
    "queued at most": (lambda one: one.queue_max, ".0f"),
    "thrown away": (lambda one: one.thrown_away, ".1%"),
    "staleness, mean": (lambda one: one.staleness, ".2f"),
}
IN_BRIEF = {
    "sequences per second": "seq/s",
    "staleness, mean": "staleness",
    "thrown away": "thrown away",
    "trainer busy": "trainer",
    "engines busy": "engines",
}
SPREAD = ("sequences per second",)
"""Of those the ones whose spread over seeds has room in a line."""


def print_result(result: "SimulateResult", console: Console | None = None) -> None:
    """All of it."""
    console = console or Console()
    for names, around in _alike(result.settings):
        print_surroundings(around, console, names if len(result.settings) > 1 else "")
    for note in result.notes:
        console.print(f"note: {escape(note)}", highlight=False)
    if result.swept or len(result.points) > 4:
        print_points(result.points, console)
    else:
        print_columns(result.points, result.recorded, console)
    for one in result.refused:
        console.print(f"not simulated: {escape(f'{one.name}: {one.reason}')}", highlight=False)


def print_surroundings(around: "Surroundings", console: Console, of: str = "") -> None:
    """How everything behaves, with a mark at what nobody said."""
    table = Table(title=f"how rollouts go{of and f': {escape(of)}'}", title_justify="left")
    for heading in ("env", "latency, s", "failures", "tokens", "sequences", "equal rewards"):
        table.add_column(heading, justify="left" if heading == "env" else "right")
    rows, lines = _told(around)
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
    for line in lines:
        console.print(escape(line), highlight=False)


def _alike(settings: "Sequence[Setting]") -> "list[tuple[str, Surroundings]]":
    """Surroundings that are told in the same words, with the names of the configurations that have them."""
    found: dict[object, tuple[list[str], Surroundings]] = {}
    for setting in settings:
        names, _ = found.setdefault(_told(setting.around), ([], setting.around))
        names.append(setting.name)
    return [(", ".join(names), around) for names, around in found.values()]


def _told(around: "Surroundings") -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """The rows of the envs, and the lines below them."""
    rows = []
    for name, env in around.envs.items():
        cells = [name]
        for key, shape in (
            ("latency_s", "{}"),
            ("failure", "{:.1%}"),
            ("tokens", "{}"),
            ("sequences", "{}"),
            ("equal_rewards", "{:.0%}"),
        ):
            value = env.values[key]
            cells.append(shape.format(getattr(value, "text", value)) + _mark(env.origins[key]))
        rows.append(tuple(cells))
    lines = [
        f"a step of the trainer, s: {around.step_s.text}{_mark(around.origins['trainer.step_s'])}",
        f"loading a version, s: {around.update_s.text}{_mark(around.origins['weights.update_s'])}",
        "engines: as fast with many rollouts as with few*",
    ]
    if around.tokens_per_s:
        speeds = ", ".join(f"{speed:g} at {running:g}" for running, speed in around.tokens_per_s)
        lines[-1] = f"tokens per second of an engine, by rollouts at once: {speeds}"
    if any(text.endswith("*") for text in [*lines, *(cell for row in rows for cell in row)]):
        lines.append("* assumed: neither stated (--behaviour) nor recorded (--from)")
    return tuple(rows), tuple(lines)


def _mark(origin: str) -> str:
    return "*" if origin == "assumed" else ""


def print_columns(points: "Sequence[Point]", recorded: Answer | None, console: Console) -> None:
    """A few configurations with everything about each; the recorded run stands first."""
    columns = [(point.name, point.answers) for point in points]
    if recorded is not None:
        columns = [("recorded", Answers([recorded])), *columns]
    seeds = len(points[0].answers.each)
    spread = f", mean ± standard deviation of {seeds} seeds" if seeds > 1 else ""
    table = Table(title=f"what the run does{spread}", title_justify="left")
    table.add_column("")
    for name, _ in columns:
        table.add_column(escape(name), justify="right")
    for heading in FIGURES:
        table.add_row(heading, *(figure(answers, heading) for _, answers in columns))
    parts: tuple[tuple[str, Callable[[Answer], Mapping[str, float]]], ...] = (
        ("time: ", lambda one: one.time),
        ("of age ", ages_of),
        ("dropped: ", _per_rollout),
        ("in quarantine: ", lambda one: one.quarantined),
    )
    for title, numbers in parts:
        told = [shares(answers, numbers, ".1%") for _, answers in columns]
        for name in dict.fromkeys(name for cells in told for name in cells):
            table.add_row(f"{title}{escape(name)}", *(cells.get(name, "0.0%") for cells in told))
    console.print(table)
    print_shares(columns, console)


def print_shares(columns: Sequence[tuple[str, Answers]], console: Console) -> None:
    """What each delivers of each env, beside the targets, which configurations may have of their own."""
    targets = [answers.each[0].targets for _, answers in columns]
    told = [shares(answers, lambda one: one.shares, ".3f") for _, answers in columns]
    common = all(table == targets[0] for table in targets)
    table = Table(title="delivered share", title_justify="left")
    table.add_column("env")
    if common:
        table.add_column("target", justify="right")
    for name, _ in columns:
        if not common:
            table.add_column(escape(f"{name}, target"), justify="right")
        table.add_column(escape(name), justify="right")
    for env in dict.fromkeys(env for target in targets for env in target):
        cells = [f"{targets[0][env]:.3f}"] if common else []
        for target, delivered in zip(targets, told, strict=True):
            here = env in target
            if not common:
                cells.append(f"{target[env]:.3f}" if here else "–")
            cells.append(delivered.get(env, f"{0.0:.3f}") if here else "–")
        table.add_row(escape(env), *cells)
    console.print(table)


def print_points(points: "Sequence[Point]", console: Console) -> None:
    """Many configurations, a line each; the best ones are marked."""
    seeds = len(points[0].answers.each)
    table = Table(title=f"what each does, mean ± standard deviation of {seeds} seed(s)", title_justify="left")
    for key in points[0].values:
        table.add_column(escape(key.rpartition(".")[2]), justify="right", overflow="fold")
    for heading in IN_BRIEF.values():
        table.add_column(heading, justify="right")
    table.add_column("")
    for point in points:
        cells = [figure(point.answers, heading, spread=heading in SPREAD) for heading in IN_BRIEF]
        table.add_row(*map(escape, point.values.values()), *cells, "●" if point.best else "")
    console.print(table)
    console.print("● no other one is faster and as fresh, or fresher and as fast", highlight=False)


def figure(answers: Answers, heading: str, *, spread: bool = True) -> str:
    """A number with its spread over the seeds, where there are several."""
    number, shape = FIGURES[heading]
    mean = answers.mean(number)
    if mean is None:
        return "–"
    return with_spread(answers, mean, answers.deviation(number), shape) if spread else f"{mean:{shape}}"


def shares(answers: Answers, numbers: Callable[[Answer], Mapping[str, float]], shape: str) -> dict[str, str]:
    """Several numbers that have names, in the same way."""
    spreads = answers.spreads(numbers)
    return {
        name: with_spread(answers, mean, spreads[name], shape)
        for name, mean in answers.table(numbers).items()
    }


def _per_rollout(answer: Answer) -> dict[str, float]:
    """What was dropped, as shares of all rollouts that ended."""
    total = sum(answer.outcomes.values()) or 1
    return {reason: n / total for reason, n in answer.dropped.items()}
