"""The same rollouts by other means: what the orchestrator's process pays for one, beside naive code and beside Ray.

Rollouts of 16 tokens, 256 in flight. Those of 50 ms go through our whole service, through workers on an asyncio.Queue, and
through an asyncio actor of Ray; those that take no time through our link alone, through zmq.asyncio, and through
tasks of Ray. CPU time is that of the one process that asks, never that of those who answer.
"""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
import uvloop

from benchmarks import _peers, dispatch
from benchmarks._naive import Pace, through_a_queue, through_zmq_asyncio
from benchmarks._stub_servers import ENV
from benchmarks.env_link import INFLIGHT, keep_inflight
from benchmarks.frame import Effort, Figure, median_and_spread
from orchestrator.env_servers.env import Env
from tests.adapters.venvs import RAY
from tests.support.env_specs import env_spec

TOKENS = 16
LATENCY_S = 0.05


def figures(effort: Effort = Effort.FULL) -> list[Figure]:
    """Ours beside each of the others."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    repeats, count = effort.pick((5, 20_000), (3, 5_000), (1, 1_024))
    warm_s, for_s = effort.pick((3, 15), (3, 5), (1, 1))
    with _stub(LATENCY_S) as address, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        queued = [runner.run(through_a_queue(address, INFLIGHT, count)) for _ in range(repeats)]
    with _stub(0.0) as address, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        linked, bare = runner.run(_alternate(address, repeats, count))
    request = {"tokens": TOKENS, "inflight": INFLIGHT, "count": count, "latency_s": LATENCY_S}
    ray, absent = _peers.ask(RAY, "_ray_peer.py", request)
    # Last, because it sets the garbage collector up for the rest of the process.
    service = dispatch.measure(
        inflight=INFLIGHT,
        latency_s=LATENCY_S,
        workers=1,
        batch_size=256,
        warm_s=warm_s,
        for_s=for_s,
        tokens=TOKENS,
    )
    whole = [Pace(service.cpu_per_rollout_s, service.rollouts_per_s)]
    waits, instant = "rollouts of 50 ms, the whole service", "rollouts that take no time, the link alone"
    return [
        *_beside(waits, whole, queued, "asyncio.Queue and zmq.asyncio, nothing else"),
        *_beside(waits, whole, _of(ray, "actor"), "Ray, calls of an asyncio actor", absent),
        *_beside(instant, linked, bare, "zmq.asyncio"),
        *_beside(instant, linked, _of(ray, "task"), "Ray, tasks", absent),
    ]


def _beside(
    what: str, ours: list[Pace], theirs: list[Pace], peer_name: str, absent: str = ""
) -> list[Figure]:
    """CPU per rollout and rollouts per second; without the peer's where it is absent."""
    made = []
    for part, unit, scale, field in (
        (f"CPU per rollout of {TOKENS} tokens, {INFLIGHT} in flight", "µs", 1e6, "cpu_s"),
        ("rollouts per second", "/s", 1.0, "per_s"),
    ):
        mine, spread = median_and_spread([scale * getattr(one, field) for one in ours])
        other = median_and_spread([scale * getattr(one, field) for one in theirs])[0] if theirs else None
        made.append(Figure(f"{what}: {part}", mine, unit, other, peer_name, spread=spread, note=absent))
    return made


def _of(ray: dict[str, float] | None, kind: str) -> list[Pace]:
    return [] if ray is None else [Pace(ray[f"{kind}_cpu_s"], ray[f"{kind}_per_s"])]


async def _alternate(address: str, repeats: int, count: int) -> tuple[list[Pace], list[Pace]]:
    """Through our link and through zmq.asyncio, in turns."""
    linked, bare = [], []
    spec = env_spec(name="stub", id=ENV, addresses=(address,), ready_timeout_s=30)
    async with Env(spec) as env:
        await keep_inflight(env, 2 * INFLIGHT)
        await through_zmq_asyncio(address, INFLIGHT, 2 * INFLIGHT)
        for _ in range(repeats):
            began = time.perf_counter()
            cpu_s = await keep_inflight(env, count)
            linked.append(Pace(cpu_s, count / (time.perf_counter() - began)))
            bare.append(await through_zmq_asyncio(address, INFLIGHT, count))
    return linked, bare


@contextmanager
def _stub(latency_s: float) -> Iterator[str]:
    """The address of an env server that only waits, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        arguments = (directory, "0", "1", str(latency_s), str(TOKENS))
        command = [sys.executable, "-m", "benchmarks._stub_servers", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            try:
                yield f"ipc://{directory}/0"
            finally:
                process.kill()
