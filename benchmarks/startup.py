"""How long it takes until something happens: the command line, a trainer's import, the first rollout, resuming, many servers.

Wall times of fresh processes, medians of several, because that is what somebody waits for; on a machine with other work they
are upper bounds. Modules are compiled before. What stands beside a figure is what cannot be less: the interpreter alone, numpy
alone, and for many servers the CPU time of their environment's own import, which each of them does for itself, shared
out over the cores. That environment takes as long to import as a library of medium size.
"""

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from benchmarks.frame import Effort, Figure, median_and_spread
from benchmarks.journal import open_journal
from orchestrator.env_servers.env import Env
from orchestrator.groups.group import Group, plain_facts
from orchestrator.tasks.task import TrainTask
from tests.support.env_specs import env_spec

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "configs" / "quickstart.toml"
GROUPS, ROLLOUTS, TOKENS = 10_000, 8, 512
SERVERS = 100
IMPORT_S = 0.3
SLOWEST = 1.25
"""How many times as long as their imports alone many servers may take."""
FIRST = 500
"""Position of the first recorded group: behind whatever the first step asked for."""

SLOW_MODULE = f"""
import time

from envs.builtin.reverse import Reverse as Slow

_until = time.thread_time() + {IMPORT_S}
while time.thread_time() < _until:
    pass
"""

Arrays = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]


def figures(effort: Effort) -> list[Figure]:
    rounds = effort.pick(9, 3, 1)
    few = effort.pick(3, 1, 1)
    with _silence():
        return [
            help_figure(rounds),
            import_figure(rounds),
            first_rollout_figure(few),
            resume_figure(effort.pick(GROUPS, 1_000, 100), few),
            servers_figure(effort.pick(SERVERS, 10, 2), few),
        ]


def help_figure(rounds: int) -> Figure:
    """From the command to its end."""
    ours = [_wall_s([sys.executable, "-m", "orchestrator", "--help"]) for _ in range(rounds + 1)][1:]
    bare = [_wall_s([sys.executable, "-c", ""]) for _ in range(rounds)]
    return _figure(
        "orchestrator --help", ours, 0.15, peer=median_and_spread(bare)[0], peer_name="interpreter alone"
    )


def import_figure(rounds: int) -> Figure:
    """Of the import alone, in an interpreter that has begun."""
    ours = [_import_s("orchestrator.trainer") for _ in range(rounds + 1)][1:]
    bare = [_import_s("numpy") for _ in range(rounds)]
    return _figure(
        "import orchestrator.trainer", ours, 0.1, peer=median_and_spread(bare)[0], peer_name="numpy alone"
    )


def first_rollout_figure(rounds: int) -> Figure:
    """From the command to the first rollout that has ended, policy server and env servers included."""
    return _figure(
        "orchestrator run to its first rollout (quickstart)", [first_rollout_s() for _ in range(rounds)], 2.0
    )


def resume_figure(groups: int, rounds: int) -> Figure:
    """From the command to `run.resumed`, with groups that are in no batch yet."""
    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder), groups)
        taken = [resume_s(Path(folder)) for _ in range(rounds)]
    return _figure(f"resume with {groups:,} groups of {ROLLOUTS} × {TOKENS} tokens", taken, 2.0)


def servers_figure(servers: int, rounds: int) -> Figure:
    """From nothing to all of them ready, and what their imports take."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "slow_to_import.py").write_text(SLOW_MODULE, encoding="utf-8")
        limits, taken = [], []
        for _ in range(rounds):
            taken.append(asyncio.run(servers_s(servers, Path(folder))))
            limits.append(servers * import_cpu_s(Path(folder)) / len(os.sched_getaffinity(0)))
    ours, spread = median_and_spread(taken)
    limit, _ = median_and_spread(limits)
    return Figure(
        f"env servers ready that take {IMPORT_S:g} s of CPU to import: {servers}",
        ours,
        "s",
        limit,
        "s, their imports alone",
        f"≤ {SLOWEST:g}×",
        ours <= SLOWEST * limit,
        spread,
    )


def first_rollout_s() -> float:
    """Start the quickstart, and look at its status until a rollout has ended."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        with _running(Path(folder)):
            addresses = Path(folder, "addresses.json")
            while not addresses.exists():
                time.sleep(0.01)
            url = json.loads(addresses.read_text())["http"]
            while not _status(url).get("outcomes", {}).get("completed"):
                time.sleep(0.01)
            return time.monotonic() - started


def resume_s(run_dir: Path) -> float:
    """Start the run again, and read its log until it is back. Nothing changes: it is killed then, as in a crash."""
    log = run_dir / "logs" / "orchestrator.log"
    log.unlink(missing_ok=True)
    started = time.monotonic()
    with _running(run_dir, "--dispatch.max_inflight", "8"):
        while not log.exists() or "run.resumed" not in log.read_text(encoding="utf-8"):
            time.sleep(0.01)
        return time.monotonic() - started


def record(run_dir: Path, groups: int) -> None:
    """A run of the quickstart that has begun, with groups that no batch holds: too large for one, as after a change of its size."""
    with _running(run_dir, "--max_steps", "1") as process:
        process.wait()
    rng = np.random.default_rng(0)
    size = ROLLOUTS * TOKENS
    ids, logprobs = rng.integers(0, 150_000, size, dtype=np.int32), -rng.random(size, dtype=np.float32)
    rewards = np.arange(ROLLOUTS, dtype=np.float32)
    asyncio.run(_write(run_dir, groups, (ids, np.ones(size, np.uint8), logprobs, rewards, rewards)))


async def _write(run_dir: Path, groups: int, arrays: Arrays) -> None:
    async with open_journal(run_dir) as journal:
        for number in range(groups):
            task = TrainTask("reverse", "train", number % 448, number // 448, FIRST + number)
            facts = plain_facts(ROLLOUTS, version=1, version_end=1)
            lengths = (TOKENS,) * ROLLOUTS
            journal.record_group(Group(task, 1, 1, ROLLOUTS, lengths, *arrays, facts, b"", 0))
            if number % 256 == 0:
                await asyncio.sleep(0.05)  # so that the backlog stays small


async def servers_s(count: int, modules: Path) -> float:
    """With as many servers of an environment that is slow to import."""
    with tempfile.TemporaryDirectory() as folder:
        spec = env_spec(id="slow_to_import:Slow", module_dirs=(modules,), workers=count, log_dir=Path(folder))
        started = time.monotonic()
        async with Env(spec):
            return time.monotonic() - started


def import_cpu_s(modules: Path) -> float:
    """CPU of the import alone, where all that servers share is there already."""
    code = (
        "import time, envs.server, envs.builtin.reverse; t = time.process_time(); import slow_to_import; "
        "print(time.process_time() - t)"
    )
    environ = {**_environ(), "PYTHONPATH": f"{ROOT}:{modules}"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, check=True)
    return float(done.stdout)


@contextlib.contextmanager
def _running(run_dir: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """The quickstart in a process of its own, killed at the end."""
    command = [sys.executable, "-m", "orchestrator", "run", str(QUICKSTART), "--run_dir", str(run_dir)]
    with subprocess.Popen(
        [*command, *options],
        cwd=ROOT,
        env=_environ(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _status(url: str) -> dict[str, Any]:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/api/status", timeout=5) as reply:
        found: dict[str, Any] = json.loads(reply.read())
        return found
    return {}


def _environ() -> dict[str, str]:
    """Ours, with this checkout, and with compiled modules, as an installed package has them."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": str(ROOT)}


def _wall_s(argv: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(argv, cwd=ROOT, env=_environ(), stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def _import_s(module: str) -> float:
    code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=_environ(), capture_output=True, check=True
    )
    return float(done.stdout)


def _figure(
    what: str, samples: list[float], below_s: float, *, peer: float | None = None, peer_name: str = ""
) -> Figure:
    median, spread = median_and_spread(samples)
    return Figure(what, median, "s", peer, peer_name, f"< {below_s:g} s", median < below_s, spread)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """No log of the servers that are started here."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    try:
        yield
    finally:
        structlog.reset_defaults()
