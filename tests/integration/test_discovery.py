"""Servers and engines that come and go by files while a run goes on: nothing is lost, nothing is done twice."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.discovery import Size, measure
from orchestrator.env_servers.processes import ChildProcess
from orchestrator.errors import EnvStartupError, InferenceError
from orchestrator.local.server import run_policy_server
from tests.integration.env_servers import ROOT, until
from tests.integration.recording_trainer import TrainerRecord, train_here
from tests.integration.service_fixture import Command, env, make_config, running_service
from tests.integration.test_control import tell
from tests.integration.test_crash import World

DNS_WORLD = "tests.integration.dns_world"


def write(path: Path, *lines: str) -> None:
    """A file as whoever manages servers should write it: whole, or not at all."""
    part = path.with_suffix(".part")
    part.write_text("".join(f"{line}\n" for line in ("# written by a test", *lines)))
    part.replace(path)


class ChangingWorld(World):
    """The world of the crash tests, whose engines and env servers are named by files that change all the time."""

    def __init__(self, directory: Path, sockets: Path, engines: list[str]) -> None:
        super().__init__(directory, sockets, "http://127.0.0.1:9/v1", (4, 4, 4))
        self.engines = engines
        self.places = {name: [f"ipc://{sockets}/{name}.{n}" for n in range(3)] for name in self.elsewhere}
        self.running: dict[str, ChildProcess] = {}
        self.changes = 0
        text = self.config.read_text().replace('["http://127.0.0.1:9/v1"]', '"file:engines.txt"')
        for name, address in self.elsewhere.items():
            text = text.replace(f'["{address}"]', f'["file:{directory}/{name}.txt"]')
        self.config.write_text(text)

    def list_all(self) -> None:
        write(self.directory / "engines.txt", *self.engines)
        for name, places in self.places.items():
            write(self.directory / f"{name}.txt", *places)

    def start_at(self, name: str, place: str) -> None:
        self.elsewhere[name] = place
        self.running[place] = self.start_server(name.capitalize(), 0.02)

    async def change(self, rng: random.Random) -> None:
        """Name others; now and then one of the env servers is killed, named or not, and started again."""
        self.changes += 1
        write(self.directory / "engines.txt", *rng.sample(self.engines, rng.randrange(1, 4)))
        for name, places in self.places.items():
            write(self.directory / f"{name}.txt", *rng.sample(places, rng.randrange(1, 4)))
        if rng.random() < 0.5:
            name = rng.choice(list(self.places))
            place = rng.choice(self.places[name])
            await self.running[place].stop(grace_s=0)
            self.start_at(name, place)

    async def keep_changing(self, rng: random.Random) -> None:
        while True:
            await self.change(rng)
            await asyncio.sleep(rng.uniform(0.2, 1.5))


@asynccontextmanager
async def changing_world(directory: Path) -> AsyncIterator[ChangingWorld]:
    async with AsyncExitStack() as stack:
        sockets = stack.enter_context(tempfile.TemporaryDirectory(prefix="found-"))
        engines = [await stack.enter_async_context(run_policy_server()) for _ in range(3)]
        made = ChangingWorld(directory, Path(sockets), engines)
        made.list_all()
        try:
            for name, places in made.places.items():
                for place in places:
                    made.start_at(name, place)
            yield made
        finally:
            for server in made.running.values():
                await server.stop(grace_s=0)


@pytest.mark.timeout(600)
async def test_members_that_change_all_the_time_and_a_killed_orchestrator_lose_nothing(
    tmp_path: Path,
) -> None:
    """Engines and env servers come, go and die, the orchestrator is killed -9: the books of the trainers hold."""
    rng = random.Random(3)
    async with changing_world(tmp_path) as world, world.trainers(), asyncio.TaskGroup() as group:
        changing = group.create_task(world.keep_changing(rng))
        for _ in range(2):
            async with await world.start() as command:
                await command.wait_event("run.started")
                await command.wait_event("env.server_left", 2)
                await world.trained(command, world.record().last_step + rng.randrange(3, 8))
                command.send(signal.SIGKILL)
                assert await command.wait() == -signal.SIGKILL, command.errors()[-3000:]
                await until(lambda command=command: not command.processes())  # type: ignore[misc]  # binds the loop's value
        before = world.resolved()
        async with await world.start() as command:
            await command.wait_event("endpoint.removed", 2)
            changing.cancel()
            world.list_all()
            await world.trained(command, world.record().last_step + 5)
            await world.caught_up(command, before)
            await world.end(command)
        record = world.prove()
    assert record.last_step > 10
    assert world.changes > 10


@pytest.fixture
async def policy() -> AsyncIterator[str]:
    async with run_policy_server() as base_url:
        yield base_url


@pytest.fixture
async def other() -> AsyncIterator[str]:
    async with run_policy_server() as base_url:
        yield base_url


async def test_the_status_says_where_members_come_from_and_a_person_beats_the_source(
    tmp_path: Path, policy: str, other: str
) -> None:
    """The file names two engines; one is removed by hand, stays out, and is back when a person says so."""
    engines = tmp_path / "engines.txt"
    write(engines, policy)
    config = make_config(
        tmp_path / "run",
        policy,
        [env("Dice", args={"latency_s": 0.01})],
        inference={"base_urls": f"file:{engines}"},
    )
    record = TrainerRecord()
    async with running_service(config) as running, asyncio.TaskGroup() as group:
        training = group.create_task(train_here(running.address, record))

        def healthy() -> set[str]:
            return {one.url for one in running.service.status().endpoints if one.healthy}

        write(engines, policy, other)
        await until(lambda: healthy() == {policy, other})
        status = running.service.status()
        [source] = status.sources
        assert (source.source, source.of, source.members) == (f"file:{engines}", "inference", 2)
        assert {one.source for one in status.endpoints} == {f"file:{engines}"}
        answer = await tell(running, command="endpoint", action="remove", url=other)
        assert answer["sources"] == [f"file:{engines} names 2 of inference"]
        await until(lambda: healthy() == {policy})
        step = record.last_step
        await until(lambda: record.last_step > step + 3)
        assert healthy() == {policy}
        await tell(running, command="endpoint", action="add", url=other)
        await until(lambda: healthy() == {policy, other})
        write(engines, other)
        await until(lambda: healthy() == {other})
        training.cancel()


async def test_a_run_waits_for_members_that_are_not_there_yet_and_says_which(
    tmp_path: Path, policy: str
) -> None:
    """Neither file is there when the run starts; both waits name their file, and then the run starts."""
    make_config(
        tmp_path / "run",
        policy,
        [env("Dice", addresses="file:servers.txt")],
        inference={"base_urls": ["file:engines.txt"]},
        max_steps=2,
        http={"enabled": False},
    )
    beside = tmp_path / "run"  # where the configuration is
    with tempfile.TemporaryDirectory(prefix="found-") as sockets:
        address = f"ipc://{sockets}/dice"
        async with await Command.start("run", beside / "config.toml", logs=tmp_path / "logs") as command:
            await command.wait_event("source.trouble", 2)
            said = {event["source"]: event["why"] for event in command.events("source.trouble")}
            assert set(said) == {"file:servers.txt", "file:engines.txt"}
            assert all("cannot be read (No such file" in why for why in said.values())
            write(beside / "engines.txt", policy)
            write(beside / "servers.txt", address)
            world = World(tmp_path, Path(sockets), policy, (4, 4, 4))
            world.elsewhere["dice"], world.asked["dice"] = address, tmp_path / "dice.asked"
            server = world.start_server("Dice", 0.0)
            try:
                await command.wait_event("run.started")
            finally:
                await server.stop(grace_s=0)


async def test_a_run_whose_members_never_come_ends_like_one_whose_servers_are_not_there(
    tmp_path: Path, policy: str
) -> None:
    """The exit codes of a server, and of an engine, that is not there; the message names the source."""
    write(tmp_path / "nobody.txt")
    source = f"file:{tmp_path}/nobody.txt"
    no_engine = make_config(
        tmp_path / "a", policy, [env("Dice")], inference={"base_urls": source, "ready_timeout_s": 0.5}
    )
    with pytest.raises(InferenceError, match=f"{source}: it names no server") as engine:
        async with running_service(no_engine):
            pass
    no_server = make_config(tmp_path / "b", policy, [env("Dice", addresses=source, ready_timeout_s=0.5)])
    with pytest.raises(EnvStartupError, match=f"{source}: it names no server") as server:
        async with running_service(no_server):
            pass
    assert (engine.value.exit_code, server.value.exit_code) == (8, 3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_benchmark_of_many_members_loses_no_rollout() -> None:
    """The quick size, members that come and go every second included; how fast it is, the benchmark itself tells."""
    one = measure(Size(servers=16, engines=8, inflight=400, latency_s=2.0, for_s=10.0))
    assert one.failed == 0
    assert one.rollouts > 100
    assert one.joins > 0
    assert one.inflight >= 380


def no_namespace() -> str:
    """Why there can be no network of the test's own here; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    tried = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, check=False)
    return tried.stderr.decode().strip() if tried.returncode else ""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_names_that_change_every_second_under_a_run_lose_and_double_nothing(tmp_path: Path) -> None:
    """Real resolving in a namespace with a name server of its own: `dns_world` says what happens there."""
    if reason := no_namespace():
        pytest.skip(reason)
    resolv = tmp_path / "resolv.conf"
    resolv.write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    with tempfile.TemporaryDirectory(prefix="dns-") as directory:
        script = f"ip link set lo up && mount --bind {resolv} /etc/resolv.conf && exec {sys.executable} -m {DNS_WORLD} {directory}"
        ran = subprocess.run(
            ["unshare", "--net", "--mount", "sh", "-c", script], cwd=ROOT, capture_output=True, check=False
        )
    assert ran.returncode == 0, ran.stderr.decode()[-6000:]
    assert "questions" in ran.stdout.decode()
