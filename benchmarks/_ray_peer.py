"""The peer: rollouts as calls of Ray, on a cluster of this machine alone. Runs inside the library's virtualenv.

Tasks return a rollout at once; calls of one asyncio actor return one after a pause, as an environment would. The driver keeps
so many under way with `ray.wait` in portions. CPU time is the driver's own, without the cluster's processes.
"""

# Its library is only in a virtualenv of its own.
# mypy: ignore-errors

import asyncio
import json
import os
import random
import sys
import time

import numpy as np
import ray

PORTION = 32


def make_rollout(tokens: int) -> tuple:
    ids = np.arange(tokens, dtype=np.int32)
    return ids, np.ones(tokens, np.uint8), np.full(tokens, -0.5, np.float32), 1.0


@ray.remote
def rollout(tokens: int) -> tuple:
    return make_rollout(tokens)


@ray.remote
class Environment:
    async def rollout(self, tokens: int, latency_s: float) -> tuple:
        await asyncio.sleep(latency_s * random.uniform(0.5, 1.5))
        return make_rollout(tokens)


def keep_inflight(start, inflight: int, count: int) -> dict[str, float]:
    """CPU seconds of the driver per rollout, and rollouts per second."""
    wall, cpu = time.perf_counter(), time.process_time()
    pending = [start() for _ in range(inflight)]
    started, done = inflight, 0
    while pending:
        # In portions: one by one, all that are ready, and asyncio each cost the driver half as much again.
        ready, pending = ray.wait(pending, num_returns=min(PORTION, len(pending)))
        for ids, _, _, _ in ray.get(ready):
            done += len(ids) > 0
        fresh = min(len(ready), count - started)
        pending += [start() for _ in range(fresh)]
        started += fresh
    assert done == count, f"{done} of {count} rollouts"
    return {
        "cpu_s": (time.process_time() - cpu) / count,
        "per_s": count / (time.perf_counter() - wall),
    }


def main() -> None:
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asked = json.load(sys.stdin)
    tokens, inflight, count = asked["tokens"], asked["inflight"], asked["count"]
    ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    actor = Environment.options(max_concurrency=inflight).remote()
    answer = {}
    for name, start in (
        ("task", lambda: rollout.remote(tokens)),
        ("actor", lambda: actor.rollout.remote(tokens, asked["latency_s"])),
    ):
        keep_inflight(start, inflight, 2 * inflight)
        answer |= {f"{name}_{key}": value for key, value in keep_inflight(start, inflight, count).items()}
    ray.shutdown()
    print(json.dumps(answer), file=channel, flush=True)


if __name__ == "__main__":
    main()
