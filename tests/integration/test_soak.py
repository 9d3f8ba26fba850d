"""The whole service for a long time: it neither grows nor slows to a standstill. SOAK_S says for how many seconds."""

import asyncio
import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from orchestrator.local.server import run_policy_server
from tests.integration.env_servers import until
from tests.integration.recording_trainer import TrainerSpec, read_records
from tests.integration.service_fixture import Command, TrainerProcess, env, settings, write_config

SOAK_S = float(os.environ.get("SOAK_S", "60"))
BATCH = 16
MAX_GROWTH_BYTES = 32 * 2**20
"""Of memory behind the first third: caches fill, and an allocator keeps what it had at its peak."""
MAX_JOURNAL_BYTES = 512 * 2**20
"""Far more than the queue and the kept batches of this run need, far less than an hour of payloads."""


class Figures:
    """What a process holds now."""

    def __init__(self, pid: int, run_dir: Path) -> None:
        status = Path(f"/proc/{pid}/status").read_text()
        self.memory_bytes = int(status.partition("VmRSS:")[2].split()[0]) * 1024
        self.descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        self.journal_bytes = 0
        for path in (run_dir / "journal").rglob("*"):
            with suppress(FileNotFoundError):  # given back while it was looked at
                self.journal_bytes += path.stat().st_size if path.is_file() else 0


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 300)
async def test_a_long_run_neither_grows_nor_stands_still(tmp_path: Path) -> None:
    """Memory, descriptors and the journal stay bounded, steps keep coming, and nothing is lost on the way."""
    run_dir = tmp_path / "run"
    with tempfile.TemporaryDirectory(dir="/tmp") as sockets:
        address, record = f"ipc://{sockets}/trainer", tmp_path / "rank-0.jsonl"
        async with run_policy_server() as base_url:
            config = write_config(
                tmp_path / "config.toml",
                settings(
                    run_dir,
                    base_url,
                    [env("Chat", args={"latency_s": 0.05}), env("Ranked"), env("Flaky", args={"tasks": 997})],
                    batch={"size": BATCH},
                    trainer={"bind": address, "keep_batches": 2},
                ),
            )
            spec = TrainerSpec(address, str(record), str(tmp_path / "trigger"), think_s=0.02)
            async with (
                await Command.start("run", config, logs=tmp_path / "logs") as command,
                await TrainerProcess.start(spec) as trainer,
            ):
                await command.wait_event("run.started")

                async def watch(seconds: float) -> Figures:
                    """Let it run; both processes must live, and steps must have come when the time is over."""
                    before = record.stat().st_size if record.exists() else 0
                    loop = asyncio.get_running_loop()
                    end = loop.time() + seconds
                    while loop.time() < end:
                        await asyncio.sleep(min(1.0, seconds))
                        assert command.process.returncode is None, command.errors()[-3000:]
                        assert trainer.process.returncode is None
                    await until(lambda: record.exists() and record.stat().st_size > before)
                    return Figures(command.process.pid, run_dir)

                first = await watch(SOAK_S / 3)
                for _ in range(2):
                    last = await watch(SOAK_S / 3)
                command.send(signal.SIGTERM)
                assert await command.wait() == 128 + signal.SIGTERM, command.errors()[-3000:]
                assert not command.processes()
    assert last.memory_bytes < first.memory_bytes + MAX_GROWTH_BYTES
    assert last.descriptors <= first.descriptors + 8
    assert last.journal_bytes < MAX_JOURNAL_BYTES
    read_records([record]).check(world_size=1, batch_size=BATCH)
