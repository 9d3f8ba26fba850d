"""Which example next: a seeded, endlessly reshuffling stream of tasks per environment.

A stream is a pure function: the task at a position depends on the seed, the env, its split and the position, and
on nothing else, so other envs, restarts and the order of completion do not change it. Memory does not grow with
the number of tasks. Every position handed out is either resolved once (trained on, filtered, given up) or asked
again. What is saved per env is the low-water mark, below which everything is resolved, and the resolved
positions above it: after a restart the gaps are asked again first, then the stream goes on. Which env comes next
is the mix strategy's decision.
"""

import hashlib
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.mix.breaker import CircuitBreaker
from orchestrator.mix.strategy import EnvMixStrategy
from orchestrator.tasks.task import TrainTask

_ROUNDS = 8
_MASK64 = (1 << 64) - 1
# Where the stream of an env without an end starts, so that two seeds do not see the same tasks.
_LARGEST_OFFSET = 2**31


@dataclass(frozen=True, slots=True)
class SourceEnv:
    """An env that tasks are drawn from. `num_tasks` is None if its tasks have no end."""

    name: str
    split: str
    num_tasks: int | None


class TrainSource:
    """Hands out tasks: the env from the mix, the example from the env's stream, tasks to be retried first."""

    def __init__(self, envs: Sequence[SourceEnv], *, mix: EnvMixStrategy, seed: int) -> None:
        if len({env.name for env in envs}) < len(envs):
            raise ConfigError("two train envs have the same name; names are unique")
        missing = {env.name for env in envs} ^ set(mix.env_names)
        if missing:
            raise ConfigError(
                f"the source and the mix do not have the same envs: {', '.join(sorted(missing))}"
            )
        self.mix = mix
        self._seed = seed
        self._streams = {env.name: _Stream(env, seed) for env in envs}
        self._removed: dict[str, Any] = {}

    def next_task(self, eligible: Collection[str] | None = None) -> TrainTask:
        """The next task of an env that the mix picks among `eligible`; ValueError if it can pick none."""
        return self._streams[self.mix.pick(eligible)].next()

    def try_next_task(self, eligible: Collection[str] | None = None) -> TrainTask | None:
        """Like `next_task`, but None while only quarantined envs are eligible and all their probes are out."""
        if not isinstance(self.mix, CircuitBreaker):
            return self.next_task(eligible)
        env = self.mix.try_pick(eligible)
        return None if env is None else self._streams[env].next()

    def retry(self, task: TrainTask) -> None:
        """Hand the task out again, before the env's others. A resolved task is not asked again."""
        self._streams[task.env].retry(task.position)

    def resolve(self, task: TrainTask) -> None:
        """The task is done with: trained on, filtered or given up."""
        self._streams[task.env].resolve(task.position)

    def low_water(self, env: str) -> int:
        """Every position of the env below this one is resolved."""
        return self._streams[env].low

    def waiting(self, env: str) -> int:
        """Number of tasks of the env that wait to be asked again."""
        return self._streams[env].waiting

    def load_resolved(self, env: str, low: int, resolved: Iterable[int], held: Collection[int] = ()) -> int:
        """Continue an env's stream: every position below `low` and those given are resolved.

        The `held` ones are not, but are not asked again either: a group of theirs waits for a batch. Returns how many
        tasks are asked again because later ones were resolved or held before them.
        """
        stream = self._streams[env]
        stream.load(low, resolved, held)
        return stream.waiting

    def state_dict(self) -> dict[str, Any]:
        """What is resolved, per env, as plain JSON values. Removed envs are kept, should they come back."""
        envs = {name: stream.state_dict() for name, stream in self._streams.items()}
        return {"seed": self._seed, "envs": {**self._removed, **envs}}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Continue from a saved state, whose envs may differ; returns what was found, in sentences."""
        notes = []
        if state["seed"] != self._seed:
            notes.append(f"the seed was {state['seed']} and is {self._seed}: every env has another order now")
        for name, saved in state["envs"].items():
            stream = self._streams.get(name)
            if stream is None:
                self._removed[name] = dict(saved)
                notes.append(f'env "{name}" was removed; its place at position {saved["low"]} is kept')
                continue
            notes += stream.differences(saved)
            stream.load(saved["low"], saved["resolved"])
            if stream.waiting:
                notes.append(f'env "{name}": {stream.waiting} unfinished tasks are asked again')
        notes += [
            f'env "{name}" is new and starts at its first task'
            for name in self._streams
            if name not in state["envs"]
        ]
        return notes


class _Stream:
    """One env's positions: the next fresh one, those to ask again, those resolved out of order."""

    __slots__ = ("_again", "_env", "_next", "_offset", "_permutation", "_queued", "_resolved", "_seed", "low")

    def __init__(self, env: SourceEnv, seed: int) -> None:
        if env.num_tasks is not None and env.num_tasks < 1:
            raise ConfigError(f'env "{env.name}": split "{env.split}" has no tasks')
        self._env = env
        self._seed = seed
        self.low = 0
        self._next = 0
        self._resolved: set[int] = set()
        self._again: deque[int] = deque()
        self._queued: set[int] = set()
        self._permutation: Permutation | None = None
        self._offset = _digest(seed, env.name, env.split, "offset") % _LARGEST_OFFSET

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

    def retry(self, position: int) -> None:
        if self._is_resolved(position) or position in self._queued:
            return
        self._reach(position)
        self._queued.add(position)
        self._again.append(position)

    def resolve(self, position: int) -> None:
        if self._is_resolved(position):
            return
        self._reach(position)
        self._queued.discard(position)
        self._resolved.add(position)
        self._sink()

    def load(self, low: int, resolved: Iterable[int], held: Collection[int] = ()) -> None:
        self.low = low
        self._resolved = {position for position in resolved if position >= low}
        self._sink()
        # Positions handed out beyond the last resolved one come again by themselves.
        done = self._resolved.union(held)
        self._next = max(self.low, max(done, default=-1) + 1)
        gaps = [position for position in range(self.low, self._next) if position not in done]
        self._again = deque(gaps)
        self._queued = set(gaps)

    def state_dict(self) -> dict[str, Any]:
        return {
            "split": self._env.split,
            "num_tasks": self._env.num_tasks,
            "low": self.low,
            "resolved": sorted(self._resolved),
        }

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """What changed since the state was saved, in sentences."""
        notes = []
        if saved["split"] != self._env.split:
            notes.append(
                f'env "{self._env.name}": the split was "{saved["split"]}" and is "{self._env.split}"; '
                f"its stream goes on at position {saved['low']}"
            )
        if saved["num_tasks"] != self._env.num_tasks:
            notes.append(
                f'env "{self._env.name}": {_count(saved["num_tasks"])} became {_count(self._env.num_tasks)}; '
                "its order is another one now"
            )
        return notes

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
        epoch, place = divmod(position, env.num_tasks)
        order = self._permutation
        if order is None or order.epoch != epoch:
            order = Permutation(self._seed, env.name, env.split, epoch, env.num_tasks)
            self._permutation = order
        return TrainTask(env.name, env.split, order.at(place), epoch, position)


class Permutation:
    """A seeded permutation of range(size), evaluated at one point at a time, without a table.

    A Feistel network permutes the smallest range of an even number of bits that holds `size`; a result outside
    of `size` is permuted again until it falls inside, which takes less than four rounds on average.
    """

    __slots__ = ("_bits", "_keys", "epoch", "size")

    def __init__(self, seed: int, env: str, split: str, epoch: int, size: int) -> None:
        self.epoch = epoch
        self.size = size
        self._bits = max(1, ((size - 1).bit_length() + 1) // 2)
        key = _digest(seed, env, split, f"epoch {epoch}")
        self._keys = [_scramble(key + round_number * 0x9E3779B97F4A7C15) for round_number in range(_ROUNDS)]

    def at(self, place: int) -> int:
        """Where `place` is moved to."""
        bits = self._bits
        mask = (1 << bits) - 1
        value = place
        while True:
            left, right = value >> bits, value & mask
            for key in self._keys:
                left, right = right, left ^ (_scramble(right + key) >> (64 - bits))
            value = (left << bits) | right
            if value < self.size:
                return value


def _scramble(value: int) -> int:
    """Spread every bit of a number over 64 bits."""
    value &= _MASK64
    value = ((value ^ (value >> 32)) * 0xD6E8FEB86659FD93) & _MASK64
    value = ((value ^ (value >> 32)) * 0xD6E8FEB86659FD93) & _MASK64
    return value ^ (value >> 32)


def _digest(seed: int, *words: str) -> int:
    """A 64-bit number that depends on all of its arguments; the lengths keep neighbouring words apart."""
    text = "".join(f"{len(word)}:{word}" for word in (str(seed), *words))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def _count(num_tasks: int | None) -> str:
    return "tasks without end" if num_tasks is None else f"{num_tasks} tasks"
