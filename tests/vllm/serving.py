"""The whole service in a test's event loop, on an engine that the test may kill and start again meanwhile.

`running_service` would take the engine that was started last for something that the service has left behind.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from orchestrator.config import Config
from orchestrator.service import Service, start_service


@asynccontextmanager
async def serving(config: Config) -> AsyncIterator[Service]:
    """From start to finish; it is stopped when the block is left."""
    async with start_service(config) as service, asyncio.TaskGroup() as group:
        ended = group.create_task(service.serve())
        yield service
        service.stop.set()
        await service.finish(await ended)
