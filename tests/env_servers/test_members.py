"""Servers of an environment that sources name: they join, leave, are refused, and nothing is lost or answered twice."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
import zmq

from envs import wire
from orchestrator.discovery import LookupFailed, Patience, Source, parse_source
from orchestrator.discovery.source import SERVERS
from orchestrator.env_servers.env import Env
from orchestrator.env_servers.requests import RolloutRequest
from orchestrator.errors import EnvLostError, EnvStartupError
from tests.env_servers.test_link import Ends, ScriptedServer
from tests.support.env_specs import env_spec
from tests.support.waiting import until

SOURCE = "dns+tcp://envs.rl.svc:7000"
HASTY = Patience(look_every_s=0.001, look_within_s=10.0, leave_after_s=0.0, empty_after_s=0.0)


class AnsweringServer(ScriptedServer):
    """Answers every request at once."""

    def _on_frames(self, frames: list[bytes]) -> None:
        super()._on_frames(frames)
        if isinstance(self.heard[-1], wire.Request):
            self.finish(self.heard[-1].id)


class World:
    """Servers on sockets of their own, and what the name answers."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.named: list[str] | LookupFailed = []
        self.servers: dict[str, ScriptedServer] = {}

    def address(self, name: str) -> str:
        return f"ipc://{self._directory}/{name}"

    def start(self, name: str, kind: type[ScriptedServer] = ScriptedServer) -> ScriptedServer:
        self.servers[name] = kind(self._context, self.address(name))
        return self.servers[name]

    def name(self, *names: str) -> None:
        """What the name answers from now on."""
        self.named = [self.address(name) for name in names]

    def look(self, source: Source) -> list[str]:
        assert source.text == SOURCE
        if isinstance(self.named, LookupFailed):
            raise self.named
        return self.named

    def env(self, **fields: Any) -> Env:
        spec = env_spec(
            id="e", sources=(parse_source(SOURCE, SERVERS),), **({"ping_interval_s": 0.05} | fields)
        )
        env = Env(spec, look=self.look)
        for followed in env.membership.sources:
            followed.patience = HASTY
        return env

    def close(self) -> None:
        for server in self.servers.values():
            server.close()
        self._context.term()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


@asynccontextmanager
async def supervised(env: Env) -> AsyncIterator[None]:
    """Connected, and followed as long as the block lasts."""
    async with env, asyncio.TaskGroup() as group:
        task = group.create_task(env.run())
        try:
            yield
        finally:
            task.cancel()


def submit(env: Env, ends: Ends, index: int = 0) -> RolloutRequest:
    server = env.reserve(1)
    assert server is not None
    request = RolloutRequest("train", index, "http://x")
    env.submit(request, ends, server=server)
    return request


async def test_a_server_that_is_named_joins_and_gets_requests(world: World) -> None:
    """One at the start is enough; the next joins while the environment is in use."""
    first, second = world.start("a"), world.start("b")
    world.name("a")
    env = world.env()
    async with supervised(env):
        assert (env.servers, env.ready_servers) == (1, 1)
        world.name("a", "b")
        await until(lambda: env.ready_servers == 2)
        ends = Ends()
        submit(env, ends)
        submit(env, ends)
        for server in (first, second):
            [asked] = await server.hears(wire.Request)
            server.finish(asked.id)
        assert all(isinstance(end, wire.Result) for end in await ends.count(2))


async def test_a_server_that_is_not_named_any_more_finishes_what_it_has(world: World) -> None:
    """It gets nothing new, its answer counts, and then it is told good-bye and forgotten."""
    first, second = world.start("a"), world.start("b")
    world.name("a")
    env = world.env()
    async with supervised(env):
        ends = Ends()
        submit(env, ends)
        planned = env.reserve(1)
        assert planned is not None
        world.name("b")
        await until(lambda: not planned.serving and env.ready_servers == 1)
        assert (env.servers, env.inflight) == (1, 2)
        for index in range(3):
            submit(env, ends, index)
        assert len(await second.hears(wire.Request, 3)) == 3, "whatever is new goes to the one that stays"
        env.submit(RolloutRequest("train", 9, "http://x"), ends, server=planned)
        for asked in await first.hears(wire.Request, 2):
            assert not first.of(wire.Bye)
            first.finish(asked.id)
        await first.hears(wire.Bye)
        assert all(isinstance(end, wire.Result) for end in await ends.count(2))
        assert list(env.stats()) == ["e-1"]


async def test_room_that_was_only_planned_does_not_keep_a_server(world: World) -> None:
    """What is given back ends the wait like an answer."""
    first = world.start("a")
    world.start("b")
    world.name("a")
    env = world.env()
    async with supervised(env):
        planned = env.reserve(2)
        assert planned is not None
        world.name("b")
        await until(lambda: not planned.serving)
        env.release(planned, 2)
        await first.hears(wire.Bye)


async def test_a_server_that_leaves_and_dies_gives_its_requests_back(world: World) -> None:
    """They fail once, as retryable, and nobody tries to reach it again."""
    first = world.start("a")
    world.start("b")
    world.name("a")
    env = world.env()
    async with supervised(env):
        ends = Ends()
        submit(env, ends)
        await first.hears(wire.Request)
        world.name("b")
        await until(lambda: env.servers == 1 and list(env.stats()) == ["e-0", "e-1"])
        first.close()
        [end] = await ends.count(1)
        assert isinstance(end, wire.Failure)
        assert (end.kind, end.retryable) == (wire.SERVER_LOST, True)
        await until(lambda: list(env.stats()) == ["e-1"])
        assert env.restarts == 0


async def test_a_server_that_is_named_again_in_time_simply_stays(world: World) -> None:
    """A name that flickers costs nobody a connection."""
    first = world.start("a")
    world.start("b")
    world.name("a", "b")
    env = world.env()
    async with supervised(env):
        await until(lambda: env.ready_servers == 2)
        ends = Ends()
        submit(env, ends)
        submit(env, ends)
        [asked] = await first.hears(wire.Request)
        world.name("b")
        await until(lambda: env.ready_servers == 1)
        world.name("a", "b")
        await until(lambda: env.ready_servers == 2)
        first.finish(asked.id)
        [end] = await ends.count(1)
        assert isinstance(end, wire.Result)
        assert len(first.of(wire.Hello)) == 1


async def test_a_server_of_other_tasks_is_refused_and_the_others_go_on(world: World) -> None:
    """It is checked like any other; the log says why it is out."""
    world.start("a")
    other = world.start("b")
    other.obliging = False
    world.name("a")
    env = world.env()
    with structlog.testing.capture_logs() as logs:
        async with supervised(env):
            world.name("a", "b")
            await other.hears(wire.Hello)
            other.say(wire.Welcome(wire.PROTOCOL, "e", 1, "here"))
            other.say(wire.Ready("e", {"train": 999}, False, 4))
            await until(lambda: any(entry["event"] == "env.server_refused" for entry in logs))
            assert (env.servers, env.ready_servers) == (2, 1)
            assert env.available
    [entry] = [entry for entry in logs if entry["event"] == "env.server_refused"]
    assert "declares tasks {'train': 999}" in entry["why"]


async def test_a_server_on_the_network_without_keys_is_refused(world: World) -> None:
    """A file may name any machine; whoever may not be spoken to is told once, and the run goes on."""
    world.start("a")
    world.name("a")
    env = world.env()
    with structlog.testing.capture_logs() as logs:
        async with supervised(env):
            world.named = [world.address("a"), "tcp://10.1.2.3:7000"]
            await until(lambda: any(entry["event"] == "env.server_refused" for entry in logs))
            assert (env.servers, env.ready_servers) == (1, 1)
    assert "insecure = true" in next(e["why"] for e in logs if e["event"] == "env.server_refused")


@pytest.mark.parametrize("address", ["tcp://*:7000", "ipc:///" + "a" * 107])
async def test_a_server_that_zmq_will_not_try_is_refused_and_the_others_go_on(
    world: World, address: str
) -> None:
    """Whatever a source names, the run goes on; the refused one leaves no socket behind."""
    world.start("a")
    world.name("a")
    env = world.env(insecure=True)
    with structlog.testing.capture_logs() as logs:
        async with supervised(env):
            world.named = [world.address("a"), address]
            await until(lambda: any(entry["event"] == "env.server_refused" for entry in logs))
            assert env.ready_servers == 1
            world.name("a")
            await until(lambda: env.servers == 1)
            ends = Ends()
            submit(env, ends)
            [asked] = await world.servers["a"].hears(wire.Request)
            world.servers["a"].finish(asked.id)
            assert isinstance((await ends.count(1))[0], wire.Result)
    why = next(entry["why"] for entry in logs if entry["event"] == "env.server_refused")
    assert why.startswith(f"server e-1 cannot be reached at {address}: ")


async def test_a_start_where_zmq_will_not_try_any_server_ends_at_once(world: World) -> None:
    """In one line that names the environment once."""
    world.named = ["tcp://*:7000"]
    env = world.env(ready_timeout_s=1000, insecure=True)
    await env.spawn()
    try:
        with pytest.raises(EnvStartupError) as error:
            await env.connect()
    finally:
        await env.shutdown()
    assert str(error.value) == 'env "e": server e-0 cannot be reached at tcp://*:7000: Invalid argument'


async def test_a_bad_line_in_a_file_leaves_everybody_where_they_are(world: World, tmp_path: Path) -> None:
    """The source is in trouble, the servers that it named serve on, and a mended file is followed again."""
    world.start("a")
    world.start("b")
    servers = tmp_path / "servers.txt"
    servers.write_text(world.address("a"))
    spec = env_spec(id="e", sources=(parse_source(f"file:{servers}", SERVERS),), ping_interval_s=0.05)
    env = Env(spec)
    [followed] = env.membership.sources
    followed.patience = HASTY
    async with supervised(env):
        servers.write_text(f"{world.address('a')}\ntcp://*:7000\n")
        await until(lambda: "line 2" in followed.trouble)
        assert (env.servers, env.ready_servers) == (1, 1)
        servers.write_text(f"{world.address('a')}\n{world.address('b')}\n")
        await until(lambda: env.ready_servers == 2)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (LookupFailed("it cannot be resolved (no resolver)"), "it cannot be resolved (no resolver)"),
        ([], "it names no server"),
        (["ipc:///nowhere/at/all"], "ipc:///nowhere/at/all: it has not answered"),
    ],
)
async def test_a_start_without_a_server_says_what_the_source_says(
    world: World, named: list[str] | LookupFailed, said: str
) -> None:
    """It is waited for as long as a server may take to load, and then the error names the source."""
    world.named = named
    env = world.env(ready_timeout_s=1.0)
    await env.spawn()
    try:
        with pytest.raises(EnvStartupError) as error:
            await env.connect()
    finally:
        await env.shutdown()
    assert SOURCE in str(error.value)
    assert said in str(error.value)


async def test_a_start_reaches_a_server_again_that_restarts_while_it_loads(world: World) -> None:
    """At the same address, as a container or a person restarts it: the start goes on as soon as it is ready."""
    first = world.start("a")
    first.obliging = False
    world.name("a")
    env = world.env()
    await env.spawn()
    try:
        async with asyncio.TaskGroup() as group:
            connecting = group.create_task(env.connect())
            await first.hears(wire.Hello)
            first.say(wire.Welcome(wire.PROTOCOL, "e", 1, "here"))
            await first.hears(wire.Ping)
            first.close()
            world.start("a")
            async with asyncio.timeout(10):
                await connecting
        assert env.available
    finally:
        await env.shutdown()


async def test_a_start_waits_for_a_name_that_answers_later(world: World) -> None:
    """The servers may come up after the run."""
    world.named = LookupFailed("no resolver yet")
    env = world.env()
    await env.spawn()
    try:
        async with asyncio.TaskGroup() as group:
            connecting = group.create_task(env.connect())
            await until(lambda: "no resolver yet" in env.missing)
            world.start("a")
            world.name("a")
            await connecting
        assert env.available
        assert env.missing == ""
    finally:
        await env.shutdown()


async def test_a_start_ends_at_once_where_every_named_server_refuses_us(world: World) -> None:
    """Waiting does not make another environment of it."""
    server = world.start("a")
    server.obliging = False
    world.name("a")
    env = world.env(ready_timeout_s=1000)
    await env.spawn()
    try:
        connecting = asyncio.create_task(env.connect())
        await server.hears(wire.Hello)
        server.say(wire.Welcome(wire.PROTOCOL, "e", 1, "here"))
        server.say(wire.Ready("another", {"train": 10}, False, 4))
        with pytest.raises(EnvStartupError, match='serves "another"'):
            await connecting
    finally:
        await env.shutdown()


async def test_names_that_stay_empty_end_the_run_like_a_server_that_stays_away(world: World) -> None:
    """As long as `reconnect_timeout_s`, with the source's name; until then the environment waits."""
    world.start("a")
    world.name("a")
    env = world.env(reconnect_timeout_s=0.3)
    async with env:
        running = asyncio.create_task(env.run())
        world.name()
        await until(lambda: env.servers == 0 or running.done())
        assert "it names no server" in env.missing
        with pytest.raises(EnvLostError, match=r"no server was ready for 0\.3 s; .*it names no server"):
            await running


async def test_named_servers_that_never_answer_end_the_run_too(world: World) -> None:
    """Being named is not being there."""
    world.start("a")
    world.name("a")
    env = world.env(reconnect_timeout_s=0.3)
    async with env:
        running = asyncio.create_task(env.run())
        world.name("nobody")
        with pytest.raises(
            EnvLostError, match=r"no server was ready for 0\.3 s; .*/nobody: it has not answered"
        ):
            await running


async def test_listed_servers_that_all_stay_away_end_the_run_with_a_line_that_says_so(world: World) -> None:
    """Each is named with what is known of it, and the environment once."""
    world.start("a")
    world.start("b")
    spec = env_spec(id="e", addresses=(world.address("a"), world.address("b")), reconnect_timeout_s=0.3)
    async with Env(spec) as env:
        running = asyncio.create_task(env.run())
        for server in world.servers.values():
            server.close()
        with pytest.raises(EnvLostError) as error:
            await running
    said = "it has not answered; does it run there?"
    assert str(error.value) == (
        f'env "e": no server was ready for 0.3 s; {world.address("a")}: {said}; {world.address("b")}: {said}'
    )


async def test_listed_and_named_servers_serve_together(world: World) -> None:
    """A listed one is waited for at the start, and stays whatever the name says."""
    world.start("a")
    world.start("b")
    world.name("b")
    env = world.env(addresses=(world.address("a"),))
    async with supervised(env):
        assert env.servers == 2
        world.name()
        await until(lambda: env.servers == 1)
        assert env.available


async def test_a_name_that_changes_all_the_time_under_load_loses_and_doubles_nothing(world: World) -> None:
    """Many changes while requests come and go: every request ends exactly once, with its answer or as retryable."""
    for name in "abcd":
        world.start(name, AnsweringServer)
    world.name("a", "b")
    env = world.env()
    seen: dict[int, int] = {}
    changes = [("a", "b"), ("b", "c"), ("c", "d"), ("d",), ("d", "a"), ("a", "b", "c", "d")]

    def on_done(request: RolloutRequest, answer: object) -> None:
        seen[request.index] = seen.get(request.index, 0) + 1
        assert isinstance(answer, wire.Result) or (isinstance(answer, wire.Failure) and answer.retryable)

    async with supervised(env):
        asked = turn = 0
        # Until enough was asked, too: a slow machine connects to few before the name has changed again.
        while turn < 150 or asked <= 300:
            turn += 1
            world.name(*changes[turn % len(changes)])
            for _ in range(8):
                server = env.reserve(1)
                if server is not None:
                    env.submit(RolloutRequest("train", asked, "http://x"), on_done, server=server)
                    asked += 1
            await asyncio.sleep(0.002)
        await until(lambda: len(seen) == asked)
        assert set(seen.values()) == {1}
