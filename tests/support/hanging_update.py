"""A weight update that never ends, as a user's own recipe may be."""

import asyncio

from orchestrator.inference.recipe import UpdateRequest


async def hang(request: UpdateRequest) -> None:
    """Load nothing, for ever."""
    await asyncio.Event().wait()
