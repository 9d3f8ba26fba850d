"""A client that connects while a server is being closed."""

import asyncio
import socket
from contextlib import AbstractAsyncContextManager
from urllib.parse import urlsplit

TURNS = range(-6, 7)
"""Turns of the event loop from the end of the server's block at which clients connect."""


async def is_let_go(serving: AbstractAsyncContextManager[str], turns: int) -> bool:
    """Whether a client that connects so many turns after the end of the block, or before it, is refused or disconnected."""

    async def connect(address: tuple[str, int]) -> bool:
        for _ in range(turns):
            await asyncio.sleep(0)
        with socket.socket() as client:
            try:
                client.connect(address)
                client.setblocking(False)
                async with asyncio.timeout(5):
                    return not await asyncio.get_running_loop().sock_recv(client, 1)
            except (ConnectionRefusedError, ConnectionResetError):
                return True
            except TimeoutError:
                return False

    async with serving as url:
        parts = urlsplit(url)
        assert parts.hostname
        assert parts.port
        client = asyncio.create_task(connect((parts.hostname, parts.port)))
        for _ in range(-turns):
            await asyncio.sleep(0)
    return await client
