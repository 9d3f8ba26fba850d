"""The whole service over hosts of its own: what the crash tests prove, proved over a network that breaks.

The orchestrator, two env servers with CURVE keys, an inference server and a trainer of two ranks run on five hosts. A
third environment runs on the orchestrator's host, so that there is work whichever other link is cut.
"""

import asyncio
import contextlib
import json
import os
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from envs import Model, Rollout, Task
from envs.curve import generate_pair
from envs.server_spec import ServerSpec
from orchestrator.env_servers.child_servers import server_command
from orchestrator.env_servers.processes import ChildProcess
from orchestrator.local.policy import Policy
from orchestrator.local.server import PolicyServerSpec
from tests.integration.env_servers import ROOT
from tests.integration.envs_for_tests import Ranked, dice_rollout
from tests.integration.recording_trainer import TrainerRecord, TrainerSpec
from tests.integration.service_fixture import Command, TrainerProcess, env, settings, write_config
from tests.integration.test_crash import BATCH, RANKS, SEED, World
from tests.support.network import Network

HOSTS = ("orchestrator", "chat", "ranked", "engine", "trainer")
LINKS = (
    ("orchestrator", "chat"),
    ("orchestrator", "ranked"),
    ("orchestrator", "engine"),
    ("orchestrator", "trainer"),
    ("chat", "engine"),
)
"""Every pair of hosts that speak to each other."""

LONG = 5
"""Every fifth task of `Marked` is a long one."""

ENOUGH = 10
"""Steps after which there is enough to prove something with, however little was trained while links were cut."""


class Marked(Ranked):
    """Each rollout has a mark among its tokens; those of rollouts that were cancelled are noted.

    Long tasks take `long_s`. Half of the rollouts do not let themselves be stopped: cancelled, they bring their
    result all the same, which nobody may train on.
    """

    def __init__(self, *, cancelled: str, long_s: float, **options: Any) -> None:
        super().__init__(**options)
        self._cancelled = Path(cancelled)
        self._long_s = long_s

    async def rollout(self, task: Task, model: Model) -> Rollout:
        mark = random.SystemRandom().randrange(2**31)
        try:
            rollout = await super().rollout(task, model)
        except asyncio.CancelledError:
            with self._cancelled.open("a", encoding="utf-8") as file:
                file.write(f"{mark}\n")
            if mark % 2:
                raise
            rollout = dice_rollout(task["index"])
        rollout.sequences[0].tokens[1] = mark
        return rollout

    async def attempt(self, task: Task, model: Model) -> Rollout:
        if task["index"] % LONG == 0:
            await asyncio.sleep(self._long_s)
        return dice_rollout(task["index"])


class NetworkWorld(World):
    """A run whose parts are on hosts of their own."""

    def __init__(self, directory: Path, network: Network, **sections: Any) -> None:
        # All that the proofs need; what is elsewhere, and the configuration, are replaced below.
        super().__init__(directory, directory, "http://nowhere/v1", (4, 4, 4))
        self.network = network
        self.cancelled = directory / "ranked.cancelled"
        self.cancelled.touch()
        self.address = f"tcp://{network['orchestrator'].address}:5555"
        self.elsewhere = {name: f"tcp://{network[name].address}:6000" for name in ("chat", "ranked")}
        self.weights = Policy().save(directory / "weights")
        self._ours, self._theirs = generate_pair(), generate_pair()
        (directory / "server.public").write_text(self._theirs.public)
        (directory / "client.secret").write_text(self._ours.secret)
        (directory / "client.secret").chmod(0o600)
        self.config = write_config(directory / "config.toml", self._settings(sections))

    def _settings(self, sections: dict[str, Any]) -> dict[str, Any]:
        patience = sections.pop("patience", {})
        keys = {
            "server_key_file": str(self.directory / "server.public"),
            "secret_key_file": str(self.directory / "client.secret"),
        }
        elsewhere: dict[str, dict[str, Any]] = {
            name: {"addresses": [where], **keys} for name, where in self.elsewhere.items()
        }
        envs = [
            env("Chat", **elsewhere["chat"], **patience),
            {"id": f"{__name__}:Marked", "name": "ranked", **elsewhere["ranked"], **patience},
            env("Flaky", args=self._args("flaky", 0.01)),
        ]
        dispatch = {
            "max_inflight": 48,
            "ramp_s": 0.0,
            "backoff_s": 0.2,
            "keep_equal_rewards": True,
            **sections.pop("dispatch", {}),
        }
        return settings(
            self.run_dir,
            f"http://{self.network['engine'].address}:8000/v1",
            envs,
            seed=SEED,
            batch={"size": BATCH},
            dispatch=dispatch,
            inference={
                "base_urls": [f"http://{self.network['engine'].address}:8000/v1"],
                "weight_update": "vllm",
                "check_weights": False,
                **sections.pop("inference", {}),
            },
            trainer={"bind": self.address, "world_size": RANKS, "keep_batches": 2, "insecure": True},
            http={"port": 8600},
            journal={"commit_interval_s": 0.02},
            **sections,
        )

    async def start(self) -> Command:
        program = [
            *self.network["orchestrator"].prefix,
            str(Path(sys.executable).with_name("orchestrator")),
        ]
        return await Command.start("run", self.config, logs=self.directory / "logs", program=program)

    def trainer(self, rank: int, **fields: Any) -> TrainerSpec:
        return super().trainer(rank, weights=str(self.weights), **fields)

    @asynccontextmanager
    async def trainers(self) -> AsyncIterator[None]:
        prefix = self.network["trainer"].prefix
        async with AsyncExitStack() as stack:
            for rank in range(RANKS):
                process = await TrainerProcess.start(self.trainer(rank), prefix=prefix)
                await stack.enter_async_context(process)
            yield

    def start_server(self, kind: str, latency_s: float, *, long_s: float = 0.0) -> ChildProcess:
        name = {"Marked": "ranked"}.get(kind, kind.lower())
        args = self._args(name, latency_s)
        if kind == "Marked":
            args |= {"cancelled": str(self.cancelled), "long_s": long_s}
        spec = ServerSpec(
            name=name,
            id=f"{__name__}:Marked" if kind == "Marked" else env(kind)["id"],
            bind=self.elsewhere[name],
            args=args,
            curve_secret=self._theirs.secret,
            curve_public=self._theirs.public,
            curve_clients=[self._ours.public],
        )
        return self._child(name, server_command(sys.executable), msgspec.json.encode(spec), kept=True)

    def start_engine(self) -> ChildProcess:
        spec = PolicyServerSpec(host=self.network["engine"].address, port=8000, latency_s=0.02)
        command = [sys.executable, "-m", "orchestrator.local.server"]
        return self._child("engine", command, msgspec.json.encode(spec), kept=False)

    def _child(self, host: str, command: list[str], spec: bytes, *, kept: bool) -> ChildProcess:
        return ChildProcess(
            [*self.network[host].prefix, *command],
            kept=kept,
            first_line=spec + b"\n",
            log_path=self.directory / "logs" / f"{host}.log",
            environ={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    async def status(self) -> dict[str, Any]:
        """What the run says of itself."""
        host = self.network["orchestrator"]
        body = await asyncio.to_thread(host.get, "http://127.0.0.1:8600/api/status")
        found: dict[str, Any] = json.loads(body)
        return found

    async def says(self, command: Command, kinds: Collection[str], name: str) -> None:
        """Wait until the run says that it waits for something of these kinds, with this name in it."""
        while True:
            with contextlib.suppress(OSError):
                waits = (await self.status())["waits"]
                if any(wait["kind"] in kinds and name in wait["text"] for wait in waits):
                    return
            assert command.process.returncode is None, f"the orchestrator ended:\n{command.errors()[-3000:]}"
            await asyncio.sleep(0.1)

    def check_versions(self, record: TrainerRecord) -> None:
        """A version that no engine could be given is refused, and the next one takes its place; none ever goes back."""
        versions = [record.batches[key]["version"] for key in sorted(record.batches)]
        assert versions == sorted(versions)
        assert all(line["version"] < step for (step, _), line in record.batches.items())

    def prove(self) -> TrainerRecord:
        """What the crash tests prove; and no rollout whose lease had ended was trained on, nor any twice."""
        record = super().prove()
        marks: Counter[int] = Counter()
        for line in record.batches.values():
            if line["groups"].keys() and any(name.startswith("ranked/") for name in line["groups"]):
                marks.update(mark for mark in line["marks"] if mark >= 1000)
        cancelled = set(map(int, self.cancelled.read_text().split()))
        assert not cancelled & marks.keys(), "a rollout that was cancelled was trained on"
        assert {mark for mark, times in marks.items() if times > 1} == set(), "a rollout was trained on twice"
        twice = {key for key, times in record.served.items() if times > 1}
        assert not twice, f"a rank that never died was given a batch twice: {sorted(twice)}"
        return record

    def too_many(self) -> int:
        """What one batch holds, whenever a version was published again that no engine could load.

        Its network was cut, so that rank 0 repeats what it got no answer for; older work had a batch more meanwhile.
        """
        refused, again = set[int](), 0
        for line in (self.run_dir / "logs" / "orchestrator.log").read_text().splitlines():
            event = json.loads(line)
            if event["event"] == "version.refused":
                refused.add(event["version"])
            elif event["event"] == "trainer.version_published" and event["version"] in refused:
                refused.remove(event["version"])
                again += 1
        return again * BATCH // 4

    def long_ones(self) -> int:
        """How many long rollouts `Marked` has been asked for so far."""
        return sum(int(index) % LONG == 0 for index in self.asked["ranked"].read_text().split())

    def stopped(self) -> int:
        """How many rollouts were cancelled on the server of `Marked` so far."""
        return len(self.cancelled.read_text().split())


@asynccontextmanager
async def network_world(
    directory: Path, *, long_s: float = 0.0, **sections: Any
) -> AsyncIterator[tuple[NetworkWorld, Command]]:
    """The run under way, everything on its host; ended and proved when the block is left in good order.

    `long_s`: what the long rollouts of `Marked` take.
    """
    with Network(*HOSTS, seed=1) as network:
        world = NetworkWorld(directory, network, **sections)
        children = [
            world.start_engine(),
            world.start_server("Chat", 0.01),
            world.start_server("Marked", 0.3, long_s=long_s),
        ]
        try:
            async with await world.start() as command, world.trainers():
                await command.wait_event("run.started")
                await world.trained(command, 2)
                yield world, command
                resolved = world.resolved()
                await world.trained(command, max(world.record().last_step + 3, ENOUGH))
                await world.caught_up(command, resolved)
                await world.end(command)
        finally:
            for child in children:
                await child.stop(grace_s=5.0)
    world.prove()
