"""A real vLLM as a child process, and what the tests ask it beside generating.

The engine stays in this process' session (the kernel shares processor time between sessions, and an engine in
one of its own starves its client), in a process group of its own, by which all of it is ended.
"""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from envs.rollout import Float32s

SERVE = Path(__file__).parent / "serve"
HOME = Path(os.environ.get("VLLM_HOME", Path.home() / ".cache" / "vllm-cpu-tiny"))
WEIGHTS = {"a": str(HOME / "model_a"), "b": str(HOME / "model_b")}
MODEL = "tiny"
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0


@dataclass(eq=False)
class VllmEngine:
    """One engine on one port; `start` again after `kill` is a restart with the initial weights (a)."""

    log: Path
    options: Sequence[str] = ()
    port: int = field(default_factory=lambda: _free_port())
    _process: subprocess.Popen[bytes] | None = None

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def base_url(self) -> str:
        return f"{self.root}/v1"

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(SERVE), str(self.port), *self.options], stdout=log, stderr=log, process_group=0
            )

    def kill(self) -> None:
        """End every process of the engine at once, as a crash does."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it in order, and by force if that takes too long."""
        self._end(signal.SIGTERM)

    def signal_core(self, number: signal.Signals) -> None:
        """Signal the process that computes; the one that serves HTTP is its parent."""
        assert self._process is not None
        [core] = [pid for pid in children(self._process.pid) if "EngineCore" in _command(pid)]
        os.kill(core, number)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with _group_of(process.pid, number):
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait(STOP_TIMEOUT_S)


@contextmanager
def _group_of(pid: int, number: signal.Signals) -> Iterator[None]:
    """Signal a process group, and leave nothing of it behind."""
    os.killpg(pid, number)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


@contextmanager
def running_engine(log: Path, options: Sequence[str]) -> Iterator[VllmEngine]:
    """An engine for as long as the block lasts; whoever asks it first waits until it is up."""
    engine = VllmEngine(log=log, options=options)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


async def score(
    session: aiohttp.ClientSession, engine: VllmEngine, tokens: Sequence[int], salt: str
) -> Float32s:
    """Log-probability of each token given those before it, under the weights that the engine has now.

    The first token has none (0). The salt keeps the prefix cache of other weights out.
    """
    body = {"model": MODEL, "prompt": list(tokens), "max_tokens": 1, "prompt_logprobs": 0, "cache_salt": salt}
    async with session.post(f"{engine.base_url}/completions", json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
    entries = answer["choices"][0]["prompt_logprobs"]
    values = [0.0] + [
        entry[str(token)]["logprob"] for token, entry in zip(tokens[1:], entries[1:], strict=True)
    ]
    return np.array(values, dtype=np.float32)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def children(parent: int) -> list[int]:
    """Processes that a process has started."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            # The command in the second field may hold anything but ends at the last parenthesis.
            if int(stat.rpartition(")")[2].split()[1]) == parent:
                found.append(int(folder.name))
    return found


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
