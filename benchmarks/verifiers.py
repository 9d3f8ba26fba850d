"""A classic verifiers environment of one turn, hosted here and under the library's own ZMQ server.

Same environment, same inference server that answers at once with 2,048 tokens in all, one worker each, token ids
and log-probabilities delivered to the client in both. CPU time per rollout of the client (what the orchestrator pays) and of the
server's processes; the wall figure says only that neither waits for something else.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop

from benchmarks.environments.cpu_time import cpu_s
from benchmarks.frame import Figure, median_and_spread
from envs import wire
from orchestrator.env_servers.env import Answer, Env, RolloutRequest
from tests.support.env_specs import env_spec, server_pids

HERE = Path(__file__).parent
VENV = HERE.parent / ".venv-verifiers-classic"
INFLIGHT = 128

Sample = dict[str, float]


def figures(quick: bool = False) -> list[Figure]:
    """Client and server cost per rollout, and rollouts per second."""
    if not (VENV / "installed.txt").exists():
        print(f"verifiers: left out, {VENV.name} is not there; run tests/adapters/setup_venvs")
        return []
    rollouts, repeats = (256, 1) if quick else (2048, 3)
    # The loop of the service; the peer's client has the same.
    with _stub() as url, _peer(url) as peer, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        samples = runner.run(_alternate(url, peer, rollouts=rollouts, repeats=repeats))
    return _figures(*samples, rollouts=rollouts)


def _figures(ours: list[Sample], theirs: list[Sample], *, rollouts: int) -> list[Figure]:
    made = []
    for key, what, goal, wanted in (
        ("client_s", "verifiers, one turn: orchestrator-side CPU per rollout", "at least 5× lower", 0.2),
        ("server_s", "verifiers, one turn: env server CPU per rollout", "not more", 1.0),
    ):
        mine, spread = median_and_spread([sample[key] / rollouts * 1e6 for sample in ours])
        other, _ = median_and_spread([sample[key] / rollouts * 1e6 for sample in theirs])
        made.append(
            Figure(what, mine, "µs", other, "verifiers' own ZMQ server", goal, mine <= other * wanted, spread)
        )
    mine, spread = median_and_spread([rollouts / sample["wall_s"] for sample in ours])
    other, _ = median_and_spread([rollouts / sample["wall_s"] for sample in theirs])
    what = "verifiers, one turn: rollouts per second, one worker"
    made.append(
        Figure(what, mine, "/s", other, "verifiers' own ZMQ server", "not slower", mine >= other, spread)
    )
    return made


async def _alternate(
    url: str, peer: "subprocess.Popen[str]", *, rollouts: int, repeats: int
) -> tuple[list[Sample], list[Sample]]:
    """Measure both in turns, so that what else the machine does falls on both."""
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as logs:
        spec = env_spec(
            name="words",
            id="verifiers::reverse_words",
            model="policy",
            python=str(VENV / "bin" / "python"),
            capacity=INFLIGHT,
            log_dir=Path(logs),
        )
        async with Env(spec) as env, asyncio.TaskGroup() as tasks:
            supervising = tasks.create_task(env.run())
            await _measure(env, url, INFLIGHT)
            await asyncio.to_thread(_ask, peer, INFLIGHT)
            for _ in range(repeats):
                ours.append(await _measure(env, url, rollouts))
                theirs.append(await asyncio.to_thread(_ask, peer, rollouts))
            supervising.cancel()
    return ours, theirs


async def _measure(env: Env, url: str, rollouts: int) -> Sample:
    """Keep the server full by callbacks, as the dispatcher does."""
    done = asyncio.get_running_loop().create_future()
    left = submitted = rollouts

    def on_done(request: RolloutRequest, outcome: Answer) -> None:
        nonlocal left
        if not isinstance(outcome, wire.Result) or not len(outcome.tokens):
            done.set_exception(RuntimeError(f"a rollout failed: {outcome}"))
            return
        left -= 1
        if not left:
            done.set_result(None)
        elif submitted:
            submit()

    def submit() -> None:
        nonlocal submitted
        submitted -= 1
        server = env.reserve(1)
        assert server is not None
        env.submit(
            RolloutRequest("train", submitted % 512, url, session=str(submitted)), on_done, server=server
        )

    process = next(iter(server_pids(env).values()))
    wall, cpu, server_cpu = time.perf_counter(), time.process_time(), cpu_s(process)
    for _ in range(min(INFLIGHT, rollouts)):
        submit()
    await done
    return {
        "wall_s": time.perf_counter() - wall,
        "client_s": time.process_time() - cpu,
        "server_s": cpu_s(process) - server_cpu,
    }


def _ask(peer: "subprocess.Popen[str]", rollouts: int) -> Sample:
    assert peer.stdin is not None
    assert peer.stdout is not None
    peer.stdin.write(f"{rollouts}\n")
    peer.stdin.flush()
    sample: Sample = json.loads(peer.stdout.readline())
    return sample


@contextmanager
def _stub() -> Iterator[str]:
    command = [sys.executable, str(HERE / "_verifiers_stub.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


@contextmanager
def _peer(url: str) -> Iterator["subprocess.Popen[str]"]:
    # Only the environment's directory is on the path: our own modules must not hide the library.
    environ = {**os.environ, "PYTHONPATH": str(HERE / "environments"), "HF_HUB_OFFLINE": "1"}
    command = [str(VENV / "bin" / "python"), "-P", str(HERE / "_verifiers_peer.py"), url]
    previous = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = environ["PYTHONPATH"]
    try:
        with (
            tempfile.TemporaryFile() as log,
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environ
            ) as process,
        ):
            yield process
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)
    finally:
        if previous is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = previous
