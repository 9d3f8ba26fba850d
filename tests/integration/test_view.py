"""`orchestrator view` as a user runs it: it prints an address, serves the page of a run that is over, and ends with Ctrl-C."""

import asyncio
import json
import re
import signal
from pathlib import Path

import aiohttp

from tests.integration.service_fixture import Command
from tests.support.recorded_run import write_run


async def test_view_serves_the_page_of_a_run_that_is_over_until_ctrl_c(tmp_path: Path) -> None:
    """The page, its first event and its rollouts come from the directory alone; nothing is left behind."""
    run_dir = write_run(tmp_path / "mine")
    async with await Command.start("view", run_dir, logs=tmp_path / "logs") as command:
        while not (
            found := re.search(r"mine: (http://127\.0\.0\.1:\d+)", command.stdout.read_text(encoding="utf-8"))
        ):
            assert command.process.returncode is None, command.errors()
            await asyncio.sleep(0.02)
        address = found.group(1)
        async with aiohttp.ClientSession(read_bufsize=2**24) as session:
            async with session.get(address) as reply:
                assert (reply.status, reply.content_type) == (200, "text/html")
            async with session.get(f"{address}/api/rollouts?env=code") as reply:
                assert len((await reply.json())["groups"]) == 12
            async with session.get(f"{address}/api/events") as reply:
                event = json.loads((await reply.content.readuntil(b"\n\n")).removeprefix(b"data: "))
                assert (event["status"]["state"], event["series"]["last"]) == ("ended", 12)
                # An open page does not hold the end up.
                command.send(signal.SIGINT)
                assert await command.wait() == 0
        assert not command.processes()
