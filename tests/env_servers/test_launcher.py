"""The seam of how servers come to be, with servers that nobody starts: an address that is known late, an end that is told."""

import asyncio
import io
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from envs import wire
from orchestrator.env_servers.child_servers import ProcessLauncher
from orchestrator.env_servers.env import Env
from orchestrator.env_servers.launching import ServerLauncher
from orchestrator.env_servers.link import Link, LinkListener
from orchestrator.env_servers.on_ray.actor import packed
from orchestrator.env_servers.on_ray.cluster import RayCluster
from orchestrator.env_servers.on_ray.driver import ServerLog, options, shown
from orchestrator.env_servers.on_ray.launcher import RayLauncher
from orchestrator.env_servers.requests import RolloutRequest
from orchestrator.env_servers.supervision import ServerParts, ServerSlot
from orchestrator.errors import EnvLostError, EnvStartupError
from tests.env_servers.test_link import Ends, ScriptedServer
from tests.support.env_specs import env_spec, restart_policy
from tests.support.waiting import until


class Placed:
    """A server somewhere: a test says where, and when it ends."""

    log_path = None

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.address: asyncio.Future[str] = loop.create_future()
        self.exited: asyncio.Future[int] = loop.create_future()
        self.node = ""
        self.stopped: list[float] = []

    @property
    def running(self) -> bool:
        return not self.exited.done()

    def log_tail(self, lines: int = 20) -> str:
        return ""

    def ending(self) -> str:
        return "its node caught fire"

    async def stop(self, *, grace_s: float) -> int | None:
        self.stopped.append(grace_s)
        if self.running:
            self.exited.set_result(-9)
        return self.exited.result()


class Parts:
    """Servers that are placed by the test, and links to them as an environment opens them."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.lives: list[Placed] = []
        self._links = ServerLauncher(env_spec(id="e", addresses=("ipc:///nowhere",)), context, ())

    def start_process(self, server: str, life: int) -> Placed:
        self.lives.append(Placed())
        return self.lives[-1]

    def known_address(self, server: str) -> str:
        raise AssertionError("they are all started")

    def open_link(self, server: str, address: str, listener: LinkListener) -> Link:
        return self._links.open_link(server, address, listener)

    def check_ready(self, server: str, ready: wire.Ready) -> None: ...

    def explain(self, log_tail: str) -> tuple[str, str]:
        return "", ""


@pytest.fixture
async def context() -> AsyncIterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def slot(parts: ServerParts, reconnect_timeout_s: float = 30.0, **policy: Any) -> ServerSlot:
    return ServerSlot(
        env="e",
        name="e-0",
        launcher=parts,
        policy=restart_policy(first_delay_s=0.01, **policy),
        ready_timeout_s=30.0,
        reconnect_timeout_s=reconnect_timeout_s,
        on_credit=lambda told: None,
    )


async def test_a_server_is_connected_to_once_its_address_is_known(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """And the wait until it is ready includes the wait for a place to run."""
    address = f"ipc://{tmp_path}/a"
    server = ScriptedServer(context, address)
    parts = Parts(context)
    one = slot(parts)
    one.start()
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(one.wait_ready())
        await asyncio.sleep(0)
        assert one.link is None
        parts.lives[0].node = "10.0.0.7"
        parts.lives[0].address.set_result(address)
        assert (await waiting).tasks == {"train": 10}
    assert one.link is not None
    assert (one.link.address, one.node) == (address, "10.0.0.7")
    await one.stop(grace_s=3.0)
    assert parts.lives[0].stopped == [3.0]
    server.close()


async def test_a_server_whose_end_is_told_fails_its_requests_and_comes_back_elsewhere(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """The launcher's word ends a life like an exit does, also while its connection stands; the next has another address."""
    servers = [ScriptedServer(context, f"ipc://{tmp_path}/{life}") for life in range(2)]
    parts = Parts(context)
    one = slot(parts)
    one.start()
    parts.lives[0].address.set_result(f"ipc://{tmp_path}/0")
    await one.wait_ready()
    ends = Ends()
    assert one.link is not None
    one.link.reserve(1)
    one.link.submit(RolloutRequest("train", 0, "http://x"), ends)
    await servers[0].hears(wire.Request)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(one.run())
        parts.lives[0].exited.set_result(-9)
        [answer] = await ends.count(1)
        assert isinstance(answer, wire.Failure)
        assert (answer.kind, answer.retryable) == (wire.SERVER_LOST, True)
        assert "its node caught fire" in answer.message
        while len(parts.lives) < 2:  # noqa: ASYNC110  it is started after a pause, which nobody tells of
            await asyncio.sleep(0.01)
        parts.lives[1].address.set_result(f"ipc://{tmp_path}/1")
        await servers[1].hears(wire.Hello)
        running.cancel()
    await one.stop()
    for server in servers:
        server.close()


async def test_a_server_that_ends_before_it_has_an_address_is_a_startup_error(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    """With the launcher's reason; and without restarts left it is lost."""
    parts = Parts(context)
    one = slot(parts, max_restarts=0)
    one.start()
    parts.lives[0].exited.set_result(-9)
    with pytest.raises(EnvStartupError, match="did not start: its node caught fire"):
        await one.wait_ready()
    with pytest.raises(EnvLostError, match="its node caught fire"):
        await one.run()


class Elsewhere(ServerLauncher):
    """A server that runs elsewhere, at an address where nobody answers."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        super().__init__(env_spec(id="e", addresses=("ipc:///nowhere",)), context, ())
        self.tries = 0

    def open_link(self, server: str, address: str, listener: LinkListener) -> Link:
        self.tries += 1
        return super().open_link(server, address, listener)


async def test_a_dead_server_elsewhere_never_ends_the_run_by_itself(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    """However often it was away for longer than it may be: the others may be back in a moment."""
    parts = Elsewhere(context)
    one = slot(parts, reconnect_timeout_s=0.01, max_restarts=1, max_delay_s=0.01)
    one.connect()
    running = asyncio.create_task(one.run())
    assert one.link is not None
    one.link.lose("the network is gone")
    await until(lambda: parts.tries >= 5 or running.done())
    assert not running.done()
    running.cancel()
    await one.stop()


def cluster(tmp_path: Path) -> RayCluster:
    return RayCluster(address=None, runtime_env={}, withheld=frozenset(), log_dir=tmp_path)


async def test_servers_that_others_can_reach_have_keys_of_the_run_and_the_usual_lease(tmp_path: Path) -> None:
    """Children of ours need neither; no two environments share a key."""
    ray = cluster(tmp_path)
    made = [RayLauncher(env_spec(ray=ray, lease_s=15.0), ray) for _ in range(2)]
    assert made[0].lease_s == 15.0
    assert len({key for one in made for key in (one.keys.own.public, one.keys.server)}) == 4
    here = ProcessLauncher(env_spec())
    assert (here.keys, here.lease_s) == (None, 600.0)
    for one in made:
        await one.aclose()
    await here.aclose()


@pytest.mark.timeout(600)
async def test_without_ray_servers_on_it_do_not_start_and_nothing_is_left(tmp_path: Path) -> None:
    """The reason comes from the driver process, which ends; the servers get the same one."""
    env = Env(env_spec(ray=cluster(tmp_path), workers=2, log_dir=tmp_path, resources={"CPU": 1.0}))
    with pytest.raises(EnvStartupError, match="Ray on this machine cannot be used: No module named 'ray'"):
        async with env:
            pass
    assert {path.name for path in await asyncio.to_thread(lambda: list(tmp_path.iterdir()))} == {"ray.log"}


MUTE = """
import time

class cloudpickle:
    register_pickle_by_value = print

def init(**_):
    time.sleep(1000)
"""


@pytest.mark.timeout(600)
async def test_a_cluster_that_does_not_answer_is_given_up_and_tried_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray blocks for as long as it likes; the servers get the reason, nothing is left, and the next one has a new driver."""
    (tmp_path / "mute").mkdir()
    (tmp_path / "mute" / "ray.py").write_text(MUTE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "mute"))
    ray = RayCluster(
        address="10.0.0.1:6379",
        runtime_env={},
        withheld=frozenset(),
        log_dir=tmp_path,
        connect_within_s=0.5,
    )
    launcher = RayLauncher(env_spec(ray=ray, log_dir=tmp_path, resources={"CPU": 1.0}), ray)
    for life in range(2):
        server = launcher.start("e-0", life)
        await asyncio.wait([server.exited])
        assert server.ending().startswith(
            "Ray at 10.0.0.1:6379 has not answered in 0.5 s; does the cluster run"
        )
    await launcher.aclose()


def test_ray_is_asked_for_what_a_server_takes_up() -> None:
    """Ray knows some resources under names of their own; the rest are the cluster's. The service restarts, not Ray."""
    asked = options({"CPU": 2.0, "GPU": 0.5, "sandbox": 1.0})
    assert asked["num_cpus"] == 2.0
    assert asked["num_gpus"] == 0.5
    assert asked["resources"] == {"sandbox": 1.0}
    assert (asked["scheduling_strategy"], asked["max_restarts"]) == ("SPREAD", 0)
    assert options({"sandbox": 1.0})["num_cpus"] == 0
    assert (shown({"CPU": 2.0, "x": 0.5}), shown({})) == ("CPU = 2, x = 0.5", "anything")


def test_the_log_of_a_server_elsewhere_is_kept_within_a_bound(tmp_path: Path) -> None:
    """The full file becomes the old one, as for servers of this machine."""
    with ServerLog(tmp_path / "logs" / "e-0.log", 10) as log:
        for part in (b"first\n", b"second\n", b"third\n"):
            log.write(part)
    assert (tmp_path / "logs" / "e-0.log").read_bytes() == b"third\n"
    assert (tmp_path / "logs" / "e-0.old.log").read_bytes() == b"first\nsecond\n"


def test_a_package_is_sent_without_what_the_interpreter_left_in_it(tmp_path: Path) -> None:
    """Under its own name, so that the archive's directory is a place to import from."""
    (tmp_path / "package" / "__pycache__").mkdir(parents=True)
    (tmp_path / "package" / "__pycache__" / "x.pyc").touch()
    (tmp_path / "package" / "one.py").write_text("ONE = 1\n")
    with zipfile.ZipFile(io.BytesIO(packed(tmp_path / "package"))) as archive:
        assert archive.namelist() == ["package/one.py"]
