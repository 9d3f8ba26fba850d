"""The whole service against environments that only wait: how busy its slots are, what a rollout costs, how it scales.

Everything is real but the model: env server processes, ZMQ, journal, buffer, trainer link. CPU time is the
orchestrator process' own, everything included.
"""

import asyncio
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import structlog
import uvloop

from benchmarks.frame import Figure
from orchestrator.config import Config
from orchestrator.config.sections import InferenceConfig
from orchestrator.local.children import LocalChildren
from orchestrator.run import Run
from orchestrator.service import Service, start_service
from orchestrator.service.health import calm_garbage_collector


@dataclass(frozen=True, slots=True)
class Measured:
    """What one run showed."""

    busy: float
    cpu_per_rollout_s: float
    rollouts_per_s: float
    inflight: int
    lag_p50_s: float
    lag_p99_s: float
    rss_bytes: int


def figures(quick: bool = False) -> list[Figure]:
    """Run both cases."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    small = measure(
        inflight=256, latency_s=0.05, workers=1, batch_size=256, warm_s=3, for_s=5 if quick else 15
    )
    many = 8192 if quick else 65536
    large = measure(
        inflight=many,
        latency_s=many / 1500,
        workers=2,
        batch_size=1024,
        warm_s=many / 1500 * 1.5,
        for_s=10 if quick else 30,
    )
    return [
        Figure(
            "slots busy at 256 in flight, rollouts of 50 ms",
            100 * small.busy,
            "%",
            72,
            "a peer",
            "≥ 95 %",
            small.busy >= 0.95,
        ),
        Figure(
            "orchestrator CPU per rollout, everything included",
            1e6 * small.cpu_per_rollout_s,
            "µs",
            goal="< 150 µs",
            met=small.cpu_per_rollout_s < 150e-6,
        ),
        Figure("rollouts per second at 256 in flight", small.rollouts_per_s, "/s", 256 / 0.05, "ideal"),
        Figure("rollouts in flight", large.inflight, "", goal="65536", met=large.inflight >= 0.99 * 65536),
        Figure(f"loop lag p50 at {many} in flight", 1e3 * large.lag_p50_s, "ms"),
        Figure(
            f"loop lag p99 at {many} in flight",
            1e3 * large.lag_p99_s,
            "ms",
            goal="< 50 ms",
            met=large.lag_p99_s < 0.05,
        ),
        Figure(f"memory of the orchestrator at {many} in flight", large.rss_bytes / 2**20, "MiB"),
        Figure(f"CPU per rollout at {many} in flight", 1e6 * large.cpu_per_rollout_s, "µs"),
    ]


def measure(
    *, inflight: int, latency_s: float, workers: int, batch_size: int, warm_s: float, for_s: float
) -> Measured:
    """Run a service for a while and look at it."""
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
                        "args": {"latency_s": latency_s},
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
