"""Looks for valid configurations with which a run does not end: `python -m tests.integration.liveness_search --seed 1`.

Every seed is one small run with real processes, drawn over group sizes, batch sizes, minimums, quotas, tokens, pace and
drop, caps, rates, capacities, workers, evaluations, kills of the orchestrator and of env servers. A configuration that
is refused must say why. What fails stays in the directory, with its configuration; the seed repeats it.
"""

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from orchestrator.config import load_config
from orchestrator.errors import ConfigError
from tests.integration.liveness import Chaos, Experiment, LivenessError, configuration, drawn


def draw_env(rng: random.Random, number: int, batch: int) -> dict[str, Any]:
    """One training environment."""
    slow = rng.choice([0.0, 0.01, 0.05, 0.3])
    args: dict[str, Any] = {
        "latency_s": [0.0, slow],
        "busy": rng.choice([0.0, 0.0, 0.1]),
        "broken": rng.choice([0.0, 0.0, 0.05]),
        "sequences": rng.choice([[1, 1], [1, 1], [1, 2], [1, 4], [2, 3]]),
    }
    if rng.random() < 0.15:
        args["tasks"] = rng.choice([1, 3, 40])
    settings: dict[str, Any] = {"group_size": rng.choice([1, 2, 3, 4, 4, 5, 7, 8, 17])}
    settings["group_size"] = min(settings["group_size"], batch)
    if settings["group_size"] * args["sequences"][1] > batch:
        # Groups that are nearly always larger than the batch end a run, and rightly.
        args["sequences"] = [1, 1]
    if rng.random() < 0.4:
        settings["min_batch_allocation"] = rng.choice([0.05, 0.1, 0.25, 0.4, 0.5])
    if rng.random() < 0.2:
        settings["on_unmet_minimum"] = "wait"
    if rng.random() < 0.3:
        settings["max_inflight"] = rng.choice([1, 2, 5, 16])
    if rng.random() < 0.15:
        settings["rollouts_per_minute"] = rng.choice([600, 2000])
    if rng.random() < 0.4:
        settings["capacity"] = rng.choice([1, 3, 16, 400])
    if rng.random() < 0.15:
        settings["workers"] = rng.choice([2, 3])
    return drawn(f"env{number}", grouped=rng.random() < 0.2, args=args, max_restarts=50, **settings)


def draw(seed: int) -> tuple[dict[str, Any], Chaos]:
    """A configuration and what is done to its run."""
    rng = random.Random(seed)
    size = rng.choice([4, 8, 12, 16, 16, 24, 32, 64])
    count = rng.choice([1, 2, 2, 3])
    envs = [draw_env(rng, number, size) for number in range(count)]
    for env in envs:
        env["ratio"] = rng.choice([0.2, 0.5, 1.0])
    if count > 1 and rng.random() < 0.2:
        rng.choice(envs)["ratio"] = 0
    batch: dict[str, Any] = {"size": size, "on_stuck": rng.choice(["split", "split", "wait"])}
    batch["stuck_after_s"] = rng.choice([0.2, 10])
    if rng.random() < 0.2:
        batch |= {"unit": "tokens", "size": size * 120}
    elif rng.random() < 0.25:
        batch |= {"quotas": True, "on_starved": rng.choice(["redistribute", "wait"])}
    if rng.random() < 0.3:
        batch["max_buffered"] = rng.choice([1, 1.5, 3])
    dispatch: dict[str, Any] = {
        "ramp_s": rng.choice([0.0, 1.0]),
        "backoff_s": 0.01,
        "max_inflight": rng.choice([1, 4, 32, 256, 512]),
        "keep_equal_rewards": rng.random() < 0.5,
    }
    if dispatch["max_inflight"] < 32:
        for env in envs:  # one after the other they must not take long
            env["args"]["latency_s"] = [0.0, min(0.02, env["args"]["latency_s"][1])]
    if rng.random() < 0.15:
        dispatch["min_valid"] = rng.choice([1, 2])
    if rng.random() < 0.15:
        dispatch["extra_rollouts"] = rng.choice([1, 3])
    sections: dict[str, Any] = {
        "max_steps": rng.randint(6, 10),
        "seed": seed,
        "batch": batch,
        "dispatch": dispatch,
        "staleness": {"max_versions": rng.randint(0, 4), "mode": rng.choice(["pace", "pace", "drop"])},
        "local": {"trainer": rng.random() < 0.25},
        "mix": {"strategy": rng.choice(["flow", "flow", "adaptive", "weighted_round_robin"])},
    }
    if rng.random() < 0.2:
        sections["journal"] = {"max_backlog_bytes": rng.choice([1, 1000])}
    if rng.random() < 0.3:
        interval = rng.choice([1, 2, 5])
        table = drawn("examination", args={"latency_s": [0.0, 0.1], "tasks": 20, "broken": 0.1})
        table["capacity"] = rng.choice([1, 8, 256])
        sections["eval"] = {
            "interval": interval,
            "num_examples": rng.choice([1, 7]),
            "rollouts_per_example": rng.choice([1, 3]),
            "env": [table],
        }
    if not sections["local"]["trainer"] and rng.random() < 0.15:
        sections["trainer"] = {"world_size": rng.choice([2, 3])}
    chaos = Chaos(rng)
    if rng.random() < 0.3:
        chaos.orchestrator = rng.choice([1, 2])
    if rng.random() < 0.3:
        chaos.servers = rng.choice([1, 3])
    # By a generator of its own, so that every other choice of a seed stays what it was.
    strategy = random.Random(f"curriculum {seed}").choice(["uniform", "difficulty", "frontier"])
    return configuration(envs, **sections, curriculum={"strategy": strategy}), chaos


async def try_seed(seed: int, directory: Path, bound_s: float) -> str:
    """How a seed ended: "ok", "refused: why", or what went wrong."""
    place = directory / f"seed-{seed}"
    place.mkdir(parents=True)
    values, chaos = draw(seed)
    experiment = Experiment(place, values, bound_s=bound_s)
    try:
        load_config(experiment.config)
    except ConfigError as error:
        shutil.rmtree(place)
        return f"refused: {error}"
    began = time.monotonic()
    try:
        await experiment.run(chaos)
    except LivenessError as error:
        (place / "failure.txt").write_text(str(error), encoding="utf-8")
        return str(error).splitlines()[0]
    except Exception as error:  # noqa: BLE001  whatever it is, the search goes on
        (place / "failure.txt").write_text(repr(error), encoding="utf-8")
        return f"{type(error).__name__}: {error}"
    shutil.rmtree(place)
    return f"ok in {time.monotonic() - began:.1f} s"


async def main(first: int, count: int, side_by_side: int, directory: Path, bound_s: float) -> int:
    """Try seeds side by side; how many failed."""
    seeds = iter(range(first, first + count))
    failed = 0

    async def work() -> None:
        nonlocal failed
        for seed in seeds:
            ended = await try_seed(seed, directory, bound_s)
            failed += not ended.startswith(("ok", "refused: "))
            print(json.dumps({"seed": seed, "ended": ended}), flush=True)  # noqa: T201  it is a command

    async with asyncio.TaskGroup() as group:
        for _ in range(side_by_side):
            group.create_task(work())
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--side-by-side", type=int, default=2)
    parser.add_argument("--bound-s", type=float, default=90.0)
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    where = options.directory or Path(tempfile.mkdtemp(prefix="liveness-"))
    sys.exit(
        bool(asyncio.run(main(options.seed, options.count, options.side_by_side, where, options.bound_s)))
    )
