"""Every family with two workers, through a kill of the run and a kill of a server inside a group.

Nothing is taken from the orchestrator's word alone: a trainer in this process notes every batch, and what each index was asked is read
from the tokens that it was given. What the journal says at the end is held against both.
"""

import asyncio
import json
import os
import re
import signal
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from orchestrator.journal import JournalReader
from orchestrator.local.server import PolicyServerSpec, serve
from orchestrator.trainer import AsyncTrainerClient, TrainingBatch
from tests.adapters.conftest import HERE
from tests.adapters.venvs import (
    ATROPOS,
    CLASSIC,
    DATASET,
    INSPECT,
    OPENENV,
    REASONING_GYM,
    TEXTARENA,
    V1,
    Venv,
)
from tests.integration.recording_trainer import TrainerRecord, describe
from tests.integration.service_fixture import Command, settings, write_config

BATCH = 16
GROUP = 4
INFLIGHT = 48
STEPS = 3
"""In each life before something is killed."""


TOLD = ("env.tasks_differ", "env.tasks_changed", "group.task_mismatch")
"""Events that say that one index was two problems."""


@dataclass(frozen=True, slots=True)
class Family:
    """An environment of one family, small but real.

    `files` are put beside the configuration. With a `cursor` the library itself decides what comes next, so that an index
    is one problem within a group only.
    """

    venv: Venv
    id: str
    args: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    cursor: bool = False


ROWS = "".join(
    json.dumps({"question": f"Say {number}", "answer": str(number)}) + "\n" for number in range(60)
)
FAMILIES = {
    "dataset": Family(
        DATASET,
        "dataset::rows.jsonl",
        {"prompt": "{question}", "scorer": "numeric", "reply_pattern": "[0-9]+"},
        {"rows.jsonl": ROWS},
    ),
    "openenv": Family(OPENENV, "openenv::openenv_tested:echo", {"max_turns": 2}),
    "atropos": Family(ATROPOS, "atropos::atropos_tested:Reversing", cursor=True),
    "textarena": Family(TEXTARENA, "textarena::KuhnPoker-v0"),
    "reasoning_gym": Family(REASONING_GYM, "reasoning_gym::chain_sum"),
    "verifiers_classic": Family(CLASSIC, "verifiers::classic-tested", {"kind": "group"}),
    "verifiers_v1": Family(V1, "verifiers::v1-tested"),
    "inspect": Family(INSPECT, "inspect::inspect_tested/sums", {"log_dir": "{tmp}/inspect"}),
}


def _placed(value: Any, tmp_path: Path) -> Any:
    """The argument, with the directory of the test where it names one."""
    return value.replace("{tmp}", str(tmp_path)) if isinstance(value, str) else value


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A directory whose paths are short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


class Trainer:
    """Trains in this process through all lives of a run, and notes what it was given."""

    def __init__(self) -> None:
        self.record = TrainerRecord()
        self.asked: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)
        """By task and seat, the prompts that its sequences begin with."""
        self.step = asyncio.Event()

    async def train(self, address: str) -> None:
        async with AsyncTrainerClient(address) as trainer:
            async for batch in trainer:
                self.record.note(describe(batch))
                self._note_prompts(batch)
                self.step.set()

    def _note_prompts(self, batch: TrainingBatch) -> None:
        for sequence in batch.sequences:
            prompt = tuple(sequence.tokens[: int(sequence.mask.argmax())].tolist())
            self.asked[f"{sequence.task} {sequence.seat}"].add(prompt)

    async def trained(self, command: Command, steps: int) -> None:
        """Wait for so many more steps."""
        last = self.record.last_step + steps
        while self.record.last_step < last:
            self.step.clear()
            ended = asyncio.ensure_future(command.wait())
            stepped = asyncio.ensure_future(self.step.wait())
            await asyncio.wait([ended, stepped], return_when=asyncio.FIRST_COMPLETED)
            stepped.cancel()
            ended.cancel()
            assert command.process.returncode is None, f"the run ended:\n{command.errors()[-3000:]}"


@asynccontextmanager
async def life(config: Path, directory: Path) -> AsyncIterator[Command]:
    """The run, from a start to whatever end it has in the block."""
    path = os.pathsep.join((str(HERE / "environments"), os.environ.get("PYTHONPATH", "")))
    async with await Command.start("run", config, logs=directory / "logs", PYTHONPATH=path) as command:
        await command.wait_event("run.started")
        yield command


@asynccontextmanager
async def held(base_url: str) -> AsyncIterator[None]:
    """The policy says nothing in the block, which begins when so many rollouts wait for it that both servers have some."""
    root = base_url.removesuffix("/v1")
    async with aiohttp.ClientSession(raise_for_status=True) as http:
        await http.post(f"{root}/pause?mode=keep")
        waiting = 0.0
        while waiting < 3 * GROUP:
            text = await (await http.get(f"{root}/metrics")).text()
            waiting = sum(float(number) for number in re.findall(r"(?m)^vllm:num_requests\S+ (\S+)", text))
            await asyncio.sleep(0.05)
        yield
        await http.post(f"{root}/resume")


async def caught_up(run_dir: Path, trainer: Trainer, command: Command, before: int) -> None:
    """Wait until no task below `before` is open any more: what was under way at a kill was asked again, and is done."""
    patience = trainer.record.last_step + 40
    while True:
        with JournalReader(run_dir) as reader:
            low, _ = reader.recover().resolved["tested"]
        if low >= before:
            return
        assert trainer.record.last_step < patience, "a task that was under way at a kill is never asked again"
        await trainer.trained(command, 1)


def highest(run_dir: Path) -> int:
    """One more than the last position that is done with."""
    with JournalReader(run_dir) as reader:
        low, above = reader.recover().resolved["tested"]
    return max(above, default=low - 1) + 1


def prove(run_dir: Path, trainer: Trainer) -> None:
    """No step or group is missing or came twice, and no task is done without a group to show for it."""
    trainer.record.check(world_size=1, batch_size=BATCH)
    with JournalReader(run_dir) as reader:
        recovered, counters = reader.recover(), reader.counters()["tested"]
    batched = {group.id: batch.step for batch in recovered.batches for group in batch.groups}
    places = trainer.record.groups()
    places.update(name for name, step in batched.items() if step > trainer.record.last_step)
    places.update(group.id for group in recovered.groups)
    assert {name for name, times in places.items() if times > 1} == set(), "a group is in two places"
    low, above = recovered.resolved["tested"]
    waiting = {group.task.position for group in recovered.groups if not group.part}
    done = {_position(name) for name in places} - waiting
    assert done == {*range(low), *above}, "a task is done without a group, or has a group and is not done"
    unexpected = {what for what in counters if what not in ("finished", "batched", "split")}
    assert unexpected <= {"evicted: split_rest", "evicted: surplus"}, counters


def _position(group: str) -> int:
    return int(group.rpartition("/")[2].partition("+")[0])


@pytest.mark.adapters
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FAMILIES)
async def test_two_workers_a_restart_and_a_kill_inside_a_group_lose_and_double_nothing(
    name: str, tmp_path: Path, sockets: Path
) -> None:
    """Every index is one problem on both servers and in both lives, and every group is trained on once."""
    family = FAMILIES[name]
    if family.venv.missing():
        pytest.skip(family.venv.missing())
    for file, text in family.files.items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    run_dir, address = tmp_path / "run", f"ipc://{sockets}/trainer"
    trainer = Trainer()
    async with serve(PolicyServerSpec(max_model_len=65536)) as base_url:
        table = {
            "name": "tested",
            "id": family.id,
            "args": {key: _placed(value, tmp_path) for key, value in family.args.items()},
            "python": str(family.venv.python),
        }
        config = write_config(
            tmp_path / "config.toml",
            settings(
                run_dir,
                base_url,
                [{**table, "workers": 2, "ready_timeout_s": 250}],
                batch={"size": BATCH},
                train={"group_size": GROUP, "sampling": {"temperature": 1.0, "max_tokens": 8}},
                dispatch={"max_inflight": INFLIGHT, "keep_equal_rewards": True, "ramp_s": 0.0},
                trainer={"bind": address},
                http={"enabled": False},
            ),
        )
        async with asyncio.TaskGroup() as tasks:
            training = tasks.create_task(trainer.train(address))
            async with life(config, tmp_path) as command:
                await trainer.trained(command, STEPS)
                command.send(signal.SIGKILL)
                await command.wait()
            before = highest(run_dir)
            async with life(config, tmp_path) as command:
                await trainer.trained(command, STEPS)
                async with held(base_url):
                    os.kill(command.events("env.server_started")[0]["pid"], signal.SIGKILL)
                    await command.wait_event("env.server_lost")
                await caught_up(run_dir, trainer, command, max(before, highest(run_dir)) + INFLIGHT // GROUP)
                command.send(signal.SIGTERM)
                assert await command.wait() == 128 + signal.SIGTERM, command.errors()[-3000:]
                events = {name: command.events(name) for name in ("rollout.failed", *TOLD)}
            training.cancel()
    prove(run_dir, trainer)
    assert {name: events[name] for name in TOLD} == {name: [] for name in TOLD}
    assert "server_lost" in {event["kind"] for event in events["rollout.failed"]}, (
        "nothing was under way on it"
    )
    if not family.cursor:
        assert {task: asked for task, asked in trainer.asked.items() if len(asked) > 1} == {}
