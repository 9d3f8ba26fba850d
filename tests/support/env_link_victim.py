"""The link to an env server in a process of its own, which can be attacked: `python -m tests.support.env_link_victim ADDRESS`.

For every pair of lines on stdin its event loop is blocked, as by a long computation, between the first and the second;
then it takes in what came meanwhile and prints how many messages that were so far.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

import structlog

from orchestrator.env_servers.env import Env
from tests.support.env_specs import env_spec


async def main(address: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        env = Env(env_spec(addresses=(address,), log_dir=Path(directory), ready_timeout_s=600.0))
        await env.spawn()
        async with asyncio.TaskGroup() as group:
            connecting = group.create_task(env.connect())
            while (link := env._slots[0].link) is None:  # noqa: ASYNC110  the connection is opened in a few turns
                await asyncio.sleep(0)
            for _ in sys.stdin:
                print("busy", flush=True)
                sys.stdin.readline()
                # Every turn of the loop takes in 64 messages.
                for _ in range(1000):
                    await asyncio.sleep(0)
                print(link.counts.malformed, flush=True)
            connecting.cancel()
        await env.shutdown()


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    asyncio.run(main(sys.argv[1]))
