"""A classic verifiers environment of one turn, hosted here and under the library's own ZMQ server.

Same environment, same inference server that answers at once with 2,048 tokens in all, one worker each, token ids
and log-probabilities delivered to the client in both. CPU time per rollout of the client (what the orchestrator pays) and of the
server's processes; the wall figure says only that neither waits for something else.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import uvloop

from benchmarks import _peers
from benchmarks.environments.cpu_time import cpu_s
from benchmarks.frame import CannotRunError, Effort, Figure, median_and_spread
from envs import wire
from orchestrator.env_servers.env import Answer, Env, RolloutRequest
from tests.adapters.venvs import CLASSIC
from tests.support.env_specs import env_spec, server_pids

HERE = Path(__file__).parent
INFLIGHT = 128

Sample = dict[str, float]


def figures(effort: Effort = Effort.FULL) -> list[Figure]:
    """Client and server cost per rollout, and rollouts per second."""
    absent = _peers.why_absent(CLASSIC)
    if CLASSIC.missing():
        # Ours hosts an environment of the library, so that it needs the library too.
        raise CannotRunError(f"{CLASSIC.missing()}, or BENCH_PEERS=1")
    rollouts, repeats = effort.pick((2048, 3), (256, 1), (128, 1))
    # The loop of the service; the peer's client has the same.
    with (
        _stub() as url,
        _environments_only() as environ,
        nullcontext() if absent else _peer(url, environ) as peer,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        samples = runner.run(_alternate(url, peer, rollouts=rollouts, repeats=repeats))
    return _figures(*samples, rollouts=rollouts, absent=absent)


def _figures(ours: list[Sample], theirs: list[Sample], *, rollouts: int, absent: str) -> list[Figure]:
    made = []
    name = "verifiers' own ZMQ server"
    for key, what, goal, wanted in (
        ("client_s", "verifiers, one turn: orchestrator-side CPU per rollout", "at least 5× lower", 0.2),
        ("server_s", "verifiers, one turn: env server CPU per rollout", "not more", 1.0),
    ):
        mine, spread = median_and_spread([sample[key] / rollouts * 1e6 for sample in ours])
        other = median_of([sample[key] / rollouts * 1e6 for sample in theirs])
        met = None if other is None else mine <= other * wanted
        made.append(Figure(what, mine, "µs", other, name, goal, met, spread, absent))
    mine, spread = median_and_spread([rollouts / sample["wall_s"] for sample in ours])
    other = median_of([rollouts / sample["wall_s"] for sample in theirs])
    what = "verifiers, one turn: rollouts per second, one worker"
    met = None if other is None else mine >= other
    made.append(Figure(what, mine, "/s", other, name, "not slower", met, spread, absent))
    return made


def median_of(samples: list[float]) -> float | None:
    return statistics.median(samples) if samples else None


async def _alternate(
    url: str, peer: "subprocess.Popen[str] | None", *, rollouts: int, repeats: int
) -> tuple[list[Sample], list[Sample]]:
    """Measure both in turns, so that what else the machine does falls on both."""
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as logs:
        spec = env_spec(
            name="words",
            id="verifiers::reverse_words",
            model="policy",
            python=str(CLASSIC.python),
            capacity=INFLIGHT,
            log_dir=Path(logs),
        )
        async with Env(spec) as env, asyncio.TaskGroup() as tasks:
            supervising = tasks.create_task(env.run())
            await _measure(env, url, INFLIGHT)
            if peer is not None:
                await asyncio.to_thread(_ask, peer, INFLIGHT)
            for _ in range(repeats):
                ours.append(await _measure(env, url, rollouts))
                if peer is not None:
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
def _environments_only() -> Iterator[dict[str, str]]:
    """Only the environment's directory is on the path, of the peer and of our env server: our own modules must not hide the library."""
    environ = {**os.environ, "PYTHONPATH": str(HERE / "environments"), "HF_HUB_OFFLINE": "1"}
    previous = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = environ["PYTHONPATH"]
    try:
        yield environ
    finally:
        if previous is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = previous


@contextmanager
def _peer(url: str, environ: dict[str, str]) -> Iterator["subprocess.Popen[str]"]:
    command = [str(CLASSIC.python), "-P", str(HERE / "_verifiers_peer.py"), url]
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
