"""Runs for real whose time goes into waiting, to be held against what `orchestrator simulate` says of them.

`Sleeper` is an environment that sleeps, with a draw of its own for every rollout or one for the whole group; the trainer sleeps too, and publishes
the same weights under ever new versions. CPU is hardly needed, so that a busy machine changes little.
"""

import argparse
import asyncio
import itertools
import math
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envs import Environment, Model, Rollout, Task, Tasks
from envs.errors import RolloutFailure
from orchestrator.cli import simulate as command
from orchestrator.cli.simulate import SimulateResult
from orchestrator.local.policy import Policy
from orchestrator.service.recordings import read_recording
from orchestrator.simulate.answers import Answer, Answers, answer_of_recording
from orchestrator.trainer import TrainerClient
from tests.integration.envs_for_tests import Endless, dice_rollout
from tests.integration.service_fixture import Command, write_config

STARTED = "run.started"


class Sleeper(Environment):
    """Sleeps for a log-normal time, as long for every rollout of a task with `alike`; a share `fails`, a share `hangs`."""

    def __init__(
        self,
        *,
        median_s: float = 0.3,
        spread: float = 0.5,
        alike: bool = False,
        fails: float = 0.0,
        hangs: float = 0.0,
        equal: float = 0.0,
    ) -> None:
        self._median_s, self._spread, self._alike = median_s, spread, alike
        self._fails, self._hangs, self._equal = fails, hangs, equal

    def tasks(self, split: str) -> Tasks:
        return Endless()

    async def rollout(self, task: Task, model: Model) -> Rollout:
        own = random.Random(task["index"]) if self._alike else random.Random()
        seconds = self._median_s * math.exp(own.gauss(0, self._spread))
        if random.random() < self._hangs:
            seconds += 60
        await asyncio.sleep(seconds)
        if random.random() < self._fails:
            raise RolloutFailure("sandbox_busy", "no sandbox is free", retryable=True)
        rollout = dice_rollout(task["index"])
        if random.Random(task["index"]).random() < self._equal:
            rollout.reward = 0.5
        return rollout


def sleeper(name: str, ratio: float = 1.0, **arguments: Any) -> dict[str, Any]:
    """A [[train.env]] table with one."""
    own = ("rollout_timeout_s", "min_batch_allocation")
    settings: dict[str, Any] = {key: arguments.pop(key) for key in own if key in arguments}
    return {"id": f"{__name__}:Sleeper", "name": name, "ratio": ratio, "args": arguments, **settings}


@dataclass(slots=True)
class Paced:
    """A trainer in a thread that takes its time for every batch."""

    address: str
    weights: Path
    step_s: float
    steps: int
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def _train(self) -> None:
        path = str(Policy().save(self.weights).resolve())
        with TrainerClient(self.address) as trainer:
            for batch in trainer:
                time.sleep(self.step_s)
                trainer.publish(version=batch.step, path=path)

    async def wait(self) -> None:
        await asyncio.to_thread(self._thread.join)


@dataclass(frozen=True, slots=True)
class Trial:
    """A configuration to be run: its sections, and how long the trainer takes for a step."""

    name: str
    envs: list[dict[str, Any]]
    step_s: float
    steps: int = 40
    sections: dict[str, Any] = field(default_factory=dict)

    def write(self, directory: Path) -> Path:
        """The configuration file."""
        directory.mkdir(parents=True, exist_ok=True)
        values: dict[str, Any] = {
            "run_dir": str(directory / "run"),
            "max_steps": self.steps,
            "local": {"trainer": False},
            "batch": {"size": 32},
            "train": {"group_size": 4, "env": self.envs, "sampling": {"max_tokens": 4}},
            "dispatch": {"max_inflight": 24, "ramp_s": 0.0},
            "trainer": {"bind": f"ipc://{directory / 'trainer.sock'}"},
            "http": {"enabled": False},
            "log": {"format": "json"},
        }
        for name, section in self.sections.items():
            values[name] = {**values.get(name, {}), **section}
        return write_config(directory / "config.toml", values)


async def run_for_real(trial: Trial, directory: Path) -> Path:
    """Run it to its end; returns its configuration, whose run directory has the recording."""
    config = trial.write(directory)
    async with await Command.start("run", config, logs=directory / "logs") as process:
        await process.wait_event(STARTED)
        trainer = Paced(
            f"ipc://{directory / 'trainer.sock'}", directory / "weights", trial.step_s, trial.steps
        )
        await process.wait()
        await trainer.wait()
        assert process.process.returncode == 0, process.errors()[-3000:]
    return config


def simulated(config: Path, run_dir: Path, *, steps: int, sweep: tuple[str, ...] = ()) -> SimulateResult:
    """What `orchestrator simulate CONFIG --from RUN_DIR` says."""
    parser = argparse.ArgumentParser()
    command.register(parser.add_subparsers())
    words = ["simulate", str(config), "--from", str(run_dir), "--steps", str(steps)]
    for text in sweep:
        words += ["--sweep", text]
    return command.simulate(parser.parse_args(words))


def recorded(run_dir: Path) -> Answer:
    """What a run itself did."""
    recording = read_recording(run_dir)
    return answer_of_recording(recording.steps, sequences_per_rollout=recording.sequences_per_rollout)


FLOORS = {"speed": 0.0, "staleness": 0.05, "mix": 0.02}
"""Differences that count as none: in sequences per second, in versions, in shares of one env."""


def off(real: Answer, imagined: Answers) -> dict[str, float]:
    """How far the simulation is off, as a share of what the run had: in speed, in staleness, and in each env's share of the batches."""
    shares = imagined.table(lambda one: one.shares)
    return {
        "speed": _off(imagined.mean(lambda one: one.sequences_per_s), real.sequences_per_s, FLOORS["speed"]),
        "staleness": _off(imagined.mean(lambda one: one.staleness), real.staleness, FLOORS["staleness"]),
        **{
            f"share of {name}": _off(shares.get(name), share, FLOORS["mix"])
            for name, share in real.shares.items()
        },
    }


def _off(said: float | None, real: float, floor: float) -> float:
    difference = (said or 0.0) - real
    if abs(difference) <= floor:
        return 0.0
    return difference / real if real else math.copysign(math.inf, difference)


def pairs_apart(speeds: Mapping[str, tuple[float, float]], by: float) -> list[tuple[str, str]]:
    """Settings that differ by more than a share for real, the slower one first; `speeds` are real and said."""
    ordered = sorted(speeds, key=lambda name: speeds[name][0])
    return [
        (slow, fast)
        for slow, fast in itertools.combinations(ordered, 2)
        if speeds[fast][0] > (1 + by) * speeds[slow][0]
    ]
