"""Environments that behave in one particular way each, for tests of servers that host them."""

import asyncio
import json
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from envs import Environment, Model, Rollout, Sequence, Task, Tasks


def fixed_rollout(index: int, *, length: int = 8, reward: float | None = None, **fields: Any) -> Rollout:
    """A rollout whose tokens and reward tell which task it was."""
    tokens = np.arange(index, index + length, dtype=np.int32)
    sequence = Sequence(tokens, np.ones(length, np.uint8), np.full(length, -0.5, np.float32))
    return Rollout([sequence], float(index) if reward is None else reward, **fields)


class Quick(Environment):
    """Ends at once; its reward is the task's index."""

    def __init__(self, tasks: int = 1000, load_s: float = 0.0) -> None:
        # As environments do that install signal handlers.
        assert threading.current_thread() is threading.main_thread()
        self._tasks = tasks
        time.sleep(load_s)

    def tasks(self, split: str) -> Tasks:
        if split == "absent":
            raise KeyError(split)
        return [{"index": index} for index in range(self._tasks)]

    async def rollout(self, task: Task, model: Model) -> Rollout:
        return fixed_rollout(task["index"])


class Narrow(Quick):
    """Can run three rollouts at once, whatever the configuration says."""

    @property
    def capacity(self) -> int | None:
        return 3


class Chance(Quick):
    """Its tasks come in an order that nobody seeded; a rollout says which it was."""

    def tasks(self, split: str) -> Tasks:
        numbers = list(range(100))
        random.shuffle(numbers)
        return [{"number": number, "hash": hash(f"{number}")} for number in numbers]

    async def rollout(self, task: Task, model: Model) -> Rollout:
        return fixed_rollout(task["number"], messages=[{"role": "user", "content": str(task["number"])}])


class Undecided(Chance):
    """Its tasks are others in every process, whatever is seeded."""

    def tasks(self, split: str) -> Tasks:
        return [{"number": number, "process": os.getpid()} for number in range(100)]


class Unbounded(Quick):
    """Tasks without end."""

    def tasks(self, split: str) -> Tasks:
        class Endless:
            def __getitem__(self, index: int, /) -> Task:
                return {"index": index}

        return Endless()


class Gated(Quick):
    """Rollouts wait until a file appears."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        self._gate = Path(gate)

    async def rollout(self, task: Task, model: Model) -> Rollout:
        while not self._gate.exists():  # noqa: ASYNC110  a file says nothing when it appears
            await asyncio.sleep(0.02)
        return fixed_rollout(task["index"])


class Poison(Quick):
    """Task 13 kills the server."""

    async def rollout(self, task: Task, model: Model) -> Rollout:
        if task["index"] == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        return fixed_rollout(task["index"])


class NeverReady(Quick):
    """Loads for ever."""

    async def setup(self) -> None:
        print("still reading the dataset", flush=True)
        await asyncio.Event().wait()


class BreaksOnLoad(Quick):
    """Cannot be constructed."""

    def __init__(self) -> None:
        raise RuntimeError("the dataset is not where it should be")


class BreaksOnSetup(Quick):
    """Cannot be set up."""

    async def setup(self) -> None:
        raise RuntimeError("the sandbox does not answer")


class Stopping(Quick):
    """Has a breakpoint that its author forgot."""

    async def rollout(self, task: Task, model: Model) -> Rollout:
        logging.getLogger("mine").warning("about to stop")
        breakpoint()
        raise AssertionError("not reached")


class Generated(Quick):
    """Takes tasks for a generator."""

    def tasks(self, split: str) -> Any:
        yield {}


class BySplit(Quick):
    """Has a dict of datasets where the tasks of one split are meant."""

    def tasks(self, split: str) -> Any:
        return {"train": [{}], "test": [{}]}


class ByIndex(Quick):
    """Has its tasks in a dict, by index."""

    def tasks(self, split: str) -> Any:
        return {0: {}, 1: {}}


class Clinging(Quick):
    """Ignores SIGTERM, as code of others may."""

    async def setup(self) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class OnThread(Quick):
    """Waits on a thread of the loop's pool, which no cancellation reaches."""

    async def rollout(self, task: Task, model: Model) -> Rollout:
        await asyncio.to_thread(time.sleep, 3600)
        return fixed_rollout(task["index"])


class Uncancellable(Quick):
    """Swallows every cancellation."""

    async def rollout(self, task: Task, model: Model) -> Rollout:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue


class Freezing(Quick):
    """Task 0 blocks the event loop for some seconds."""

    def __init__(self, block_s: float) -> None:
        super().__init__()
        self._block_s = block_s

    async def rollout(self, task: Task, model: Model) -> Rollout:
        if task["index"] == 0:
            time.sleep(self._block_s)  # noqa: ASYNC251  blocking is the point
        return fixed_rollout(task["index"])


class Bad(Quick):
    """Every task goes wrong in its own way; the names are the tasks' indices, in order."""

    ways = (
        "raises",
        "nan_reward",
        "lengths_differ",
        "wrong_type",
        "exits",
        "reward_is_text",
        "metric_is_nan",
        "metric_name_is_a_number",
        "no_sequences",
        "wrong_dtype",
        "infinite_logprob",
        "cancels_itself",
        "broken_pipe",
        "recursion",
        "huge_reward",
        "mask_of_two",
        "negative_token",
        "positive_logprob",
        "logprob_of_a_prompt",
        "too_large",
        "no_unicode",
        "interrupts",
        "closes_itself",
        "cannot_be_shown",
    )

    async def rollout(self, task: Task, model: Model) -> Any:
        way = self.ways[task["index"]]
        rollout = fixed_rollout(1)
        sequence = rollout.sequences[0]
        if way == "raises":
            raise ValueError("the answer has no boxed part")
        if way == "nan_reward":
            rollout.reward = float("nan")
        elif way == "lengths_differ":
            sequence.mask = sequence.mask[:-1]
        elif way == "wrong_type":
            return {"reward": 1.0}
        elif way == "exits":
            sys.exit(1)
        elif way == "reward_is_text":
            rollout.reward = "good"  # type: ignore[assignment]  # what a careless author does
        elif way == "metric_is_nan":
            rollout.metrics = {"speed": float("nan")}
        elif way == "metric_name_is_a_number":
            rollout.metrics = {1: 1.0}  # type: ignore[dict-item]  # what a careless author does
        elif way == "no_sequences":
            rollout.sequences = []
            return rollout
        elif way == "wrong_dtype":
            sequence.tokens = sequence.tokens.astype(np.int64)
        elif way == "infinite_logprob":
            sequence.logprobs = np.full(len(sequence.tokens), -np.inf, np.float32)
        elif way == "cancels_itself":
            raise asyncio.CancelledError
        elif way == "broken_pipe":
            raise BrokenPipeError("the sandbox went away")
        elif way == "recursion":
            return await self.rollout(task, model)
        return self._worse(way, rollout)

    def _worse(self, way: str, rollout: Rollout) -> Rollout:
        sequence = rollout.sequences[0]
        if way == "huge_reward":
            rollout.reward = 1e308
        elif way == "mask_of_two":
            sequence.mask[3] = 2
        elif way == "negative_token":
            sequence.tokens[3] = -1
        elif way == "positive_logprob":
            sequence.logprobs[3] = 0.5
        elif way == "logprob_of_a_prompt":
            sequence.mask[0] = 0
        elif way == "too_large":
            rollout.stop_reason = "x" * 5_000_000
        elif way == "no_unicode":
            rollout.messages = [{"role": "user", "content": "\ud800"}]
        elif way == "interrupts":
            raise KeyboardInterrupt
        elif way == "closes_itself":
            raise GeneratorExit
        elif way == "cannot_be_shown":
            raise Unshowable
        return rollout


class Unshowable(Exception):  # noqa: N818  as an author may call it
    """Raises when it is shown."""

    def __str__(self) -> str:
        raise SystemExit("\ud800")


class Ranked(Quick):
    """Scores whole groups: the reward is the rank in the group."""

    async def score_group(self, task: Task, rollouts: list[Rollout]) -> list[float]:
        if task["index"] == 1:
            return [1.0]
        if task["index"] == 2:
            return [float("nan")] * len(rollouts)
        return [float(rank) for rank in range(len(rollouts))]


class Chatting(Quick):
    """One turn with the model."""

    async def rollout(self, task: Task, model: Model) -> Rollout:
        reply = await model.chat([{"role": "user", "content": str(task["index"])}])
        return model.rollout(float(task["index"]), metrics={"characters": len(reply.text)})


class Sandboxed(Quick):
    """Starts a process of its own for every rollout and waits for it."""

    def __init__(self, pids: str, own_session: bool = False) -> None:
        super().__init__()
        self._pids = Path(pids)
        self._own_session = own_session

    async def rollout(self, task: Task, model: Model) -> Rollout:
        process = subprocess.Popen(["sleep", "600"], start_new_session=self._own_session)  # noqa: ASYNC220  left running on purpose
        if self._own_session:
            # One whose parent has gone, as daemons arrange it.
            code = 'setsid sleep 600 & echo $! >> "$0"'
            subprocess.run(["sh", "-c", code, str(self._pids)], check=True)  # noqa: ASYNC221  returns at once
        with self._pids.open("a") as file:
            file.write(f"{process.pid}\n")
        await asyncio.Event().wait()
        return fixed_rollout(task["index"])


class WhereAmI(Quick):
    """Tells which interpreter it runs under."""

    async def rollout(self, task: Task, model: Model) -> Rollout:
        return fixed_rollout(task["index"], messages=[{"role": "system", "content": sys.prefix}])


class Surroundings(Quick):
    """Tells the environment variables that it has, and a hash."""

    async def rollout(self, task: Task, model: Model) -> Rollout:
        said = {"role": "system", "content": dict(os.environ), "hash": hash("reverse")}
        return fixed_rollout(task["index"], messages=[said])


def lines(path: Path) -> Iterator[int]:
    """The process ids in a file."""
    if path.exists():
        yield from (int(line) for line in path.read_text().split())


class Inside(Quick):
    """Writes down what it finds in its process while it is loaded."""

    def __init__(self, file: str) -> None:
        super().__init__()
        numbers = [number for number in range(1, 32) if number not in (signal.SIGKILL, signal.SIGSTOP)]
        found = {
            "environ": dict(os.environ),
            "path": sys.path,
            "argv": sys.argv[1:],
            "main": sys.modules["__main__"].__spec__.name,  # type: ignore[union-attr]
            "signals": [repr(signal.getsignal(number)) for number in numbers],
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "limits": [resource.getrlimit(limit) for limit in range(16)],
            "files": sorted(
                str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()
            ),
            "directory": str(Path.cwd()),
            "threads": threading.active_count(),
            "session": os.getsid(0),
        }
        Path(file).write_text(json.dumps(found))


class Lottery(Quick):
    """Tells its process and what chance says there, by the global generators."""

    async def rollout(self, task: Task, model: Model) -> Rollout:
        said = {"pid": os.getpid(), "random": random.random(), "numpy": float(np.random.random())}
        return fixed_rollout(task["index"], messages=[said])
