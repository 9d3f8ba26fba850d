"""Many inference servers in one process, with ports of their own: `python -m benchmarks._stub_engines COUNT` prints their URLs."""

import asyncio
import sys
from contextlib import AsyncExitStack

import uvloop

from orchestrator.local.server import PolicyServerSpec, serve


async def main(count: int) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(count):
            print(await stack.enter_async_context(serve(PolicyServerSpec())), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
