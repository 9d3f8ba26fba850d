"""Which example next: a seeded, endlessly reshuffling stream of tasks per environment.

Without a curriculum a stream is a pure function: the task at a position depends on the seed, the env, its split and the
position, and on nothing else, so other envs, restarts and the order of completion do not change it. With one, a fixed
share of the positions (`explore`) goes through all tasks in that same order, so that none is left out for ever, and
the strategy picks the others from what is known about the tasks. Such a choice is noted when it is made (`chosen`): a
position keeps its task until it is resolved, over retries and restarts. Every position handed out is either resolved once (trained on, filtered, given up) or asked
again. What is saved per env is the low-water mark, below which everything is resolved, and the resolved
positions above it: after a restart the gaps are asked again first, then the stream goes on. Which env comes next
is the mix strategy's decision.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.curriculum import (
    UNIFORM,
    Chance,
    CurriculumSettings,
    CurriculumStrategy,
    Notable,
    Outcomes,
    TaskOutcome,
    TaskStatistics,
    build_curriculum,
)
from orchestrator.errors import ConfigError
from orchestrator.mix.breaker import CircuitBreaker
from orchestrator.tasks.permutation import Permutation, digest
from orchestrator.tasks.task import TrainTask

# Where the stream of an env without an end starts, so that two seeds do not see the same tasks.
_LARGEST_OFFSET = 2**31

# Between the keys of two positions' choices: odd, and far from what `Chance` itself goes on by.
_STRIDE = 0xD1342543DE82EF95


@dataclass(frozen=True, slots=True)
class SourceEnv:
    """An env that tasks are drawn from. `num_tasks` is None if its tasks have no end."""

    name: str
    split: str
    num_tasks: int | None
    curriculum: CurriculumSettings = UNIFORM


class TrainSource:
    """Hands out tasks: the env from the mix, the example from the env's stream, tasks to be retried first."""

    def __init__(
        self,
        envs: Sequence[SourceEnv],
        *,
        mix: CircuitBreaker,
        seed: int,
        chosen: Callable[[str, int, int], None] = lambda env, position, index: None,
    ) -> None:
        """`chosen` is told the env, the position and the task whenever a curriculum has chosen one."""
        if len({env.name for env in envs}) < len(envs):
            raise ConfigError("two train envs have the same name; names are unique")
        missing = {env.name for env in envs} ^ set(mix.env_names)
        if missing:
            raise ConfigError(
                f"the source and the mix do not have the same envs: {', '.join(sorted(missing))}"
            )
        self.mix = mix
        self._seed = seed
        self._streams = {env.name: _Stream(env, seed, chosen) for env in envs}

    def next_task(self, eligible: Collection[str] | None = None) -> TrainTask:
        """The next task of an env that the mix picks among `eligible`; ValueError if it can pick none."""
        return self._streams[self.mix.pick(eligible)].next()

    def try_next_task(self, eligible: Collection[str] | None = None) -> TrainTask | None:
        """Like `next_task`, but None while no env may be picked: none of the mix is eligible, or all probes are out."""
        env = self.mix.try_pick(eligible)
        return None if env is None else self._streams[env].next()

    def retry(self, task: TrainTask) -> bool:
        """Hand the task out again, before the env's others; False for a resolved one, which is not asked again."""
        return self._streams[task.env].retry(task.position, task.index)

    def ended(self, task: TrainTask, outcome: TaskOutcome | None) -> None:
        """A group of the task has ended, which every one that was handed out does once; None: without rewards."""
        self._streams[task.env].ended(task.index, outcome)

    def statistics(self, env: str) -> TaskStatistics:
        """What is known about the env's tasks."""
        return self._streams[env].statistics

    def pools(self, env: str) -> Mapping[str, int]:
        """How many of the env's tasks are in which pool of its curriculum; empty where it has none."""
        return self._streams[env].pools()

    def notable(self, env: str) -> Notable:
        """The env's tasks that stand out, for people."""
        return self._streams[env].notable

    def resolve(self, task: TrainTask) -> None:
        """The task is done with: trained on, filtered or given up."""
        self._streams[task.env].resolve(task.position)

    def low_water(self, env: str) -> int:
        """Every position of the env below this one is resolved."""
        return self._streams[env].low

    def waiting(self, env: str) -> int:
        """Number of tasks of the env that wait to be asked again."""
        return self._streams[env].waiting

    def load_resolved(
        self,
        env: str,
        low: int,
        resolved: Iterable[int],
        held: Collection[int] = (),
        chosen: Mapping[int, int] | None = None,
    ) -> int:
        """Continue an env's stream: every position below `low` and those given are resolved.

        Positions in `held` have a finished group that waits for its batch: they are handed out, and not resolved.
        `chosen` has the tasks that a curriculum chose, by position.
        Returns how many tasks are asked again because later ones were handed out before them.
        """
        stream = self._streams[env]
        stream.load(low, resolved, held, chosen or {})
        return stream.waiting

    def load_outcomes(self, env: str, outcomes: Outcomes) -> None:
        """What earlier processes learned about the env's tasks; before anything is handed out."""
        self._streams[env].load_outcomes(outcomes)


class _Stream:
    """One env's positions: the next fresh one, those to ask again, those resolved out of order."""

    __slots__ = (
        "_again",
        "_chosen",
        "_env",
        "_key",
        "_next",
        "_note",
        "_offset",
        "_permutation",
        "_queued",
        "_resolved",
        "_seed",
        "_strategy",
        "low",
        "notable",
        "statistics",
    )

    def __init__(self, env: SourceEnv, seed: int, note: Callable[[str, int, int], None]) -> None:
        if env.num_tasks is not None and env.num_tasks < 1:
            raise ConfigError(f'env "{env.name}": split "{env.split}" has no tasks')
        self._env = env
        self._seed = seed
        self._note = note
        self.low = 0
        self._next = 0
        self._resolved: set[int] = set()
        self._again: deque[int] = deque()
        self._queued: set[int] = set()
        self._permutation: Permutation | None = None
        self._offset = digest(seed, env.name, env.split, "offset") % _LARGEST_OFFSET
        self.statistics = TaskStatistics(env.num_tasks, reward_range=env.curriculum.reward_range)
        self.notable = Notable(self.statistics)
        self._strategy: CurriculumStrategy | None = build_curriculum(
            env.curriculum, self.statistics, env=env.name
        )
        self._chosen: dict[int, int] = {}
        self._key = digest(seed, env.name, env.split, "choices")

    @property
    def waiting(self) -> int:
        return len(self._queued)

    def next(self) -> TrainTask:
        while self._again:
            position = self._again.popleft()
            if position in self._queued:
                self._queued.remove(position)
                return self._task(position)
        position = self._next
        self._next += 1
        return self._task(position)

    def retry(self, position: int, index: int) -> bool:
        if self._is_resolved(position):
            return False
        if self._strategy is not None:
            self._chosen.setdefault(position, index)
        if position not in self._queued:
            self._reach(position)
            self._queued.add(position)
            self._again.append(position)
        return True

    def resolve(self, position: int) -> None:
        if self._is_resolved(position):
            return
        self._reach(position)
        self._queued.discard(position)
        self._chosen.pop(position, None)
        self._resolved.add(position)
        self._sink()

    def ended(self, index: int, outcome: TaskOutcome | None) -> None:
        if outcome is not None:
            self.statistics.add(outcome)
        if self._strategy is not None:
            self._strategy.on_end(index)

    def pools(self) -> Mapping[str, int]:
        return {} if self._strategy is None else self._strategy.pools()

    def load_outcomes(self, outcomes: Outcomes) -> None:
        self.statistics.load(outcomes)
        if self._strategy is not None:
            self._strategy.on_load()

    def load(
        self, low: int, resolved: Iterable[int], held: Collection[int], chosen: Mapping[int, int]
    ) -> None:
        self.low = low
        self._resolved = {position for position in resolved if position >= low}
        self._sink()
        # Positions handed out beyond the last known one come again by themselves.
        self._chosen = {
            position: index
            for position, index in chosen.items()
            if not self._is_resolved(position) and index < (self._env.num_tasks or 0)
        }
        known = self._resolved.union(held)
        self._next = max(self.low, max(known, default=-1) + 1, max(self._chosen, default=-1) + 1)
        gaps = [position for position in range(self.low, self._next) if position not in known]
        self._again = deque(gaps)
        self._queued = set(gaps)

    def _reach(self, position: int) -> None:
        """A task that was handed out before a restart: those between here and there were too."""
        skipped = range(self._next, position)
        self._queued.update(skipped)
        self._again.extend(skipped)
        self._next = max(self._next, position + 1)

    def _sink(self) -> None:
        while self.low in self._resolved:
            self._resolved.remove(self.low)
            self.low += 1

    def _is_resolved(self, position: int) -> bool:
        return position < self.low or position in self._resolved

    def _task(self, position: int) -> TrainTask:
        env = self._env
        if env.num_tasks is None:
            return TrainTask(env.name, env.split, self._offset + position, 0, position)
        # Kept by position even without a strategy: an earlier process may have had one.
        index = self._chosen.get(position) if self._chosen else None
        if index is None:
            index = (
                self._in_order(position, env.num_tasks) if self._strategy is None else self._choose(position)
            )
        if self._strategy is not None:
            self._strategy.on_hand_out(index)
        return TrainTask(env.name, env.split, index, position // env.num_tasks, position)

    def _in_order(self, position: int, num_tasks: int) -> int:
        epoch, place = divmod(position, num_tasks)
        order = self._permutation
        if order is None or order.epoch != epoch:
            order = Permutation(self._seed, self._env.name, self._env.split, epoch, num_tasks)
            self._permutation = order
        return order.at(place)

    def _choose(self, position: int) -> int:
        """A task for a position that has none: the next in turn, or what the strategy picks; noted."""
        env = self._env
        assert env.num_tasks is not None
        assert self._strategy is not None
        explore = env.curriculum.explore
        turn = int(position * explore)
        if int((position + 1) * explore) > turn:
            index = self._in_order(turn, env.num_tasks)
        else:
            index = self._strategy.pick(Chance(self._key + position * _STRIDE))
        self._chosen[position] = index
        self._note(env.name, position, index)
        return index
