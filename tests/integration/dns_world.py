"""A whole run in a network namespace whose names change every second: `python -m tests.integration.dns_world DIRECTORY`.

The name server is the program's own. Servers and engines have the same ports at different addresses of 127.0.0.0/8, as pods
have. Answers are random parts of those that are there, in between there is no such name, a resolver that fails, and
one that is silent; now and then a server is out of every answer for so long that it leaves. The orchestrator is killed
once. In the end the books of the trainers are held against the journal, as in the crash tests.
"""

import asyncio
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from orchestrator.env_servers.processes import ChildProcess
from orchestrator.local.server import PolicyServerSpec, serve
from tests.integration.env_servers import until
from tests.integration.test_crash import World
from tests.support.dns import NXDOMAIN, SERVFAIL, TinyDns, serve_dns

NAMES = {"chat": "chat.rl.test", "ranked": "ranked.rl.test", "engines": "vllm.rl.test"}
NUMBERS = {
    "chat": [f"127.0.1.{n}" for n in range(1, 4)],
    "ranked": [f"127.0.2.{n}" for n in range(1, 4)],
    "engines": [f"127.0.3.{n}" for n in range(1, 4)],
}


class NamedWorld(World):
    """The world of the crash tests behind names."""

    def __init__(self, directory: Path, dns: TinyDns) -> None:
        super().__init__(directory, directory, "http://127.0.0.1:9/v1", (4, 4, 4))
        self.dns = dns
        text = self.config.read_text().replace(
            '["http://127.0.0.1:9/v1"]', '"dns+http://vllm.rl.test:8000/v1"'
        )
        for name, address in self.elsewhere.items():
            text = text.replace(f'["{address}"]', f'"dns+tcp://{name}.rl.test:7000", insecure = true')
        self.config.write_text(text)
        self.out: dict[str, str] = {}
        """Who is in no answer, of each name."""

    def start_at(self, kind: str, number: str) -> ChildProcess:
        self.elsewhere[kind.lower()] = f"tcp://{number}:7000"
        return self.start_server(kind, 0.02)

    def answer(self, rng: random.Random) -> None:
        """What the names answer for the next second."""
        for name, numbers in NUMBERS.items():
            there = [number for number in numbers if number != self.out.get(name)]
            part = rng.sample(there, rng.randrange(1, len(there) + 1))
            way = rng.random()
            trouble: list[list[str] | int | None] = [NXDOMAIN, SERVFAIL, None, []]
            self.dns.zone[NAMES[name]] = part if way < 0.85 else rng.choice(trouble)

    async def keep_changing(self, rng: random.Random) -> None:
        for second in range(10**9):
            if second % 25 == 0:
                self.out = {name: rng.choice(numbers) for name, numbers in NUMBERS.items()}
            self.answer(rng)
            await asyncio.sleep(1.0)


@asynccontextmanager
async def named_world(directory: Path) -> AsyncIterator[NamedWorld]:
    async with AsyncExitStack() as stack:
        dns = await serve_dns("127.0.0.1", 53)
        stack.callback(dns.close)
        for number in NUMBERS["engines"]:
            await stack.enter_async_context(serve(PolicyServerSpec(host=number, port=8000)))
        world = NamedWorld(directory, dns)
        servers = [
            world.start_at(kind, number) for kind in ("Chat", "Ranked") for number in NUMBERS[kind.lower()]
        ]
        try:
            yield world
        finally:
            for server in servers:
                await server.stop(grace_s=0)


async def main(directory: Path) -> None:
    rng = random.Random(5)
    async with named_world(directory) as world, world.trainers(), asyncio.TaskGroup() as group:
        changing = group.create_task(world.keep_changing(rng))
        async with await world.start() as command:
            await command.wait_event("env.server_left", 2)
            await command.wait_event("endpoint.removed", 1)
            await world.trained(command, 5)
            command.send(signal.SIGKILL)
            await command.wait()
            await until(lambda: not command.processes())
        before = world.resolved()
        async with await world.start() as command:
            await command.wait_event("run.started")
            joined = len(command.events("env.server_joined"))
            await command.wait_event("env.server_joined", joined + 1)
            changing.cancel()
            world.out.clear()
            for name, numbers in NUMBERS.items():
                world.dns.zone[NAMES[name]] = numbers
            await world.trained(command, world.record().last_step + 5)
            await world.caught_up(command, before)
            await world.end(command)
        record = world.prove()
    assert record.last_step > 10
    print(f"{record.last_step} steps, {world.dns.asked} questions")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
