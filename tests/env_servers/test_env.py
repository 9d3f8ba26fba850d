"""Environments before any server runs: restart budgets, declarations, private directories, containers."""

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from envs import wire
from envs.addresses import is_loopback
from orchestrator.env_servers.env import Env, EvalEnv, TrainEnv, TrainEnvs, side_by_side
from orchestrator.env_servers.launching import ServerLauncher
from orchestrator.env_servers.private_directory import PrivateDirectory
from orchestrator.env_servers.requests import RolloutRequest
from orchestrator.env_servers.supervision import RestartBudget
from orchestrator.errors import EnvError, EnvLostError, EnvProtocolError, EnvStartupError
from tests.env_servers.test_link import Ends, ScriptedServer
from tests.support.env_specs import env_spec, eval_settings, free_room, restart_policy, train_settings

THREADS = Path("/proc/self/task")


def threads() -> int:
    """Of this process, those of libraries too."""
    return len(list(THREADS.iterdir()))


def test_restarts_pause_twice_as_long_each_time_until_the_budget_is_used_up() -> None:
    """A server that dies in a loop is restarted ever later, and then no more."""
    budget = RestartBudget(restart_policy(max_restarts=4, window_s=100, first_delay_s=1, max_delay_s=3))
    assert [budget.next_delay_s(now) for now in (0, 1, 2, 3, 4)] == [1, 2, 3, 3, None]


def test_old_restarts_are_forgiven() -> None:
    """Only those within the window count, so a run of weeks survives a crash a day."""
    budget = RestartBudget(restart_policy(max_restarts=2, window_s=100, first_delay_s=1))
    assert [budget.next_delay_s(now) for now in (0, 50, 99, 100, 149, 150)] == [1, 2, None, 2, None, 2]


def test_no_restarts_means_none() -> None:
    """A budget of zero gives the first death up."""
    assert RestartBudget(restart_policy(max_restarts=0)).next_delay_s(0) is None


@pytest.fixture
async def launcher() -> AsyncIterator[Callable[..., ServerLauncher]]:
    made: list[ServerLauncher] = []
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def make(**fields: Any) -> ServerLauncher:
        made.append(ServerLauncher(env_spec(**fields), context, ()))
        return made[-1]

    yield make
    for one in made:
        await one.aclose()
    context.term()


def ready(**fields: Any) -> wire.Ready:
    defaults: dict[str, Any] = {
        "env": "reverse",
        "tasks": {"train": 10},
        "group_scored": False,
        "capacity": 4,
    }
    return wire.Ready(**(defaults | fields))


def test_the_first_server_declares_and_the_others_must_agree(launcher: Callable[..., ServerLauncher]) -> None:
    """Capacity may differ; tasks and scoring may not, and the error names both sides."""
    servers = launcher()
    servers.check_ready("e-0", ready())
    servers.check_ready("e-1", ready(capacity=64, env="builtin::reverse"))
    with pytest.raises(EnvProtocolError, match=r"e-1 declares tasks {'train': 11}, server e-0 {'train': 10}"):
        servers.check_ready("e-1", ready(tasks={"train": 11}))
    with pytest.raises(EnvProtocolError, match="e-1 declares group_scored True, server e-0 False"):
        servers.check_ready("e-1", ready(group_scored=True))


def test_a_server_of_another_environment_is_refused_by_the_client_too(
    launcher: Callable[..., ServerLauncher],
) -> None:
    """Servers of others need not check what they are asked for."""
    with pytest.raises(EnvProtocolError, match='e-0 serves "larger", we asked for "reverse"'):
        launcher().check_ready("e-0", ready(env="larger"))
    with pytest.raises(EnvProtocolError, match='does not declare split "train"'):
        launcher().check_ready("e-0", ready(tasks={}))


@pytest.mark.parametrize(
    ("address", "off"),
    [
        ("tcp://127.0.0.1:7000", False),
        ("tcp://localhost:7000", False),
        ("tcp://127.0.0.2:7000", False),
        ("tcp://[::1]:7000", False),
        ("ipc:///tmp/x", False),
        ("tcp://0.0.0.0:7000", True),
        ("tcp://*:7000", True),
        ("tcp://10.0.0.7:7000", True),
        ("tcp://[::]:7000", True),
        ("tcp://math.example:7000", True),
    ],
)
def test_loopback_is_told_from_the_network(
    address: str, off: bool, launcher: Callable[..., ServerLauncher]
) -> None:
    """An address on the network needs keys or an explicit word."""
    assert is_loopback(address) is not off
    if off:
        with pytest.raises(EnvError, match="insecure = true"):
            launcher(addresses=(address,))
    launcher(addresses=(address,), insecure=True)


def test_an_address_twice_is_refused(launcher: Callable[..., ServerLauncher]) -> None:
    """Two links of one client to one server would end each other."""
    with pytest.raises(EnvError, match="twice"):
        launcher(addresses=("ipc:///tmp/x", "ipc:///tmp/x"))


def test_a_private_directory_is_private_and_swept_only_when_its_owner_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a killed orchestrator left behind is removed by the next one; what a living one uses is not."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("orchestrator.env_servers.private_directory._TEMP_PATH_BYTES", 10_000)
    living = PrivateDirectory()
    assert stat.S_IMODE(living.path.stat().st_mode) == 0o700
    left = tmp_path / "envs-left"
    left.mkdir()
    (left / "lock").touch()
    PrivateDirectory().remove()
    assert living.path.exists()
    assert not left.exists()
    living.remove()
    assert not living.path.exists()


def test_a_long_directory_for_temporary_files_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unix sockets need short paths."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    directory = PrivateDirectory()
    try:
        assert len(os.fsencode(directory.path)) < 60
    finally:
        directory.remove()


@asynccontextmanager
async def two_servers(tmp_path: Path) -> AsyncIterator[tuple[Env, list[ScriptedServer]]]:
    """An environment of two servers with room for 4 rollouts each."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    addresses = tuple(f"ipc://{tmp_path}/{number}" for number in range(2))
    servers = [ScriptedServer(context, address) for address in addresses]
    try:
        async with Env(env_spec(id="e", addresses=addresses, ping_interval_s=0.05)) as env:
            yield env, servers
    finally:
        for server in servers:
            server.close()
        context.term()


async def test_more_is_planned_at_once_than_there_is_room_and_all_that_is_planned_can_be_sent(
    tmp_path: Path,
) -> None:
    """Room is taken when a start is planned: twenty are wanted, eight fit, none of these is refused later."""
    async with two_servers(tmp_path) as (env, servers):
        planned = [server for _ in range(20) if (server := env.reserve(1)) is not None]
        assert (len(planned), env.inflight, env.has_room(1)) == (8, 8, False)
        assert {planned.count(server) for server in planned} == {4}
        ends = Ends()
        for index, server in enumerate(planned):
            env.submit(RolloutRequest("train", index, "http://x"), ends, server=server)
        for scripted in servers:
            for asked in await scripted.hears(wire.Request, 4):
                scripted.finish(asked.id)
        assert all(isinstance(end, wire.Result) for end in await ends.count(8))
        assert (env.inflight, free_room(env)) == (0, 8)


async def test_groups_are_planned_on_the_least_loaded_server_that_has_room_for_all_of_them(
    tmp_path: Path,
) -> None:
    """Three fit on each server, then only a single rollout does; what is given back can be planned with again."""
    async with two_servers(tmp_path) as (env, _):
        first, second = env.reserve(3), env.reserve(3)
        assert first is not None
        assert second is not None
        assert first is not second
        assert (env.reserve(3), env.has_room(1)) == (None, True)
        env.release(first, 3)
        assert env.reserve(4) is first


async def test_a_rollout_waits_for_room_that_a_plan_has_taken(tmp_path: Path) -> None:
    """Whoever runs a rollout by itself reserves like everybody else."""
    async with two_servers(tmp_path) as (env, servers), asyncio.TaskGroup() as tasks:
        planned = [env.reserve(4), env.reserve(4)]
        waiting = tasks.create_task(env.run_rollout(RolloutRequest("train", 7, "http://x")))
        ends = Ends()
        assert planned[0] is not None
        env.submit(RolloutRequest("train", 0, "http://x", count=4, group=True), ends, server=planned[0])
        number = [server.address for server in env._links].index(planned[0].address)
        [asked] = await servers[number].hears(wire.Request)
        assert not waiting.done()
        servers[number].finish(asked.id, 4)
        again = (await servers[number].hears(wire.Request, 2))[1]
        servers[number].finish(again.id)
        assert isinstance(await waiting, wire.Result)


async def test_what_is_not_connected_says_so() -> None:
    """Nothing about an environment is guessed before its servers have declared it."""
    env = EvalEnv(env_spec(), eval_settings())
    with pytest.raises(EnvError, match="not connected"):
        _ = env.num_tasks
    assert (env.has_room(1), env.reserve(1)) == (False, None)
    assert (free_room(env), env.inflight, env.available, env.stats()) == (0, 0, False, {})
    await env.shutdown()


def test_names_are_unique() -> None:
    """Two environments of one name would share their log files and their place in every table."""
    envs = [TrainEnv(env_spec(name="a", id=name), train_settings()) for name in ("reverse", "larger")]
    with pytest.raises(ValueError, match="more than one is called a"):
        TrainEnvs(envs)
    assert list(TrainEnvs(envs[:1])) == ["a"]


@pytest.mark.skipif(not THREADS.is_dir(), reason="threads of libraries are counted in /proc")
async def test_many_environments_share_the_threads_of_zmq(tmp_path: Path) -> None:
    """More servers than libzmq has sockets for by default, and no thread for each of their environments."""
    addresses = [f"ipc://{tmp_path}/{number}" for number in range(40)]
    envs = TrainEnvs(
        [
            TrainEnv(env_spec(name=f"e{n}", addresses=addresses, ready_timeout_s=0.1), train_settings())
            for n in range(10)
        ]
    )
    before = threads()
    try:
        await envs.spawn()
        with pytest.raises(EnvStartupError):
            await envs.connect()  # nobody listens there
        assert threads() - before <= 2
    finally:
        await envs.shutdown()


async def test_the_first_error_of_several_is_raised_as_itself() -> None:
    """Callers catch an EnvError, not a group of them; the others are cancelled."""
    cancelled = asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def fails() -> None:
        raise EnvLostError("e", "gone")

    with pytest.raises(EnvLostError):
        await side_by_side([waits(), fails()])
    assert cancelled.is_set()


async def test_an_interpreter_that_cannot_be_started_is_a_startup_error(tmp_path: Path) -> None:
    """Before anything else was started."""
    env = Env(env_spec(python=str(tmp_path), log_dir=tmp_path))
    with pytest.raises(EnvStartupError, match="cannot be started"):
        await env.spawn()
    await env.shutdown()
