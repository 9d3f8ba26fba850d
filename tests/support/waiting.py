"""Waiting for what will come true, where the thing that is waited for has no event of its own."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object]) -> None:
    """Return when the condition holds; the test's time limit is the bound."""
    while not condition():  # noqa: ASYNC110 # see the module's docstring
        await asyncio.sleep(0.005)
