"""What tests of the whole service share: its configuration, and the service in this process or as one of its own.

`running_service` starts the service in the test's event loop, with real child processes, and asserts afterwards that
no process, task, thread or socket is left. `Command` is the command line as a process of its own; every process that
comes from it carries a mark in its environment by which it is found, wherever its parent has gone.
"""

import asyncio
import json
import os
import re
import signal
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from orchestrator.config import Config, load_config
from orchestrator.service import Service, start_service
from tests.integration.env_servers import ROOT, children, until
from tests.integration.recording_trainer import TrainerSpec

MODULE = "tests.integration.envs_for_tests"
MARK = "SERVICE_TEST_MARK"


def env(kind: str, name: str = "", **settings: Any) -> dict[str, Any]:
    """A [[train.env]] or [[eval.env]] table with one of the test environments."""
    return {"id": f"{MODULE}:{kind}", "name": name or kind.lower(), **settings}


def settings(run_dir: Path, base_url: str, envs: list[dict[str, Any]], **sections: Any) -> dict[str, Any]:
    """A configuration with small batches, free ports and an inference server of the test's."""
    defaults: dict[str, Any] = {
        "run_dir": str(run_dir),
        "inference": {"base_urls": [base_url]},
        "batch": {"size": 8},
        "train": {
            "group_size": 4,
            "env": [{"ratio": 1.0, **table} for table in envs],
            "sampling": {"max_tokens": 4},
        },
        "dispatch": {"max_inflight": 24, "ramp_s": 0.0},
        "trainer": {"bind": "tcp://127.0.0.1:0"},
        "http": {"port": 0},
        "log": {"format": "json"},
    }
    for name, section in sections.items():
        both = isinstance(section, Mapping) and name in defaults
        defaults[name] = {**defaults[name], **section} if both else section
    return defaults


def write_config(path: Path, values: Mapping[str, Any]) -> Path:
    """The configuration as a TOML file."""
    path.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in values.items()), encoding="utf-8")
    return path


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name) else json.dumps(name)


def make_config(run_dir: Path, base_url: str, envs: list[dict[str, Any]], **sections: Any) -> Config:
    """The same, loaded."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = write_config(run_dir / "config.toml", settings(run_dir, base_url, envs, **sections))
    return load_config(path)


# --- in this process --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Running:
    """A service that serves; `serving` ends with the reason of its end."""

    service: Service
    serving: asyncio.Task[str]

    @property
    def address(self) -> str:
        """Where trainers connect."""
        return self.service.server.address

    async def wait_end(self) -> str:
        """Why the run ended, once it has by itself."""
        return await asyncio.shield(self.serving)


@asynccontextmanager
async def running_service(
    config: Config, *, fresh: bool = False, rewind_to: int | None = None
) -> AsyncIterator[Running]:
    """The service from start to finish; it is stopped when the block is left. Its error is raised as it is."""
    before = _possessions()
    try:
        async with (
            start_service(config, fresh=fresh, rewind_to=rewind_to) as service,
            asyncio.TaskGroup() as group,
        ):
            serving = group.create_task(service.serve())
            yield Running(service, serving)
            service.stop.set()
            await service.finish(await serving)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        await until(lambda: _possessions() <= before)


def _possessions() -> set[str]:
    """Processes, tasks, threads and sockets of this process, by names that tell them apart."""
    current = asyncio.current_task()
    return {
        *(f"process {pid}" for pid in children()),
        *(f"task {task!r}" for task in asyncio.all_tasks() if task is not current),
        # Threads of asyncio's own pool stay until the loop ends.
        *(
            f"thread {thread.name}"
            for thread in threading.enumerate()
            if not thread.name.startswith("asyncio_")
        ),
        *(f"socket {target}" for target in _descriptors() if target.startswith("socket:")),
    }


def _descriptors() -> set[str]:
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(str(descriptor.readlink()))
    return found


# --- as a process of its own --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Command:
    """`orchestrator …` as a process, with all that it starts."""

    process: asyncio.subprocess.Process
    mark: str
    stdout: Path
    stderr: Path

    @classmethod
    async def start(
        cls, *arguments: str | Path, logs: Path, program: Sequence[str] = (), **environ: str
    ) -> Self:
        """Start it; its output goes to files in `logs`. `program`: in place of the one beside this interpreter."""
        mark = uuid.uuid4().hex
        os.makedirs(logs, exist_ok=True)  # noqa: PTH103  a local directory, as quick as what follows
        stdout, stderr = logs / f"{mark}.out", logs / f"{mark}.err"
        with stdout.open("wb") as out, stderr.open("wb") as err:
            process = await asyncio.create_subprocess_exec(
                *(program or [str(Path(sys.executable).with_name("orchestrator"))]),
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=ROOT,
                env={**os.environ, **environ, MARK: mark},
                start_new_session=True,
            )
        return cls(process, mark, stdout, stderr)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing of it survives the test, whatever the test found."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self.process.wait()
        await until(lambda: not self.processes())

    def processes(self) -> set[int]:
        """The process and those that it started, found by their mark; zombies have ended."""
        found = set()
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if f"{MARK}={self.mark}".encode() in environ.read_bytes():
                    found.add(int(environ.parent.name))
        return found

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the orchestrator alone."""
        self.process.send_signal(number)

    async def wait(self) -> int:
        """Its exit code."""
        return await self.process.wait()

    def errors(self) -> str:
        """What it has written to standard error."""
        return self.stderr.read_text(encoding="utf-8", errors="replace")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Events of its log so far with this name."""
        found = []
        for line in self.errors().splitlines():
            if f'"{name}"' in line:
                with suppress(json.JSONDecodeError):
                    event = json.loads(line)
                    if event.get("event") == name:
                        found.append(event)
        return found

    async def wait_event(self, name: str, count: int = 1) -> dict[str, Any]:
        """The event, once it was logged so often; an orchestrator that ends before is an error with its last words."""
        while len(events := self.events(name)) < count:
            assert self.process.returncode is None, f"ended without {name}:\n{self.errors()[-3000:]}"
            await asyncio.sleep(0.02)
        return events[-1]


async def run_command(*arguments: str | Path, logs: Path, **environ: str) -> Command:
    """Run `orchestrator …` to its end; nothing that it started may be left."""
    command = await Command.start(*arguments, logs=logs, **environ)
    async with command:
        await command.wait()
        assert not command.processes(), "it left processes behind"
    return command


@dataclass(slots=True)
class TrainerProcess:
    """A recording trainer as a process."""

    process: asyncio.subprocess.Process
    spec: TrainerSpec

    @classmethod
    async def start(cls, spec: TrainerSpec, *, prefix: Sequence[str] = ()) -> Self:
        process = await asyncio.create_subprocess_exec(
            *prefix,
            sys.executable,
            "-m",
            "tests.integration.recording_trainer",
            msgspec.json.encode(spec).decode(),
            cwd=ROOT,
        )
        return cls(process, spec)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
