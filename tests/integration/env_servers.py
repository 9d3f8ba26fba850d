"""What tests of env servers share: a spec, requests that remember their end, servers started by hand."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from envs import wire
from envs.server_spec import ServerSpec
from orchestrator.env_servers.child_servers import server_command
from orchestrator.env_servers.env import Answer, Env, EnvSpec, RolloutRequest
from orchestrator.env_servers.processes import ChildProcess
from tests.support.env_specs import env_spec

ROOT = Path(__file__).parent.parent.parent
MODULE = "tests.integration.server_envs"


def spec(tmp_path: Path, environment: str = "Quick", **fields: Any) -> EnvSpec:
    """A spec of one of the test environments, with short intervals."""
    defaults: dict[str, Any] = {
        "name": environment.lower(),
        "id": f"{MODULE}:{environment}",
        "log_dir": tmp_path / "logs",
        "ping_interval_s": 0.2,
        "silence_timeout_s": 30.0,
    }
    return env_spec(**(defaults | fields))


def request(index: int = 0, **fields: Any) -> RolloutRequest:
    defaults: dict[str, Any] = {"split": "train", "index": index, "base_url": "http://127.0.0.1:9/v1"}
    return RolloutRequest(**(defaults | fields))


class Asked:
    """Requests under way and how each ended, every end counted."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self.ends: dict[int, list[Answer]] = {}
        self._changed = asyncio.Event()

    def submit(self, *requests: RolloutRequest) -> None:
        for one in requests:
            self.ends[id(one)] = []
            one.context = one  # keeps its identity alive as long as the request
            server = self._env.reserve(one.count)
            assert server is not None, "there is no room"
            self._env.submit(one, self._on_done, server=server)

    def _on_done(self, request: RolloutRequest, answer: Answer) -> None:
        self.ends[id(request)].append(answer)
        self._changed.set()

    async def wait(self) -> list[Answer]:
        """All answers, each request having ended exactly once."""
        while not all(self.ends.values()):
            self._changed.clear()
            await self._changed.wait()
        assert {len(ends) for ends in self.ends.values()} <= {1}, "a request ended twice"
        return [ends[0] for ends in self.ends.values()]


def result(answer: Answer) -> wire.Result:
    assert isinstance(answer, wire.Result), answer
    return answer


def failure(answer: Answer) -> wire.Failure:
    assert isinstance(answer, wire.Failure), answer
    return answer


@asynccontextmanager
async def supervised(env: Env) -> AsyncIterator[Env]:
    """An environment that is connected and kept running."""
    async with env, asyncio.TaskGroup() as group:
        supervisor = group.create_task(env.run())
        try:
            yield env
        finally:
            supervisor.cancel()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that announces itself to nobody; the test's own time limit ends it."""
    while not condition():  # noqa: ASYNC110  there is no event to wait for
        await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def children() -> set[int]:
    """Processes whose parent is this one."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == os.getpid():
            found.add(int(stat.parent.name))
    return found


def start_server(tmp_path: Path, bind: str, environment: str = "Quick", **fields: Any) -> ChildProcess:
    """A server as an operator elsewhere would run it: not spawned by an Env."""
    server_spec = ServerSpec(**{"name": "elsewhere", "id": f"{MODULE}:{environment}", "bind": bind, **fields})
    server = ChildProcess(
        server_command(sys.executable),
        kept=True,
        first_line=msgspec.json.encode(server_spec) + b"\n",
        log_path=tmp_path / "elsewhere.log",
        environ={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    _started.append(server)
    return server


_started: list[ChildProcess] = []


async def stop_started() -> None:
    """End what start_server started and the test, perhaps because it failed, did not stop."""
    while _started:
        await _started.pop().stop(grace_s=0)
