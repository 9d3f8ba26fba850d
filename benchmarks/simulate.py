"""Whole runs in virtual time: how many rollouts of 20 envs the real rules decide about in a second."""

import resource
import time

from benchmarks.frame import Effort, Figure
from envs.logs import configure_logging
from orchestrator.config import Config
from orchestrator.service.health import calm_garbage_collector
from orchestrator.service.imagined import env_names, imagine
from orchestrator.simulate.behaviour import assumed, parse_behaviour

ENVS = 20
ROLLOUTS = 1_000_000


def figures(effort: Effort) -> list[Figure]:
    """A million rollouts, or fewer."""
    configure_logging("critical")
    calm_garbage_collector()
    rollouts = ROLLOUTS // effort.pick(1, 20, 500)
    began, cpu = time.perf_counter(), time.process_time()
    simulated = simulate(rollouts)
    took, used = time.perf_counter() - began, time.process_time() - cpu
    scale = ROLLOUTS / simulated
    million = f"a million rollouts of {ENVS} envs in virtual time"
    return [
        Figure(f"{rollouts:,} rollouts of {ENVS} envs, to the next full batch", took, "s"),
        Figure(million, took * scale, "s", goal="below 120 s", met=took * scale < 120),
        Figure(f"{million}, time of one core", used * scale, "s"),
        Figure("memory", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "MiB"),
    ]


def simulate(rollouts: int) -> int:
    """Simulate at least so many; returns how many there were."""
    envs = [{"id": "reverse", "name": f"env{number}", "ratio": 1.0} for number in range(ENVS)]
    config = Config(
        local={},
        batch={"size": 1024},
        train={"group_size": 16, "env": envs},
        dispatch={"max_inflight": 2048},
        staleness={"max_versions": 2},
    )
    around = assumed(env_names(config))
    stated = {
        name: {"latency_s": {"mean": 2.0 + number % 7}, "failure": 0.01, "tokens": {"mean": 400}}
        for number, name in enumerate(around.envs)
    }
    parse_behaviour({"env": stated, "trainer": {"step_s": 5.0}}, around)
    answer = imagine(config, around).once(0, steps=-(-rollouts // 1024), seconds=float("inf"))
    return sum(answer.outcomes.values())
