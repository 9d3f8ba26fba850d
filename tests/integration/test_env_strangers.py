"""Peers of env servers, and env servers, that break the rules of ZMTP: no process ends inside libzmq."""

import asyncio
import os
import socket
import sys
from pathlib import Path

from orchestrator.env_servers.env import Env
from tests.integration.env_servers import (
    ROOT,
    Asked,
    request,
    result,
    spec,
    start_server,
    stop_started,
    supervised,
    until,
)
from tests.support.ports import free_port
from tests.support.zmtp_attacker import accept, connection, fill_and_reset

SERVER_HELD, LINK_HELD = 1002, 10_000
"""Messages at which either side, unread, once stopped taking in more."""


async def test_floods_and_resets_while_an_environment_blocks_do_not_end_its_server(tmp_path: Path) -> None:
    """The environment holds the event loop, so that libzmq has to hold what comes; the rollout ends well."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    identity = "tests.integration.liveness_envs:Held"
    args = {"fifo": str(fifo)}
    try:
        server = start_server(tmp_path, address, id=identity, args=args, capacity=1)
        async with supervised(Env(spec(tmp_path, id=identity, addresses=(address,)))) as env:

            def malformed() -> int:
                """Messages without sense that the server says it has seen."""
                [stats] = env.stats().values()
                assert server.running
                return 0 if stats is None else stats.malformed

            seen = 0
            for _ in range(3):
                asked = Asked(env)
                asked.submit(request(0))
                # Returns when the environment reads: from now on the server takes nothing in.
                writer = await asyncio.to_thread(os.open, fifo, os.O_WRONLY)
                with connection(port) as peer:
                    await asyncio.to_thread(fill_and_reset, peer, SERVER_HELD)
                os.close(writer)
                assert result((await asked.wait())[0]).rollouts
                seen += SERVER_HELD
                await until(lambda: malformed() >= seen - 500)  # noqa: B023  awaited at once
            assert env.restarts == 0
    finally:
        await stop_started()


async def test_an_env_server_that_floods_and_resets_does_not_end_the_orchestrator() -> None:
    """Also while its event loop is busy, so that libzmq has to hold what comes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.support.env_link_victim",
            f"tcp://127.0.0.1:{listener.getsockname()[1]}",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            for _ in range(3):
                process.stdin.write(b"compute\n")
                assert await process.stdout.readline() == b"busy\n"
                with await asyncio.to_thread(accept, listener) as peer:
                    await asyncio.to_thread(fill_and_reset, peer, LINK_HELD)
                process.stdin.write(b"look\n")
                # libzmq forgets what a connection brought that is gone; some of it was read before.
                assert int(await process.stdout.readline()) >= 0
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()
