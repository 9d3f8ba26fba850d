"""Do curricula waste fewer groups on equal rewards, does the policy learn from fewer rollouts, and what does a choice cost?

The learner is made up: a task is solved with the probability that the policy's skill and what it learned about this very
task have over the task's difficulty; a group teaches by how much its rewards differ, so one with equal rewards teaches
nothing. Difficulties are spread widely, and one task in ten cannot be solved at all. Tasks come from the real source, 32
groups at a time, and end in any order. The peer is no curriculum, once with groups of equal rewards in the batches and once
without them (the naive online filter).
"""

import asyncio
import math
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.frame import Effort, Figure, median_and_spread
from benchmarks.journal import open_journal
from orchestrator.curriculum import OUTCOMES, CurriculumSettings, Outcomes, TaskOutcome
from orchestrator.mix import build_mix
from orchestrator.tasks.source import SourceEnv, TrainSource
from orchestrator.tasks.task import TrainTask

GROUP_SIZE, BATCH_GROUPS, IN_FLIGHT = 8, 16, 32
SHARED, OWN = 0.002, 0.1
"""What a group teaches at most: about every task, and about its own."""
LOOK_EVERY = 10
MOST_GROUPS = 50_000


@dataclass(frozen=True, slots=True)
class Learned:
    """How a policy came to its goal: groups tried, those with equal rewards, and steps of its trainer."""

    groups: int
    equal: int
    steps: int
    reward: float

    @property
    def waste(self) -> float:
        return self.equal / self.groups


def source_of(
    strategy: str, num_tasks: int, seed: int, chosen: Callable[[str, int, int], None] = lambda *_: None
) -> TrainSource:
    mix = build_mix("weighted_round_robin", ["a"], [1.0], rng=random.Random(0))
    env = SourceEnv("a", "train", num_tasks, CurriculumSettings(strategy))
    return TrainSource([env], mix=mix, seed=seed, chosen=chosen)


def learn(
    strategy: str, seed: int, *, num_tasks: int = 2_000, goal: float = 0.6, keep_equal: bool = False
) -> Learned:
    """Train until the mean chance to solve a task is `goal`."""
    rng = random.Random(seed)
    difficulty = np.array([rng.gauss(2.5, 3.0) for _ in range(num_tasks)])
    difficulty[[rng.random() < 0.1 for _ in range(num_tasks)]] = 100.0
    own, skill = np.zeros(num_tasks), 0.0
    source = source_of(strategy, num_tasks, seed)
    flight: list[tuple[TrainTask, float]] = []
    batch: list[tuple[int, float]] = []
    groups = equal = steps = 0
    reward = 0.0
    while groups < MOST_GROUPS:
        while len(flight) < IN_FLIGHT:
            task = source.next_task()
            flight.append((task, _chance(skill + own[task.index] - difficulty[task.index])))
        task, chance = flight.pop(rng.randrange(IN_FLIGHT))
        rate = sum(rng.random() < chance for _ in range(GROUP_SIZE)) / GROUP_SIZE
        alike = rate in (0.0, 1.0)
        groups, equal = groups + 1, equal + alike
        source.ended(task, TaskOutcome(task.index, steps, rate, GROUP_SIZE, alike))
        source.resolve(task)
        if keep_equal or not alike:
            batch.append((task.index, math.sqrt(rate * (1.0 - rate))))
        if len(batch) == BATCH_GROUPS:
            for index, teaches in batch:
                skill += SHARED * teaches
                own[index] += OWN * teaches
            batch.clear()
            steps += 1
            if steps % LOOK_EVERY == 0:
                reward = float(np.mean(1.0 / (1.0 + np.exp(difficulty - skill - own))))
                if reward >= goal:
                    break
    return Learned(groups, equal, steps, reward)


def _chance(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-logit)) if logit > -50 else 0.0


def figures(effort: Effort) -> list[Figure]:
    seeds = range(effort.pick(9, 3, 1))
    tasks = effort.pick(2_000, 2_000, 200)
    plain = [learn("uniform", seed, num_tasks=tasks) for seed in seeds]
    kept = [learn("uniform", seed, num_tasks=tasks, keep_equal=True) for seed in seeds]
    found = [
        *_figures("uniform, equal rewards kept", kept, None),
        *_figures("uniform, equal rewards dropped", plain, None),
    ]
    for strategy in ("difficulty", "frontier"):
        found += _figures(strategy, [learn(strategy, seed, num_tasks=tasks) for seed in seeds], plain)
    number = effort.pick(1_000_000, 100_000, 1_000)
    for strategy in ("uniform", "difficulty", "frontier"):
        found += _costs(strategy, number, effort)
    return found


def _figures(name: str, learned: list[Learned], peers: list[Learned] | None) -> list[Figure]:
    """Groups wasted, rollouts and steps until the goal; the peer is the same seed without a curriculum."""
    found = []
    measures: list[tuple[str, str, Callable[[Learned], float], str | None, float]] = [
        ("groups with equal rewards", "%", lambda one: 100 * one.waste, "≤ half of uniform's", 0.5),
        ("rollouts until solved 60 %", "k", lambda one: one.groups * GROUP_SIZE / 1e3, "< uniform's", 1.0),
        ("trainer steps until then", "", lambda one: float(one.steps), None, math.inf),
    ]
    for what, unit, of, goal, factor in measures:
        value, spread = median_and_spread([of(one) for one in learned])
        if peers is None or goal is None:
            found.append(Figure(f"{name}: {what}", value, unit, spread=spread))
            continue
        peer, _ = median_and_spread([of(one) for one in peers])
        met = all(of(one) <= factor * of(other) for one, other in zip(learned, peers, strict=True))
        found.append(
            Figure(f"{name}: {what}", value, unit, peer, "uniform", goal=goal, met=met, spread=spread)
        )
    return found


def _costs(strategy: str, number: int, effort: Effort) -> list[Figure]:
    """CPU time of a decision among tasks that were all tried, and what a task takes of memory."""
    source = source_of(strategy, number, 0)
    outcomes = _tried(number)
    start = time.process_time()
    source.load_outcomes("a", outcomes)
    loading = time.process_time() - start
    rounds = effort.pick(1_000, 500, 20)
    deciding, learning = [], []
    stream = source._streams["a"]
    for _ in range(25):
        start = time.process_time()
        # Without the mix, which has figures of its own.
        tasks = [stream.next() for _ in range(rounds)]
        deciding.append((time.process_time() - start) / rounds * 1e6)
        start = time.process_time()
        for task in tasks:
            source.ended(task, TaskOutcome(task.index, 1, 0.5, 8, equal=False))
            source.resolve(task)
        learning.append((time.process_time() - start) / rounds * 1e6)
    decision, spread = median_and_spread(deciding)
    group, group_spread = median_and_spread(learning)
    statistics = source.statistics("a")
    beside = getattr(stream._strategy, "nbytes", 0)
    # Loading has moved every task from its first pool to the one that it belongs to.
    memory = (statistics.nbytes + beside) / number
    found = [
        Figure(
            f"{strategy}: a decision among {number:,} tasks",
            decision,
            "µs",
            goal="≤ 10 µs",
            met=decision <= 10,
            spread=spread,
        ),
        Figure(f"{strategy}: what a group taught", group, "µs", spread=group_spread),
        Figure(f"{strategy}: memory of a task", memory, "bytes", goal="≤ 64", met=memory <= 64),
        Figure(f"{strategy}: {number:,} outcomes read back", loading, "s"),
    ]
    if strategy != "uniform":
        found += _recorded_costs(strategy, number, outcomes, rounds)
    return found


def _tried(number: int) -> Outcomes:
    """An outcome of every task, in any order."""
    rng = np.random.default_rng(0)
    outcomes = np.zeros(number, OUTCOMES)
    outcomes["task"], outcomes["reward"] = rng.permutation(number), rng.integers(0, 9, number) / 8
    outcomes["rollouts"], outcomes["equal"] = 8, np.isin(outcomes["reward"], (0.0, 1.0))
    return outcomes


def _recorded_costs(strategy: str, number: int, outcomes: Outcomes, rounds: int) -> list[Figure]:
    """The same decision with its choice in a real journal: on the event loop, and in all until it is on disk."""

    async def measure(run_dir: Path) -> tuple[list[float], list[float]]:
        on_loop, in_all = [], []
        async with open_journal(run_dir) as journal:
            source = source_of(strategy, number, 0, journal.record_choice)
            source.load_outcomes("a", outcomes)
            stream = source._streams["a"]
            await journal.flush()
            for _ in range(25):
                whole, mine = time.process_time(), time.thread_time()
                tasks = [stream.next() for _ in range(rounds)]
                on_loop.append((time.thread_time() - mine) / rounds * 1e6)
                await journal.flush()
                in_all.append((time.process_time() - whole) / rounds * 1e6)
                for task in tasks:
                    source.ended(task, None)
                    source.resolve(task)
        return on_loop, in_all

    with tempfile.TemporaryDirectory(prefix="bc") as directory:
        on_loop, in_all = asyncio.run(measure(Path(directory)))
    loop, loop_spread = median_and_spread(on_loop)
    everything, spread = median_and_spread(in_all)
    return [
        Figure(
            f"{strategy}: a decision and the record of its choice, on the event loop",
            loop,
            "µs",
            goal="≤ 10 µs",
            met=loop <= 10,
            spread=loop_spread,
        ),
        Figure(f"{strategy}: until the choice is on disk, all threads", everything, "µs", spread=spread),
    ]
