"""Env servers on a real Ray cluster of three nodes: placed, lost with their node, ended with their orchestrator.

The service runs in the virtualenv that has Ray, as a process. Nothing is taken from its word alone: trainers and
environments note what they were given and asked, as in the tests of crashes.
"""

import asyncio
import json
import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from envs.curve import ClientKeys, generate_pair
from orchestrator.env_servers.env import Env
from orchestrator.errors import EnvStartupError
from orchestrator.local.server import run_policy_server
from tests.adapters.conftest import HERE
from tests.adapters.venvs import RAY
from tests.integration.env_servers import ROOT, until
from tests.integration.service_fixture import Command, env, settings, write_config
from tests.integration.test_crash import World
from tests.support.env_specs import env_spec

KILLS = int(os.environ.get("RAY_KILLS", "3"))
PAUSE_S = float(os.environ.get("RAY_KILL_EVERY_S", "0"))
"""Between two kills; `make ray` has more of both."""

BUDGET_S = 480 + KILLS * (PAUSE_S + 120)


class Nodes:
    """The cluster, whose nodes are numbered from 1."""

    def __init__(self, log: Path) -> None:
        self._log = log.open("w+")
        self._process = subprocess.Popen(
            [RAY.python, HERE / "ray_nodes.py", "1", "2", "3"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.address = self._answer()

    def order(self, what: str) -> None:
        """See `ray_nodes`."""
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        assert self._answer() == "done"

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(180)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            self._log.close()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            self._log.seek(0)
            pytest.fail(f"the cluster ended:\n{self._log.read()[-3000:]}")
        return line


@pytest.fixture(scope="module")
def ray() -> None:
    """The virtualenv that has it."""
    if reason := RAY.missing():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def nodes(ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    running = Nodes(tmp_path_factory.mktemp("cluster") / "log")
    try:
        yield running
    finally:
        running.close()


async def start(config: Path, logs: Path, command: str = "run", *options: str) -> Command:
    """`orchestrator run` under the interpreter that has Ray."""
    program = (str(RAY.python), "-m", "orchestrator")
    return await Command.start(command, config, *options, logs=logs, program=program)


def on_ray(kind: str, **fields: Any) -> dict[str, Any]:
    return env(kind, **{"launcher": "ray", "max_restarts": 1000, **fields})


class RayWorld(World):
    """The world of the crash tests, with all servers on the cluster."""

    def __init__(self, directory: Path, sockets: Path, base_url: str, ray: Nodes) -> None:
        self._ray = ray
        super().__init__(directory, sockets, base_url, (4, 4, 4))
        with self.config.open("a", encoding="utf-8") as file:
            file.write(f'ray = {{address = "{ray.address}"}}\n')

    def _envs(self, chat: int, ranked: int, flaky: int) -> list[dict[str, Any]]:
        return [
            on_ray("Chat", group_size=chat, workers=2, args=self._args("chat", 0.05)),
            on_ray("Ranked", group_size=ranked, args=self._args("ranked", 0.1)),
            on_ray("Flaky", group_size=flaky, args=self._args("flaky", 0.0)),
        ]

    async def start(self, *options: str) -> Command:
        return await start(self.config, self.directory / "logs", "run", *options)


@asynccontextmanager
async def ray_world(directory: Path, ray: Nodes) -> AsyncIterator[RayWorld]:
    with tempfile.TemporaryDirectory(prefix="ray-") as sockets:
        async with run_policy_server() as base_url:
            yield RayWorld(directory, Path(sockets), base_url, ray)


async def kill_node(nodes: Nodes, number: int, world: World, command: Command) -> None:
    """As a power cut would; and one under its number comes back once the servers have found other places."""
    lost, back = len(command.events("env.server_lost")), len(command.events("env.server_restarted"))
    await asyncio.to_thread(nodes.order, f"kill {number}")
    await command.wait_event("env.server_lost", lost + 1)
    await world.trained(command, world.record().last_step + 2)
    await command.wait_event("env.server_restarted", back + 1)
    await asyncio.to_thread(nodes.order, f"add {number}")


@pytest.mark.timeout(BUDGET_S)
async def test_a_run_goes_on_while_its_nodes_die_and_nothing_is_lost_or_repeated(
    nodes: Nodes, tmp_path: Path
) -> None:
    """Every node once and more: servers come back on the others, no step is missing, no task is skipped or done twice."""
    async with ray_world(tmp_path, nodes) as world, world.trainers():
        async with await world.start() as command:
            await command.wait_event("run.started")
            await world.trained(command, 2)
            for kill in range(KILLS):
                began = time.monotonic()
                await kill_node(nodes, kill % 3 + 1, world, command)
                await asyncio.sleep(max(0.0, PAUSE_S - (time.monotonic() - began)))
            lost = len(command.events("env.server_lost"))
            before = world.resolved()
            await world.trained(command, world.record().last_step + 2)
            await world.caught_up(command, before)
            await world.end(command)
        # The same run again, to its last step: how many there are is known only now.
        last = world.record().last_step + 200
        async with await world.start("--max_steps", str(last)) as command:
            await command.wait_event("run.started")
            await asyncio.to_thread(nodes.order, "kill 1")
            await command.wait_event("env.server_lost")
            assert await command.wait() == 0, command.errors()[-3000:]
        await asyncio.to_thread(nodes.order, "add 1")
    assert world.record().last_step == last
    record = world.prove()
    print(f"{KILLS} kills, {lost} servers lost, {record.last_step} steps")  # noqa: T201  of a run by hand
    assert lost >= KILLS
    assert all(times == 1 for times in record.served.values())


def marked(mark: str) -> set[int]:
    """Processes with a mark in their environment, wherever they come from."""
    found = set()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"RAY_TEST_MARK={mark}".encode() in environ.read_bytes():
                found.add(int(environ.parent.name))
    return found


def servers(mark: str) -> set[int]:
    found = set()
    for pid in marked(mark):
        with suppress(OSError):
            if b"envs.server" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(pid)
    return found


def small_config(directory: Path, ray: dict[str, Any], *envs: dict[str, Any], **sections: Any) -> Path:
    """A run that nobody trains; its inference server is asked for nothing that matters here."""
    return write_config(
        directory / "config.toml",
        settings(directory / "run", "http://127.0.0.1:9/v1", list(envs), ray=ray, **sections),
    )


@pytest.mark.timeout(600)
async def test_servers_leave_a_node_that_falls_silent_and_all_end_with_a_killed_orchestrator(
    nodes: Nodes, tmp_path: Path
) -> None:
    """A node that answers nobody is as good as dead, and what ran there ends once it wakes up.

    Killed by kill -9 with all that it started on its machine, the orchestrator leaves no server on any node: Ray itself
    must end them.
    """
    mark = uuid.uuid4().hex
    ray = {"address": nodes.address, "runtime_env": {"env_vars": {"RAY_TEST_MARK": mark}}}
    async with run_policy_server() as base_url:
        dice = on_ray("Dice", workers=3, silence_timeout_s=4)
        config = small_config(tmp_path, ray, dice, inference={"base_urls": [base_url]})
        async with await start(config, tmp_path / "logs") as command:
            await command.wait_event("run.started")
            at = (await fetch_status(tmp_path / "run"))["envs"]["dice"]["nodes"]
            assert set(at) == {"dice-0", "dice-1", "dice-2"}
            assert set(at.values()) <= {"127.0.0.11", "127.0.0.12", "127.0.0.13"}
            assert len(set(at.values())) > 1, "they are not spread"
            # Each a keeper and what it keeps.
            assert len(servers(mark)) == 6
            silent = int(at["dice-0"].rpartition(".")[2]) - 10
            lost = [name for name, node in at.items() if node == at["dice-0"]]
            await asyncio.to_thread(nodes.order, f"freeze {silent}")
            await command.wait_event("env.server_restarted", len(lost))
            after = at
            # Those that are restarted first may be others, taken for silent too where the machine is slow.
            while at["dice-0"] in after.values():
                after = (await fetch_status(tmp_path / "run"))["envs"]["dice"]["nodes"]
            assert set(after) == set(at)
            await asyncio.to_thread(nodes.order, f"thaw {silent}")
            await until(lambda: len(servers(mark)) == 6)
            await asyncio.to_thread(nodes.order, f"kill {silent}")
            await asyncio.to_thread(nodes.order, f"add {silent}")
            for pid in command.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await until(lambda: not servers(mark))


async def fetch_status(run_dir: Path) -> dict[str, Any]:
    done = await asyncio.create_subprocess_exec(
        RAY.python, "-m", "orchestrator", "status", run_dir, "--json", cwd=ROOT, stdout=subprocess.PIPE
    )
    out, _ = await done.communicate()
    told: dict[str, Any] = json.loads(out)
    return told


@pytest.mark.timeout(600)
async def test_servers_that_cannot_start_on_a_node_say_why(nodes: Nodes, tmp_path: Path) -> None:
    """What is missing on the node is said here, in the words of the server's own log, and by `check --deep` before a run."""
    config = small_config(
        tmp_path,
        {"address": nodes.address},
        on_ray("Dice", id="no_such_module:Thing", name="moduleless"),
        on_ray("Dice", name="pythonless", python="/no/such/python"),
        on_ray("Dice", name="homeless", resources={"unheard_of": 1}, ready_timeout_s=15),
        on_ray("Dice", name="refused", resources={"GPU": 1.5}),
    )
    async with await start(config, tmp_path / "logs", "check", "--deep") as command:
        assert await command.wait() == 2
        said = command.errors()
        assert 'env "moduleless": server moduleless-0 did not start: its process exited with code 3' in said
        assert "there is no module no_such_module for" in said
        assert "/no/such/python cannot be started on node 127.0.0.1" in said
        assert 'env "homeless": server homeless-0 not ready in 15 s' in said
        assert "it needs a node with unheard_of = 1 free" in said
        assert "server refused-0 did not start: Ray refuses it: " in said
        await until(lambda: not command.processes())


@pytest.mark.timeout(600)
async def test_servers_are_where_their_resources_are_run_the_named_python_and_refuse_strangers(
    nodes: Nodes, tmp_path: Path
) -> None:
    """A node's own resource decides; `python` is a path on the node; whoever has no keys of the run is not heard."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho started >>{tmp_path}/started\nexec {RAY.python} "$@"\n')
    python.chmod(0o755)
    async with run_policy_server() as base_url:
        config = small_config(
            tmp_path,
            {"address": nodes.address},
            on_ray("Dice", workers=2, resources={"only_2": 1}, python=str(python)),
            inference={"base_urls": [base_url]},
        )
        async with await start(config, tmp_path / "logs") as command:
            await command.wait_event("run.started")
            at = (await fetch_status(tmp_path / "run"))["envs"]["dice"]["nodes"]
            assert at == {"dice-0": "127.0.0.12", "dice-1": "127.0.0.12"}
            # Each a keeper and what it keeps.
            assert (tmp_path / "started").read_text().split() == ["started"] * 4
            address = await asyncio.to_thread(listening_address, tmp_path / "run" / "logs" / "dice-0.log")
            assert address.startswith("tcp://127.0.0.12:")
            for keys in (None, ClientKeys(generate_pair(), generate_pair().public)):
                stranger = env_spec(
                    id=env("Dice")["id"], addresses=(address,), keys=keys, ready_timeout_s=3.0
                )
                with pytest.raises(EnvStartupError, match="not ready in 3 s"):
                    async with Env(stranger):
                        pass
            assert not command.events("env.server_lost")


def listening_address(log: Path) -> str:
    """Where a server says that it listens."""
    entries = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return next(str(entry["address"]) for entry in entries if entry["event"] == "server.listening")


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ray")
async def test_a_cluster_of_its_own_is_started_and_ends_with_the_run(tmp_path: Path) -> None:
    """Without an address nothing has to be set up to try it; and after kill -9 no process of Ray stays behind."""
    async with run_policy_server() as base_url:
        config = small_config(
            tmp_path, {}, on_ray("Dice", ready_timeout_s=200), inference={"base_urls": [base_url]}
        )
        async with await start(config, tmp_path / "logs") as command:
            await command.wait_event("run.started")
            assert len(command.processes()) > 5
            command.send(signal.SIGKILL)
            await until(lambda: not command.processes())
