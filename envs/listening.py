"""The end of a listening socket, with nothing left over of what it has accepted.

An event loop makes a connection of what it accepts some turns later. A server that closes its connections before that
leaves one open which nobody serves, whose client waits in vain; and asyncio's own loop, if the socket is closed in
between, drops what it has accepted without closing it.
"""

import asyncio

_TURNS = 4
"""One to begin the task that makes the connection, one to tell the protocol, one to begin reading; and one more."""


async def stop_listening(server: asyncio.Server) -> None:
    """Afterwards all connections there will ever be are known to the server's protocols."""
    loop = asyncio.get_running_loop()
    for listener in server.sockets:
        loop.remove_reader(listener.fileno())
    await _let_connections_be_made()
    server.close()
    # uvloop accepts until here.
    await _let_connections_be_made()


async def _let_connections_be_made() -> None:
    for _ in range(_TURNS):
        await asyncio.sleep(0)
