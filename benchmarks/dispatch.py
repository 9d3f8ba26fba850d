"""The whole service against environments that only wait: how busy its slots are, what a rollout costs, how it scales.

Everything is real but the model: env server processes, ZMQ, journal, buffer, trainer link. CPU time is the
orchestrator process' own, everything included. Each case is a process of its own each time, so that neither its memory nor
what an earlier one left behind is another's; few and many in flight are measured in turns.
"""

import asyncio
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog
import uvloop

from benchmarks.frame import Effort, Figure, median_and_spread
from orchestrator.config import Config
from orchestrator.config.sections import InferenceConfig
from orchestrator.local.children import LocalChildren
from orchestrator.run import Run
from orchestrator.service import Service, start_service
from orchestrator.service.health import calm_garbage_collector

RATE = 1500
"""Rollouts a second where many in flight are held against few: what comes seldom wakes the loop more often per rollout."""


class Case(msgspec.Struct, frozen=True):
    """What the service is to do, and for how long it is looked at."""

    inflight: int
    latency_s: float
    workers: int
    batch_size: int
    warm_s: float
    for_s: float


class Measured(msgspec.Struct, frozen=True):
    """What one run showed; the memory is the largest of its process."""

    busy: float
    cpu_per_rollout_s: float
    rollouts_per_s: float
    inflight: int
    lag_p50_s: float
    lag_p99_s: float
    rss_bytes: int


def figures(effort: Effort = Effort.FULL) -> list[Figure]:
    """Run all cases."""
    rounds, many = effort.pick((3, 65536), (1, 8192), (1, 512))
    warm_s, for_s = effort.pick((3, 15), (3, 5), (1, 1))
    small_case = Case(256, 0.05, 1, 256, warm_s, for_s)
    few_case, large_case = (
        Case(
            inflight,
            inflight / RATE,
            2,
            1024,
            # Three times a rollout's time: by then what began together no longer ends together, and the rate is the same.
            max(warm_s, inflight / RATE * 3),
            effort.pick(30, 10, 1),
        )
        for inflight in (256, many)
    )
    small, few, large = list[Measured](), list[Measured](), list[Measured]()
    for number in range(rounds):
        small.append(measure_apart(small_case))
        # In turns, and the other way round the next time: what the machine does besides changes slowly.
        turns = ((few_case, few), (large_case, large))
        for case, found in turns if number % 2 == 0 else turns[::-1]:
            found.append(measure_apart(case))
    return [*_of_few(small), *_of_many(few, large, many)]


def _of_few(small: Sequence[Measured]) -> list[Figure]:
    busy, busy_spread = median_and_spread([100 * one.busy for one in small])
    cpu, cpu_spread = median_and_spread([1e6 * one.cpu_per_rollout_s for one in small])
    rate, rate_spread = median_and_spread([one.rollouts_per_s for one in small])
    return [
        Figure(
            "slots busy at 256 in flight, rollouts of 50 ms", busy, "%",
            goal="≥ 95 %", met=busy >= 95, spread=busy_spread,
        ),
        Figure(
            "orchestrator CPU per rollout, everything included", cpu, "µs",
            goal="≤ 100 µs", met=cpu <= 100, spread=cpu_spread,
        ),
        Figure("rollouts per second at 256 in flight", rate, "/s", 256 / 0.05, "ideal", spread=rate_spread),
    ]  # fmt: skip


def _of_many(few: Sequence[Measured], large: Sequence[Measured], many: int) -> list[Figure]:
    inflight, inflight_spread = median_and_spread([one.inflight for one in large])
    lag_p50, lag_p50_spread = median_and_spread([1e3 * one.lag_p50_s for one in large])
    lag, lag_spread = median_and_spread([1e3 * one.lag_p99_s for one in large])
    memory, memory_spread = median_and_spread([one.rss_bytes / 2**20 for one in large])
    cpu, cpu_spread = median_and_spread([1e6 * one.cpu_per_rollout_s for one in large])
    cpu_few, _ = median_and_spread([1e6 * one.cpu_per_rollout_s for one in few])
    return [
        Figure(
            "rollouts in flight", inflight, "",
            goal=str(many), met=inflight >= 0.99 * many, spread=inflight_spread,
        ),
        Figure(f"loop lag p50 at {many} in flight", lag_p50, "ms", spread=lag_p50_spread),
        Figure(
            f"loop lag p99 at {many} in flight", lag, "ms",
            goal="< 50 ms", met=lag < 50, spread=lag_spread,
        ),
        Figure(f"memory of the orchestrator at {many} in flight", memory, "MiB", spread=memory_spread),
        Figure(
            f"CPU per rollout at {many} in flight, {RATE} a second", cpu, "µs", cpu_few, "at 256 in flight",
            goal="≤ 1.2×", met=cpu <= 1.2 * cpu_few, spread=cpu_spread,
        ),
    ]  # fmt: skip


def measure_apart(case: Case) -> Measured:
    """Measure a case in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.dispatch"],
        input=msgspec.json.encode(case),
        check=True,
        stdout=subprocess.PIPE,
    )
    return msgspec.json.decode(done.stdout, type=Measured)


def measure(
    *,
    inflight: int,
    latency_s: float,
    workers: int,
    batch_size: int,
    warm_s: float,
    for_s: float,
    tokens: int = 64,
) -> Measured:
    """Run a service for a while and look at it; a rollout has so many tokens."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        config = Config(
            run_dir=Path(directory),
            batch={"size": batch_size},
            train={
                "group_size": 8,
                "env": [
                    {
                        "id": "benchmarks._sleepy:Sleepy",
                        "name": "sleepy",
                        "ratio": 1.0,
                        "workers": workers,
                        "capacity": inflight,
                        "args": {"latency_s": latency_s, "tokens": tokens},
                    }
                ],
            },
            dispatch={"max_inflight": inflight, "keep_equal_rewards": True, "ramp_s": warm_s / 3},
            staleness={"max_versions": 4 + 2 * inflight // batch_size},
            trainer={"bind": "tcp://127.0.0.1:0"},
            http={"enabled": False},
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_measure(config, warm_s, for_s))


async def _measure(config: Config, warm_s: float, for_s: float) -> Measured:
    result: list[Measured] = []
    async with LocalChildren(config.run_dir) as children:
        url = children.start_server(model=config.model.name, seed=0, latency_s=0.0)
        config = config.model_copy(update={"inference": InferenceConfig(base_urls=[url])})
        async with start_service(config) as service:
            trainer = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "benchmarks._trainer", service.server.address
            )
            calm_garbage_collector()
            try:
                await service.serve(_observe(service, warm_s, for_s, result))
            finally:
                trainer.terminate()
                await trainer.wait()
    return result[0]


async def _observe(service: Service, warm_s: float, for_s: float, result: list[Measured]) -> None:
    run = service.run
    await asyncio.sleep(warm_s)
    lags: list[float] = []
    busy: list[int] = []
    cpu, done, started = time.process_time(), _completed(run), time.monotonic()
    while time.monotonic() - started < for_s:
        before = time.monotonic()
        await asyncio.sleep(0.01)
        lags.append(max(0.0, time.monotonic() - before - 0.01))
        busy.append(run.parts.ledger.total_inflight)
    rollouts = _completed(run) - done
    lags.sort()
    result.append(
        Measured(
            busy=sum(busy) / len(busy) / service.pool.limit,
            cpu_per_rollout_s=(time.process_time() - cpu) / max(1, rollouts),
            rollouts_per_s=rollouts / (time.monotonic() - started),
            inflight=max(busy),
            lag_p50_s=lags[len(lags) // 2],
            lag_p99_s=lags[int(len(lags) * 0.99)],
            rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )
    )
    run.end("measured")
    service.driver.perform()


def _completed(run: Run) -> int:
    return int(run.parts.ledger.totals()["completed"])


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=Case)
    sys.stdout.buffer.write(msgspec.json.encode(measure(**msgspec.structs.asdict(asked))))
