"""Whether a run that goes on for long stays as it was: `python -m benchmarks.endurance [--minutes 60] [--rate 5000]`.

The whole service with stub env servers, rollouts of 16 tokens, at a steady rate. Every so often: rollouts per second, memory,
file descriptors, and the lag of the event loop. At the end the last quarter is held against the second: the first has what
fills up once (caches, the archive's bounds, the memory of past steps). Exits with 1 where something has grown, or where the
rate was not kept: a service that does less than was asked says nothing about what was asked. The last lines, with the date
and the machine, are what docs/scaling.md shows.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from benchmarks._load import Load, run_under, warm_up
from benchmarks.report import Report, commit_of, make_report, this_machine, today
from benchmarks.runner import ROOT
from orchestrator.service import Service

TOKENS = 16
LATENCY_S = 0.4
KEPT = 0.97
"""Of the rate that was asked for; below it, it was not kept."""
MEMORY_GROWTH, LAG_GROWTH = 0.05, 2.0
"""How much more memory, and how many times the lag, still counts as flat."""


@dataclass(frozen=True, slots=True)
class Look:
    """What one part of the time showed."""

    rollouts_per_s: float
    memory_mib: float
    descriptors: int
    lag_p50_ms: float
    lag_p99_ms: float

    def __str__(self) -> str:
        return (
            f"{self.rollouts_per_s:7.0f} rollouts/s  {self.memory_mib:7.1f} MiB  {self.descriptors:4d} descriptors  "
            f"lag p50 {self.lag_p50_ms:5.2f} ms, p99 {self.lag_p99_ms:6.1f} ms"
        )


def endure(rate: int, every_s: float, times: int) -> list[Look]:
    """Run for `times` × `every_s` and look as often."""
    load = Load(inflight=round(rate * LATENCY_S), envs=4, tokens=TOKENS, rate=rate, for_s=every_s)
    return run_under(load, partial(_look, times=times))


async def _look(service: Service, load: Load, *, times: int) -> list[Look]:
    await warm_up(service, load)
    looks = []
    for number in range(times):
        looks.append(await _one(service, load.for_s))
        print(f"{(number + 1) * load.for_s / 60:6.1f} min  {looks[-1]}", flush=True)
    return looks


async def _one(service: Service, for_s: float) -> Look:
    ledger = service.run.parts.ledger
    done, began, lags = ledger.totals()["completed"], time.monotonic(), []
    while (before := time.monotonic()) - began < for_s:
        await asyncio.sleep(0.01)
        lags.append(max(0.0, time.monotonic() - before - 0.01))
    lags.sort()
    return Look(
        rollouts_per_s=(ledger.totals()["completed"] - done) / (time.monotonic() - began),
        memory_mib=_resident_mib(),
        descriptors=_descriptors(),
        lag_p50_ms=1e3 * lags[len(lags) // 2],
        lag_p99_ms=1e3 * lags[int(len(lags) * 0.99)],
    )


def _resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def grown(looks: list[Look]) -> list[str]:
    """What the last quarter has more of than the second."""
    quarter = max(1, len(looks) // 4)
    early, late = looks[quarter : 2 * quarter] or looks[:quarter], looks[-quarter:]

    def medians(name: str) -> tuple[float, float]:
        return tuple(statistics.median(getattr(look, name) for look in part) for part in (early, late))

    found = []
    memory, later_memory = medians("memory_mib")
    if later_memory > memory * (1 + MEMORY_GROWTH):
        found.append(f"memory: {memory:.1f} MiB, later {later_memory:.1f}")
    descriptors, later_descriptors = medians("descriptors")
    if later_descriptors > descriptors:
        found.append(f"file descriptors: {descriptors:g}, later {later_descriptors:g}")
    lag, later_lag = medians("lag_p99_ms")
    if later_lag > max(1.0, lag) * LAG_GROWTH:
        found.append(f"lag p99: {lag:.1f} ms, later {later_lag:.1f}")
    return found


def fallen_short(looks: list[Look], rate: int) -> list[str]:
    """Whether fewer rollouts ended than were asked for, over the whole time and in the last quarter."""
    quarter = max(1, len(looks) // 4)
    found = []
    for when, part in (("over all", looks), ("in the last quarter", looks[-quarter:])):
        mean = statistics.mean(look.rollouts_per_s for look in part)
        if mean < KEPT * rate:
            found.append(f"rate: {mean:.0f} rollouts/s {when}, {rate} were asked for")
    return found


def summary(looks: list[Look], rate: int, report: Report) -> str:
    """What came out, with where and when, as a page can show it."""
    middle = looks[len(looks) // 4 :] or looks
    median = {
        name: statistics.median(getattr(look, name) for look in middle)
        for name in ("rollouts_per_s", "memory_mib", "descriptors", "lag_p50_ms", "lag_p99_ms")
    }
    problems = fallen_short(looks, rate) + grown(looks)
    came = "kept, and flat: memory, file descriptors and lag" if not problems else "; ".join(problems)
    return (
        f"{rate:,} rollouts a second of {TOKENS} tokens: {came}. Medians behind the first quarter: "
        f"{median['rollouts_per_s']:,.0f} rollouts a second, {median['memory_mib']:.0f} MiB, {median['descriptors']:.0f} "
        f"descriptors, lag p50 {median['lag_p50_ms']:.1f} ms and p99 {median['lag_p99_ms']:.1f} ms.\n\n"
        f"Measured on {report.date} at {report.commit}: {report.circumstances}."
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.endurance", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (60)")
    parser.add_argument(
        "--rate", type=int, default=5000, help="rollouts per second that are asked for (5000)"
    )
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    effort = f"{arguments.minutes:g} minutes of"
    report = make_report({}, effort=effort, machine=this_machine(), commit=commit_of(ROOT), date=today())
    looks = endure(arguments.rate, min(60.0, arguments.minutes * 60 / 8), max(8, round(arguments.minutes)))
    print(f"\n{summary(looks, arguments.rate, report)}")
    return 1 if fallen_short(looks, arguments.rate) or grown(looks) else 0


if __name__ == "__main__":
    sys.exit(main())
