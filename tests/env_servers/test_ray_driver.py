"""What the Ray driver keeps of what a server says, with a stand-in for the actor; the real one is in tests/adapters."""

import concurrent.futures
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from orchestrator.env_servers.on_ray.driver import Driver
from orchestrator.env_servers.on_ray.messages import DriverSpec, Ended, Listening, Start, ToService

CHUNK = bytes(1 << 20)


class Talkative:
    """A server that listens and then draws a progress bar, which has no end of a line."""

    def __init__(self, chunks: int) -> None:
        self._left = chunks
        self._said = [b'{"event": "server.listening", "address": "tcp://10.0.0.1:7000"}\n']
        self.start = SimpleNamespace(remote=self._start)
        self.output = SimpleNamespace(remote=self._output)

    def _start(self, *_: object) -> Any:
        placed: concurrent.futures.Future[str] = concurrent.futures.Future()
        placed.set_result("10.0.0.1")
        return SimpleNamespace(future=lambda: placed)

    async def _output(self) -> tuple[bytes, int | None]:
        if self._said:
            return self._said.pop(), None
        self._left -= 1
        return CHUNK, None if self._left else 0


def order_of(tmp_path: Path) -> Start:
    return Start(
        key=0,
        server="e-0",
        instructions=b"",
        python=None,
        path=[],
        environ={},
        resources={},
        log=str(tmp_path / "e.log"),
    )


async def test_a_server_that_never_ends_its_line_takes_no_memory_of_the_drivers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its output goes to its log; of a line without an end nothing is kept once the address is known."""
    told: list[ToService] = []
    spec = DriverSpec(control=f"ipc://{tmp_path}/c", address=None, runtime_env={}, log_bytes=len(CHUNK))
    with zmq.Context() as context:
        driver = Driver(spec, context)
        monkeypatch.setattr(driver, "tell", told.append)
        made = driver._actors[0] = Talkative(40)
        tracemalloc.start()
        try:
            await driver._serve(SimpleNamespace(kill=print), made, None, order_of(tmp_path))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            driver.close()
    assert told[0] == Listening(0, "tcp://10.0.0.1:7000", "10.0.0.1")
    assert peak < 8 * len(CHUNK)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
async def test_a_full_disk_costs_a_servers_log_and_not_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is heard and followed to its own end."""
    (tmp_path / "e.log").symlink_to("/dev/full")
    told: list[ToService] = []
    spec = DriverSpec(control=f"ipc://{tmp_path}/c", address=None, runtime_env={}, log_bytes=len(CHUNK))
    with zmq.Context() as context:
        driver = Driver(spec, context)
        monkeypatch.setattr(driver, "tell", told.append)
        made = driver._actors[0] = Talkative(2)
        await driver._serve(SimpleNamespace(kill=print), made, None, order_of(tmp_path))
        driver.close()
    assert told == [Listening(0, "tcp://10.0.0.1:7000", "10.0.0.1"), Ended(0, 0)]
