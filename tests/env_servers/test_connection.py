"""The end of a connection, at a moment that is hard to meet: the other end goes while it is closed."""

import subprocess
import sys
from pathlib import Path

CLOSING = """
import asyncio, sys, time
import zmq
from orchestrator.env_servers.connection import Connection

async def main(address):
    context = zmq.Context()
    server = context.socket(zmq.ROUTER)
    server.bind(address)
    stands = asyncio.Event()
    connection = Connection(
        address, context=context, keys=None, on_frames=print, on_connected=stands.set, on_disconnected=print
    )
    await stands.wait()
    close_monitor = connection._monitor.close

    def close_while_the_server_goes():
        close_monitor()
        server.close(0)
        time.sleep(0.3)

    connection._monitor.close = close_while_the_server_goes
    connection.close()
    context.term()

asyncio.run(main(sys.argv[1]))
"""


def test_a_server_that_goes_while_its_connection_is_closed_blocks_nothing(tmp_path: Path) -> None:
    """libzmq has one thread for all connections; it must never wait for somebody to take an event of a closed one."""
    # In a process of its own: what blocks there can neither be interrupted nor cleared away.
    command = [sys.executable, "-c", CLOSING, f"ipc://{tmp_path}/s"]
    assert subprocess.run(command, timeout=120, check=False).returncode == 0
