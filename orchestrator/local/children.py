"""The policy server and the reference trainer as child processes of the service, for runs without a GPU."""

import asyncio
import sys
from pathlib import Path
from socket import socket
from types import TracebackType
from typing import Self

import msgspec

from orchestrator.env_servers.processes import ChildProcess, describe_exit
from orchestrator.errors import OrchestratorError, TrainerLinkError
from orchestrator.local.server import PolicyServerSpec, reserve_port
from orchestrator.local.trainer import TrainerSpec


class LocalChildren:
    """Starts them, notices their end, stops them; an async context manager."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._port: socket | None = None
        self._server: ChildProcess | None = None
        self._trainer: ChildProcess | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in (self._trainer, self._server):
            if child is not None:
                await child.stop(grace_s=2.0)
        if self._port is not None:
            self._port.close()

    @property
    def has_server(self) -> bool:
        """Whether a policy server was started."""
        return self._server is not None

    @property
    def has_trainer(self) -> bool:
        """Whether the reference trainer was started."""
        return self._trainer is not None

    def start_server(self, *, model: str, seed: int, latency_s: float) -> str:
        """Start the policy server; returns its base URL. It brings its weights up to date like any other engine."""
        self._port = reserve_port()
        port = self._port.getsockname()[1]
        spec = PolicyServerSpec(port=port, reuse_port=True, model=model, seed=seed, latency_s=latency_s)
        self._server = self._start("orchestrator.local.server", spec, "policy.log")
        return f"http://127.0.0.1:{port}/v1"

    def start_trainer(
        self, *, address: str, learning_rate: float, world_size: int, token: str | None
    ) -> None:
        """Start the reference trainer."""
        checkpoints = str(self._run_dir / "checkpoints")
        spec = TrainerSpec(
            address=address,
            checkpoints=checkpoints,
            learning_rate=learning_rate,
            world_size=world_size,
            token=token,
        )
        self._trainer = self._start("orchestrator.local.trainer", spec, "trainer.log")

    async def watch_server(self) -> None:
        """Wait for the policy server to end, which it should not."""
        if self._server is not None:
            code = await _end_of(self._server)
            raise OrchestratorError(
                f"the policy server {describe_exit(code)}; its last words:\n{self._server.log_tail()}"
            )

    async def watch_trainer(self) -> None:
        """Wait for the trainer to end; it may once there are no more batches."""
        if self._trainer is not None:
            code = await _end_of(self._trainer)
            if code:
                raise TrainerLinkError(
                    f"the reference trainer {describe_exit(code)}; its last words:\n{self._trainer.log_tail()}"
                )

    def _start(self, module: str, spec: msgspec.Struct, log_name: str) -> ChildProcess:
        return ChildProcess(
            [sys.executable, "-m", module],
            first_line=msgspec.json.encode(spec) + b"\n",
            log_path=self._run_dir / "logs" / log_name,
        )


async def _end_of(child: ChildProcess) -> int:
    # A child's end is its owner's to await too: cancelling this wait must not cancel the future.
    return await asyncio.shield(child.exited)
