"""A run as a user starts it, watched by a trainer that takes nothing on trust.

`Experiment` writes a configuration, runs `orchestrator run` as a process (life after life, where lives are cut short),
trains on what comes, and proves afterwards: the run ended by itself with exit code 0, every batch has the asked size,
no sequence came twice, none is too old, every minimum is kept or was announced as lowered or waived, and no process is
left. A run that does not end within its bound fails with what it says that it waits for.
"""

import asyncio
import contextlib
import hashlib
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from orchestrator.journal import JournalReader
from orchestrator.local.policy import Policy
from orchestrator.trainer import AsyncTrainerClient, TrainingBatch
from tests.integration.service_fixture import Command, write_config
from tests.support.waiting import until

MODULE = "tests.integration.liveness_envs"


def drawn(
    name: str, *, grouped: bool = False, args: Mapping[str, Any] | None = None, **settings: Any
) -> dict[str, Any]:
    """A [[train.env]] or [[eval.env]] table with the drawn environment."""
    kind = "DrawnGroup" if grouped else "Drawn"
    return {"id": f"{MODULE}:{kind}", "name": name, "args": dict(args or {}), **settings}


def configuration(envs: list[dict[str, Any]], **sections: Any) -> dict[str, Any]:
    """A small run with [local] and a trainer of ours; sections are merged into it key by key."""
    values: dict[str, Any] = {
        "max_steps": 6,
        "local": {"trainer": False},
        "batch": {"size": 16},
        "train": {"group_size": 4, "sampling": {"max_tokens": 3}, "env": envs},
        "dispatch": {"ramp_s": 0.0, "backoff_s": 0.01},
        "trainer": {},
        "http": {"port": 0},
        "journal": {"fsync": False},
        "log": {"format": "json"},
    }
    for name, section in sections.items():
        both = isinstance(section, Mapping) and name in values
        values[name] = {**values[name], **section} if both else section
    return values


class LivenessError(AssertionError):
    """A run did not do what every run must."""


@dataclass(slots=True)
class Chaos:
    """What is done to a run: how often its orchestrator and its env servers are killed, and when, by chance."""

    rng: random.Random
    orchestrator: int = 0
    servers: int = 0
    within_s: float = 1.5
    while_draining: bool = False
    """Whether the orchestrator is asked to stop, and killed while it does."""


@dataclass(slots=True)
class Seen:
    """What the trainer was given, by step; a step that is served again must be the same."""

    steps: dict[int, dict[str, Any]] = field(default_factory=dict)

    def note(self, batch: TrainingBatch) -> None:
        line = _describe(batch)
        first = self.steps.setdefault(batch.step, line)
        if first != line:
            raise LivenessError(f"step {batch.step} was served differently the second time")


def _describe(batch: TrainingBatch) -> dict[str, Any]:
    return {
        "version": batch.version,
        "sequences": [hashlib.sha256(one.tokens.tobytes()).hexdigest() for one in batch.sequences],
        "envs": dict(Counter(one.env for one in batch.sequences)),
        "tokens": len(batch.tokens),
        "oldest": min((one.version for one in batch.sequences), default=0),
    }


class Experiment:
    """One configuration, run to its end."""

    def __init__(self, directory: Path, values: Mapping[str, Any], *, bound_s: float = 60.0) -> None:
        self.directory = directory
        self.values = dict(values)
        self.run_dir = directory / "run"
        self.bound_s = bound_s
        self.seen = Seen()
        self.commands: list[Command] = []
        self._sockets = Path(tempfile.mkdtemp(prefix="live-"))
        self.address = f"ipc://{self._sockets}/trainer"
        self.values["run_dir"] = str(self.run_dir)
        self.values["trainer"] = {"bind": self.address, "keep_batches": 1000, **self.values["trainer"]}
        self.config = write_config(directory / "config.toml", self.values)
        self._done = asyncio.Event()

    async def run(self, chaos: Chaos | None = None) -> None:
        """Run to the end, and prove."""
        try:
            async with asyncio.timeout(self.bound_s), asyncio.TaskGroup() as group:
                trainer = group.create_task(self._train()) if self._has_trainer else None
                await self._lives(chaos or Chaos(random.Random(0)))
                if trainer is not None:
                    trainer.cancel()
        except TimeoutError:
            raise LivenessError(f"no end within {self.bound_s:g} s\n{self.last_words()}") from None
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            shutil.rmtree(self._sockets, ignore_errors=True)
        self.prove()

    @property
    def _has_trainer(self) -> bool:
        return self.values["local"].get("trainer", True) is False

    async def _lives(self, chaos: Chaos) -> None:
        for life in range(chaos.orchestrator + 1):
            command = await Command.start(
                "run", self.config, logs=self.directory / "logs", PYTHONFAULTHANDLER="1"
            )
            self.commands.append(command)
            async with command:
                if life < chaos.orchestrator and await self._cut_short(command, chaos):
                    continue
                async with asyncio.TaskGroup() as group:
                    harm = group.create_task(self._kill_servers(command, chaos))
                    code = await self._end_of(command)
                    harm.cancel()
                if code != 0:
                    raise LivenessError(f"exit code {code}\n{self.last_words()}")
                if command.processes():
                    raise LivenessError("it left processes behind")
                return

    async def _end_of(self, command: Command) -> int:
        try:
            return await command.wait()
        except asyncio.CancelledError:
            # Its own words on what it waits for, and its stack, before it is killed.
            await self._note_status()
            command.send(signal.SIGABRT)
            await command.wait()
            raise

    async def _note_status(self) -> None:
        status = await asyncio.create_subprocess_exec(
            Path(sys.executable).with_name("orchestrator"),
            "status",
            "--json",
            self.run_dir,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await status.communicate()
        (self.directory / "status.txt").write_bytes(out)

    async def _cut_short(self, command: Command, chaos: Chaos) -> bool:
        """Kill the orchestrator after a while, mostly under load; False when it ended before."""
        if chaos.while_draining or chaos.rng.random() < 0.8:
            await command.wait_event("run.started")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(chaos.rng.uniform(0, chaos.within_s)):
                code = await command.wait()
                if code != 0:
                    raise LivenessError(f"exit code {code}\n{self.last_words()}")
                return False
        if chaos.while_draining:
            command.send(signal.SIGTERM)
            await command.wait_event("run.draining")
            await asyncio.sleep(chaos.rng.uniform(0, 0.2))
        command.send(signal.SIGKILL)
        await command.wait()
        await until(lambda: not command.processes())
        return True

    async def _kill_servers(self, command: Command, chaos: Chaos) -> None:
        if chaos.servers:
            # An environment that dies while it loads ends the run, and rightly.
            await command.wait_event("run.started")
        for _ in range(chaos.servers):
            await asyncio.sleep(chaos.rng.uniform(0, chaos.within_s))
            servers = sorted(self.env_servers(command))
            if servers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chaos.rng.choice(servers), signal.SIGKILL)

    @staticmethod
    def env_servers(command: Command) -> list[int]:
        """Process ids of the env servers of a command: not those of their keepers, nor of the template that both were forked from."""
        parents: dict[int, int] = {}
        for pid in command.processes():
            with contextlib.suppress(OSError):
                if b"envs.server" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    stat = Path(f"/proc/{pid}/stat").read_text()
                    parents[pid] = int(stat.rpartition(")")[2].split()[1])
        return [pid for pid in parents if pid not in parents.values()]

    async def _train(self) -> None:
        weights = str(Policy().save(self.directory / "weights"))
        ranks = self.values["trainer"].get("world_size", 1)
        async with asyncio.TaskGroup() as group:
            for rank in range(1, ranks):
                group.create_task(self._follow(rank, ranks))
            async with AsyncTrainerClient(self.address, world_size=ranks, timeout_s=300) as trainer:
                async for batch in trainer:
                    if ranks == 1:
                        self.seen.note(batch)
                    await self.on_batch(trainer, batch, weights)

    async def _follow(self, rank: int, ranks: int) -> None:
        async with AsyncTrainerClient(self.address, rank=rank, world_size=ranks, timeout_s=300) as trainer:
            async for _ in trainer:
                pass

    async def on_batch(self, trainer: AsyncTrainerClient, batch: TrainingBatch, weights: str) -> None:
        """What the trainer does with a batch."""
        await trainer.publish(batch.step, weights)

    # --- what is proved ------------------------------------------------------------------------------------------

    def prove(self) -> None:
        """All that holds for every run."""
        steps = self._steps()
        wanted = self.values["max_steps"]
        if sorted(steps) != list(range(1, wanted + 1)):
            raise LivenessError(f"steps {sorted(steps)} of {wanted}")
        seen: Counter[str] = Counter()
        for step, line in sorted(steps.items()):
            self._prove_size(step, line)
            self._prove_minimums(step, line)
            seen.update(line["sequences"])
            allowed = self.values.get("staleness", {}).get("max_versions", 2)
            if line["version"] - line["oldest"] > allowed:
                raise LivenessError(
                    f"step {step} of version {line['version']} has data of version {line['oldest']}"
                )
        twice = [one for one, times in seen.items() if times > 1]
        if twice:
            raise LivenessError(f"{len(twice)} sequences were given twice")
        if any("\nTraceback" in command.errors() for command in self.commands):
            raise LivenessError(f"it logged a traceback\n{self.last_words()}")

    def _steps(self) -> dict[int, dict[str, Any]]:
        """From the trainer's own record, or from the journal where the reference trainer or several ranks had them."""
        if self.seen.steps:
            return self.seen.steps
        with JournalReader(self.run_dir) as reader:
            batches = reader.recover(world_size=self.values["trainer"].get("world_size", 1)).batches
        found = {}
        for batch in batches:
            sequences, envs, tokens = [], Counter[str](), 0
            for group in batch.groups:
                start = 0
                envs[group.env] += group.size
                tokens += len(group.tokens)
                for length in group.lengths:
                    piece = group.tokens[start : start + length]
                    sequences.append(hashlib.sha256(piece.tobytes()).hexdigest())
                    start += length
            found[batch.step] = {
                "version": batch.version,
                "sequences": sequences,
                "envs": dict(envs),
                "tokens": tokens,
                "oldest": min(group.version for group in batch.groups),
            }
        return found

    def _prove_size(self, step: int, line: Mapping[str, Any]) -> None:
        size = self.values["batch"]["size"]
        if self.values["batch"].get("unit") == "tokens":
            if not 0 < line["tokens"] <= size:
                raise LivenessError(f"step {step} has {line['tokens']} tokens of at most {size}")
        elif len(line["sequences"]) != size:
            raise LivenessError(f"step {step} has {len(line['sequences'])} sequences instead of {size}")

    def _prove_minimums(self, step: int, line: Mapping[str, Any]) -> None:
        batch = self.values["batch"]
        if batch.get("unit") == "tokens" or batch.get("quotas"):
            return
        waived = {event["env"] for event in self.events("minimum.waived")}
        said = " ".join(str(event["warning"]) for event in self.events("config.warning"))
        for env in self.values["train"]["env"]:
            share = Fraction(str(env.get("min_batch_allocation", 0)))
            least = math.ceil(share * batch["size"])
            if line["envs"].get(env["name"], 0) >= least or env["name"] in waived:
                continue
            if "lowered" in said or "scaled down" in said:
                continue
            raise LivenessError(f"step {step} has {line['envs']}, but {env['name']} has a minimum of {least}")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Events of the logs of all lives."""
        return [event for command in self.commands for event in command.events(name)]

    def last_words(self) -> str:
        """What helps to see why a run failed."""
        return "\n".join(self._words())

    def _words(self) -> Iterator[str]:
        yield f"configuration: {json.dumps(self.values)}"
        yield f"steps trained: {sorted(self.seen.steps)}"
        status = self.directory / "status.txt"
        if status.exists():
            yield status.read_text(encoding="utf-8", errors="replace")
        if self.commands:
            yield self.commands[-1].errors()[-3000:]
