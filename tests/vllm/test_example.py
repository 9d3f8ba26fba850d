"""The example trainer for real: a tiny model on two vLLM engines learns, while an engine and a rank of the trainer are killed.

Everything is started as its README says, with other ports and folders. `make example` shows the trainer's own lines too.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import time
import tomllib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from tests.integration.env_servers import ROOT
from tests.integration.service_fixture import Command, run_command
from tests.support.ports import free_port
from tests.vllm.engine import HOME, SERVE, VllmEngine, children, running_engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]

EXAMPLE = ROOT / "examples" / "grpo_torch"
CONFIG = EXAMPLE / "config.toml"
STEPS = int(tomllib.loads(CONFIG.read_text(encoding="utf-8"))["max_steps"])
KILL_ENGINE_AT, KILL_RANK_AT = 10, 25
CHECKPOINT_EVERY = 10


@dataclass(frozen=True, slots=True)
class Trainer:
    """torchrun and its ranks; what they say goes to a file."""

    process: asyncio.subprocess.Process
    log: Path

    def said(self, pattern: str) -> list[str]:
        return re.findall(pattern, self.log.read_text(encoding="utf-8"), re.MULTILINE)

    def steps(self) -> list[dict[str, float]]:
        """The numbers of every step in the order of training; a step that was trained on twice is there twice."""
        lines = [line.split() for line in self.said(r"^step .*\n")]
        return [dict(zip(words[::2], map(float, words[1::2]), strict=True)) for words in lines]

    def rank(self, number: int) -> int:
        """The process of a rank."""
        [pid] = [pid for pid in children(self.process.pid) if _has_rank(pid, number)]
        return pid

    async def until(self, what: str, condition: Callable[[], bool]) -> None:
        while not condition():
            assert self.process.returncode is None, f"ended before {what}:\n{self.log.read_text()[-3000:]}"
            await asyncio.sleep(0.1)


def _has_rank(pid: int, number: int) -> bool:
    with suppress(OSError):
        return f"\0RANK={number}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    return False


@asynccontextmanager
async def running_trainer(folder: Path, *arguments: str) -> AsyncIterator[Trainer]:
    """Two ranks of the example; torchrun starts them again when one has died."""
    log = folder / "trainer.log"
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            HOME / "venv" / "bin" / "torchrun",
            *("--standalone", "--nproc-per-node=2", "--max-restarts=3", str(EXAMPLE / "train.py")),
            *arguments,
            stdout=out,
            stderr=out,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "HF_HUB_OFFLINE": "1",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            },
        )
    try:
        yield Trainer(process, log)
    finally:
        ranks = children(process.pid) if process.returncode is None else []
        for pid in [*ranks, *([process.pid] if process.returncode is None else [])]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await process.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model that everything begins with."""
    subprocess.run([SERVE, "--install"], check=True)
    folder = tmp_path_factory.mktemp("grpo") / "model"
    subprocess.run([HOME / "venv" / "bin" / "python", EXAMPLE / "make_model.py", folder], check=True)
    return folder


@pytest.fixture
async def engines(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[VllmEngine, VllmEngine]]:
    """Two that serve, with one thread each; by default both would compute on the first processor."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = ["--model", str(model), "--max-model-len", "64"]
    with (
        running_engine(tmp_path / "engine_0.log", options) as stays,
        running_engine(tmp_path / "engine_1.log", options) as dies,
    ):
        async with aiohttp.ClientSession() as http:
            for engine in (stays, dies):
                while not await _serves(http, engine):  # noqa: ASYNC110  a starting engine tells nobody
                    await asyncio.sleep(0.5)
        yield stays, dies


async def _serves(http: aiohttp.ClientSession, engine: VllmEngine) -> bool:
    try:
        async with http.get(f"{engine.root}/health") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def test_the_example_learns_while_an_engine_and_a_rank_are_killed(
    model: Path, engines: tuple[VllmEngine, VllmEngine], tmp_path: Path
) -> None:
    """The tiny model ends above 0.7, and what the trainer computes is what the engines sampled from, before and after each kill."""
    port = free_port()
    run_dir, output = tmp_path / "run", tmp_path / "weights"
    began = time.monotonic()
    timeline: list[str] = []

    def note(what: str) -> None:
        timeline.append(f"{time.monotonic() - began:6.1f} s  {what}")
        print(timeline[-1], flush=True)

    command = await Command.start(
        "run",
        CONFIG,
        *("--run_dir", str(run_dir), "--http.port", "0", "--log.format", "json"),
        *("--inference.base_urls", json.dumps([engine.base_url for engine in engines])),
        *("--trainer.bind", f"tcp://127.0.0.1:{port}"),
        logs=tmp_path / "logs",
    )
    async with (
        command,
        running_trainer(
            tmp_path,
            *("--model", str(model), "--output", str(output), "--link", f"tcp://127.0.0.1:{port}"),
            *("--learning-rate", "4e-3", "--checkpoint-every", str(CHECKPOINT_EVERY)),
        ) as trainer,
    ):

        def reached(step: int) -> Callable[[], bool]:
            return lambda: any(report["step"] >= step for report in trainer.steps())

        await trainer.until("the first step", reached(1))
        note("step 1 is trained on")
        await trainer.until("the engine was killed", reached(KILL_ENGINE_AT))
        engines[1].kill()
        note(f"step {len(trainer.steps())}: one of two engines was killed, and is started again")
        engines[1].start()
        await trainer.until("a rank was killed", reached(KILL_RANK_AT))
        # However fast the steps are, the engine comes back before the run is over.
        for word in ("pause", "resume"):
            done = await run_command("ctl", str(run_dir), word, logs=tmp_path / "logs")
            assert done.process.returncode == 0, done.errors()
            await command.wait_event("endpoint.returned")
        note("the killed engine is in service again")
        os.kill(trainer.rank(1), signal.SIGKILL)
        killed_after = len(trainer.steps())
        note(f"step {killed_after}: rank 1 of the trainer was killed")
        await trainer.until("it began again", lambda: len(trainer.said("^begins behind step")) == 2)
        note(trainer.said("^begins behind step.*")[1])
        assert await command.wait() == 0, command.errors()[-3000:]
        note("the run has ended")
        assert await trainer.process.wait() == 0, trainer.log.read_text()[-3000:]

    assert trainer.said("^begins behind step (.*) with") == [
        "0",
        str(killed_after // CHECKPOINT_EVERY * CHECKPOINT_EVERY),
    ]
    steps = trainer.steps()
    first, second = (
        {report["step"]: report for report in life} for life in (steps[:killed_after], steps[killed_after:])
    )
    assert {*first, *second} == set(range(1, STEPS + 1))
    again = sorted({*first} & {*second})
    assert again, "steps behind the checkpoint are trained on again"
    for step in again:
        for name in ("reward", "loss", "gradient_norm"):
            assert second[step][name] == pytest.approx(first[step][name], rel=0.01), (step, name)
    assert engines[1].root in str(command.events("endpoint.lost"))
    returned = [event["version"] for event in command.events("endpoint.returned")]
    evaluations = [json.loads(line) for line in (run_dir / "evals.jsonl").read_text().splitlines()]
    rewards = {evaluation["step"]: evaluation["avg@8"] for evaluation in evaluations}
    gaps = [report["logprob_mismatch_max"] for report in steps if "logprob_mismatch_max" in report]
    note(f"mean reward after steps: {rewards}; of the last batches: {[one['reward'] for one in steps[-5:]]}")
    assert returned
    assert min(returned) > 0, "it has what was published, not what it was started with"
    note(f"the killed engine came back with version {returned[0]}")
    note(f"trained again, with the same result: steps {again[0]:.0f} to {again[-1]:.0f}")
    note(f"worst |trainer - engine| log-probability: {max(gaps):.2e}, of {len(gaps)} of {len(steps)} steps")
    assert len(gaps) > STEPS / 4, "there must be something to compare"
    assert rewards[0] < 0.3
    assert rewards[STEPS] > 0.7
    assert sum(report["reward"] for report in steps[-5:]) / 5 > 0.7
    assert max(gaps) < 1e-4
