"""A trainer link in a process of its own, which can be attacked: `python -m tests.support.trainer_server_victim`.

It prints its port and offers a new batch whenever one was acknowledged. A line on stdin names a FIFO: the event loop
is blocked, as by a long computation, until somebody has opened the FIFO for writing and closed it.
"""

import asyncio
import sys
from pathlib import Path

import structlog

from orchestrator.trainer_link.server import BatchServer
from tests.support.journal_groups import make_batch
from tests.support.trainer_links import make_server


async def main() -> None:
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    server: BatchServer = make_server(
        bind="tcp://127.0.0.1:*",
        world_size=1,
        probe_s=0.05,
        on_ack=lambda step: loop.call_soon(server.offer, make_batch(step + 1)),
    )
    async with server:
        server.offer(make_batch(1))
        print(server.address.rpartition(":")[2], flush=True)
        while line := await lines.readline():
            print("held", flush=True)
            # Nothing is read now: what comes stays in libzmq.
            Path(line.decode().strip()).read_bytes()  # noqa: ASYNC240
            print("released", flush=True)


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    asyncio.run(main())
