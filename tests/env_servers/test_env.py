"""Environments before any server runs: restart budgets, declarations, private directories, containers."""

import asyncio
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from envs import wire
from envs.curve import off_loopback
from orchestrator.env_servers.env import Env, EnvSpec, EvalEnv, NoRoomError, TrainEnv, TrainEnvs, side_by_side
from orchestrator.env_servers.launching import PrivateDirectory, ServerLauncher
from orchestrator.env_servers.requests import RolloutRequest
from orchestrator.env_servers.supervision import RestartBudget, RestartPolicy
from orchestrator.errors import EnvError, EnvLostError, EnvProtocolError, EnvStartupError


def test_restarts_pause_twice_as_long_each_time_until_the_budget_is_used_up() -> None:
    """A server that dies in a loop is restarted ever later, and then no more."""
    budget = RestartBudget(RestartPolicy(max_restarts=4, window_s=100, first_delay_s=1, max_delay_s=3))
    assert [budget.next_delay_s(now) for now in (0, 1, 2, 3, 4)] == [1, 2, 3, 3, None]


def test_old_restarts_are_forgiven() -> None:
    """Only those within the window count, so a run of weeks survives a crash a day."""
    budget = RestartBudget(RestartPolicy(max_restarts=2, window_s=100, first_delay_s=1))
    assert [budget.next_delay_s(now) for now in (0, 50, 99, 100, 149, 150)] == [1, 2, None, 2, None, 2]


def test_no_restarts_means_none() -> None:
    """A budget of zero gives the first death up."""
    assert RestartBudget(RestartPolicy(max_restarts=0)).next_delay_s(0) is None


@pytest.fixture
def launcher() -> Iterator[Callable[..., ServerLauncher]]:
    made: list[ServerLauncher] = []
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def make(**fields: Any) -> ServerLauncher:
        made.append(ServerLauncher(EnvSpec(**({"name": "e", "id": "reverse"} | fields)), context, ()))
        return made[-1]

    yield make
    for one in made:
        one.close()
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
    assert off_loopback(address) is off
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
    monkeypatch.setattr("orchestrator.env_servers.launching._TEMP_PATH_BYTES", 10_000)
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


async def test_what_is_not_connected_says_so() -> None:
    """Nothing about an environment is guessed before its servers have declared it."""
    env = EvalEnv(EnvSpec(name="e", id="reverse"))
    with pytest.raises(EnvError, match="not connected"):
        _ = env.num_tasks
    with pytest.raises(NoRoomError):
        env.submit(RolloutRequest("train", 0, "http://x"), lambda request, outcome: None)
    assert (env.free, env.inflight, env.available, env.stats()) == (0, 0, False, {})
    await env.shutdown()


def test_names_are_unique() -> None:
    """Two environments of one name would share their log files and their place in every table."""
    envs = [TrainEnv(EnvSpec(name="a", id="reverse")), TrainEnv(EnvSpec(name="a", id="larger"))]
    with pytest.raises(ValueError, match="more than one is called a"):
        TrainEnvs(envs)
    assert list(TrainEnvs(envs[:1])) == ["a"]


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
    env = Env(EnvSpec(name="e", id="reverse", python=str(tmp_path), log_dir=tmp_path))
    with pytest.raises(EnvStartupError, match="cannot be started"):
        await env.spawn()
    await env.shutdown()
