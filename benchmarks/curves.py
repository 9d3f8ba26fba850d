"""What a rollout costs the orchestrator as a run grows in one direction: `python -m benchmarks.curves [--quick]`.

Six directions, the others kept as they are: rollouts in flight, environments, queued groups, endpoints, transcripts, ranks of the
trainer. CPU time of the orchestrator's process, all its threads included, per rollout. The buffer and the trainer link are
measured alone, the rest with the whole service (`_load`). Writes a picture of each into docs/curves, and a table into
docs/scaling.md between two marks; nothing else there is touched.
"""

import argparse
import asyncio
import logging
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from benchmarks._curve_plot import draw, measured
from benchmarks._load import Cost, Load, cost_of
from benchmarks.buffer import SIZES, time_takes
from benchmarks.report import commit_of, make_report, this_machine, today
from benchmarks.runner import ROOT
from benchmarks.trainer_ranks import deliver

DOCS = Path(__file__).parent.parent / "docs"
BEGIN, END = "<!-- curves: written by make bench-plots -->", "<!-- end of the curves -->"
BATCH = 1024
IN_FLIGHT_RATE = 2500
LONG_S = 10.0
UNIT = "µs of CPU per rollout"


@dataclass(frozen=True, slots=True)
class Curve:
    """One direction: where it is measured, how, and in one sentence what grows and why."""

    name: str
    along: str
    points: tuple[int, ...]
    quick: tuple[int, ...]
    cost_us: Callable[[int, bool], tuple[float, float]]
    """Where it was really measured, and what was found."""
    says: str


def in_flight(point: int, quick: bool) -> tuple[float, float]:
    # At a higher rate than the others, or the largest would take an hour until groups end as they begin.
    cost = _cost(Load(inflight=point, rate=IN_FLIGHT_RATE), quick)
    return cost.inflight, cost.cpu_us


def envs(point: int, quick: bool) -> tuple[float, float]:
    return point, _cost(Load(envs=point), quick).cpu_us


def endpoints(point: int, quick: bool) -> tuple[float, float]:
    return point, _cost(Load(endpoints=point), quick).cpu_us


def transcripts(point: int, quick: bool) -> tuple[float, float]:
    return point, _cost(Load(inflight=256, transcript_bytes=point), quick).cpu_us


def queued(point: int, quick: bool) -> tuple[float, float]:
    """Of the buffer alone: a group's way in, and its part of the batch that it leaves with."""
    sizes = SIZES["7,8"]
    rounds = [
        time_takes(BATCH, sizes, point, 5 if quick else 30)
        for _ in range(1 if quick or point > 100_000 else 3)
    ]
    take_ms, add_us = (statistics.median(values) for values in zip(*rounds, strict=True))
    return point, float(1e3 * take_ms / BATCH + add_us / statistics.mean(sizes))


def ranks(point: int, quick: bool) -> tuple[float, float]:
    """Of the trainer link alone: a batch of 512 sequences of up to 2,048 tokens, from its offer to its last rank."""
    sequences = 64 if quick else 512
    _, cpu = asyncio.run(deliver(point, sequences, 2048))
    return point, 1e6 * statistics.median(cpu) / sequences


CURVES = (
    Curve(
        "in_flight",
        "rollouts in flight",
        (256, 1024, 4096, 16_384, 65_536, 262_144),
        (64, 256),
        in_flight,
        "What is in flight lies in dictionaries, so a start and an end cost the same however many there are; what grows is "
        "memory, and with it what each touch of it costs the processor's caches.",
    ),
    Curve(
        "envs",
        "environments, with 1,024 rollouts in flight",
        (1, 8, 32, 100, 200),
        (1, 4),
        envs,
        "Before a group is started every environment is asked whether it may have one more (its limits, its room, its part of the "
        "backlog), which is what grows; and each has links of its own, so that the same messages come in smaller portions.",
    ),
    Curve(
        "queued",
        "groups queued in the buffer, which is measured alone",
        (1_000, 10_000, 100_000, 1_000_000),
        (100, 1_000),
        queued,
        "The buffer has a lane for every env and size and takes from its front, so forming a batch touches what it takes and not what "
        "stays.",
    ),
    Curve(
        "endpoints",
        "inference servers, with 1,024 rollouts in flight",
        (1, 8, 32, 128),
        (1, 4),
        endpoints,
        "A group goes to the endpoint with the most room, for which all are looked at, once per group: little beside the rest.",
    ),
    Curve(
        "transcripts",
        "bytes of a transcript, with 256 rollouts in flight",
        (1_000, 16_000, 128_000, 1_000_000),
        (1_000, 10_000),
        transcripts,
        "What is said is received, recorded in the journal and compressed for the archive, as far as that keeps it, so that long "
        "transcripts cost by their length.",
    ),
    Curve(
        "ranks",
        "ranks of the trainer, whose link is measured alone",
        (1, 4, 16, 64),
        (1, 2),
        ranks,
        "A batch is cut once, and every rank asks and acknowledges for itself, so what grows is these messages and not the bytes.",
    ),
)


def measure(curve: Curve, quick: bool) -> list[tuple[float, float]]:
    """The points of a curve, told while they come."""
    found = []
    for point in curve.quick if quick else curve.points:
        started = time.monotonic()
        at, cost = curve.cost_us(point, quick)
        print(
            f"{curve.name} {at:,}: {measured(cost)} {UNIT} ({time.monotonic() - started:.0f} s)", flush=True
        )
        found.append((at, cost))
    return found


def table(found: Sequence[tuple[Curve, Sequence[tuple[float, float]]]]) -> str:
    """What stands between the marks."""
    lines = []
    for curve, points in found:
        heads = " | ".join(f"{at:,.0f}" for at, _ in points)
        costs = " | ".join(measured(cost) for _, cost in points)
        lines += [
            f"![{UNIT} by {curve.along}](curves/{curve.name}.svg)",
            "",
            f"| {curve.along} | {heads} |",
            "|---" * (len(points) + 1) + "|",
            f"| {UNIT} | {costs} |",
            "",
            curve.says,
            "",
        ]
    return "\n".join(lines)


def write(
    docs: Path, found: Sequence[tuple[Curve, Sequence[tuple[float, float]]]], circumstances: str
) -> None:
    """The pictures, and the table in its place, with when and where it was measured."""
    page = docs / "scaling.md"
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page} lacks the line {BEGIN!r} or, behind it, {END!r}")
    (docs / "curves").mkdir(exist_ok=True)
    for curve, points in found:
        picture = draw(f"Cost of a rollout by {curve.along}", curve.along, UNIT, points)
        (docs / "curves" / f"{curve.name}.svg").write_text(picture, encoding="utf-8")
    page.write_text(f"{before}{BEGIN}\n\n{table(found)}{circumstances}\n{END}{after}", encoding="utf-8")


def _cost(load: Load, quick: bool) -> Cost:
    """The middle one of three, but once where rollouts take so long that it would be a matter of hours."""
    rounds = 1 if quick or load.latency_s > LONG_S else 3
    costs = [cost_of(replace(load, for_s=1.0 if quick else 8.0)) for _ in range(rounds)]
    return sorted(costs, key=lambda cost: cost.cpu_us)[rounds // 2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two small points of each, to see that it works")
    parser.add_argument(
        "--only", choices=[curve.name for curve in CURVES], help="print one curve and write nothing"
    )
    parser.add_argument("--docs", type=Path, default=DOCS, help="where scaling.md is (default: docs)")
    arguments = parser.parse_args()
    # Hundreds of ranks come and go, each with a line.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    chosen = [curve for curve in CURVES if arguments.only in (None, curve.name)]
    # Before: the load is that of the machine, not of what is measured.
    effort = "quick" if arguments.quick else "full"
    report = make_report({}, effort=effort, machine=this_machine(), commit=commit_of(ROOT), date=today())
    found = [(curve, measure(curve, arguments.quick)) for curve in chosen]
    if arguments.only is None:
        write(
            arguments.docs,
            found,
            f"Measured on {report.date} at {report.commit}: {report.circumstances}.",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
