"""The link to env servers and the servers themselves: CPU per rollout, bytes per group, time to recover.

The orchestrator's cost is measured against a bare echo: the same frames through the same kind of drained
socket, answered by the same process, in the same run, without decoding, matching or credit. The server's
cost is the CPU time of a real server process whose environment asks an instant HTTP endpoint once.
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import structlog
import uvloop
import zmq

from benchmarks.frame import Effort, Figure, median_and_spread
from envs import Environment, Model, Rollout, Sequence, Task, Tasks, wire
from orchestrator.env_servers.env import Answer, Env, RolloutRequest
from tests.support.env_specs import env_spec, server_pids

INFLIGHT = 256
SMALL = 64
"""Tokens of a small rollout."""


class OneTurn(Environment):
    """Asks the model once."""

    def tasks(self, split: str) -> Tasks:
        return [{"text": f"Reverse the text {index}."} for index in range(1000)]

    async def rollout(self, task: Task, model: Model) -> Rollout:
        reply = await model.chat([{"role": "user", "content": task["text"]}])
        return model.rollout(float(len(reply.text) > 0))


def rollout_of(tokens: int) -> Rollout:
    sequence = Sequence(
        np.arange(tokens, dtype=np.int32),
        np.ones(tokens, np.uint8),
        np.linspace(-3, 0, tokens, dtype=np.float32),
    )
    messages = [
        {"role": "user", "content": "Reverse the text."},
        {"role": "assistant", "content": "text the Reverse"},
    ]
    return Rollout([sequence], 1.0, {"correct": 1.0}, messages, timings={"total": 1.5, "inference": 1.25})


def answer_for_ever(address: str) -> None:
    """A process that answers runs with a canned result and echoes with as many bytes, as fast as it can."""
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(address)
    frames = wire.encode_result(0, [rollout_of(SMALL)])
    header = msgspec.msgpack.decode(frames[0], type=wire.ResultHeader)
    ready = wire.encode(wire.Ready("canned:Env", {"train": 1000}, False, INFLIGHT))
    pong = wire.encode(wire.Pong(0.0, wire.ServerStats(0, 0, 0, 0, 0.0, 0)))
    while True:
        route, message = socket.recv_multipart()
        if message.startswith(b"echo"):
            socket.send_multipart([route, *frames])
            continue
        asked = wire.decode_to_server([message])
        if isinstance(asked, wire.Request):
            head = wire.encode(wire.ResultHeader(asked.id, header.rollouts))
            socket.send_multipart([route, head, *frames[1:]])
        elif isinstance(asked, wire.Hello):
            socket.send_multipart([route, wire.encode(wire.Welcome(wire.PROTOCOL, "canned:Env", 0, ""))])
            socket.send_multipart([route, ready])
        elif isinstance(asked, wire.Ping):
            socket.send_multipart([route, pong])


async def echo_cpu_s(address: str, count: int) -> float:
    """CPU seconds per message of a bare drained socket that keeps INFLIGHT messages under way."""
    loop = asyncio.get_running_loop()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(address)
    request = b"echo" + b"x" * len(
        wire.encode(wire.Request(1, "rollout", "train", 1, "http://127.0.0.1:8000/v1"))
    )
    done = loop.create_future()
    state = {"sent": 0, "received": 0}

    def drain() -> None:
        while True:
            try:
                socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            state["received"] += 1
            if state["sent"] < count:
                state["sent"] += 1
                socket.send(request, zmq.NOBLOCK)
            elif state["received"] == count:
                done.set_result(None)

    loop.add_reader(socket.FD, drain)
    try:
        began = time.process_time()
        for _ in range(INFLIGHT):
            state["sent"] += 1
            socket.send(request)
        loop.call_soon(drain)
        await done
        return (time.process_time() - began) / count
    finally:
        loop.remove_reader(socket.FD)
        socket.close(linger=0)
        context.term()


async def keep_inflight(env: Env, count: int, base_url: str = "http://127.0.0.1:8000/v1") -> float:
    """CPU seconds of this process per rollout, INFLIGHT of them under way at every moment."""
    done = asyncio.get_running_loop().create_future()
    state = {"sent": 0, "received": 0}

    def submit() -> None:
        state["sent"] += 1
        server = env.reserve(1)
        assert server is not None
        request = RolloutRequest("train", state["sent"] % 1000, base_url, session="group", cache_salt="3")
        env.submit(request, on_done, server=server)

    def on_done(request: RolloutRequest, outcome: Answer) -> None:
        if not isinstance(outcome, wire.Result):
            if not done.done():
                done.set_exception(RuntimeError(str(outcome)))
            return
        state["received"] += 1
        if state["sent"] < count:
            submit()
        elif state["received"] == count:
            done.set_result(None)

    began = time.process_time()
    for _ in range(INFLIGHT):
        submit()
    await done
    return (time.process_time() - began) / count


@asynccontextmanager
async def canned_server() -> AsyncIterator[str]:
    """The address of a process that answers at once."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        address = f"ipc://{directory}/canned"
        code = f"from benchmarks.env_link import answer_for_ever; answer_for_ever({address!r})"
        process = subprocess.Popen([sys.executable, "-c", code])  # noqa: ASYNC220  returns at once
        try:
            yield address
        finally:
            process.kill()
            process.wait()


async def link_cpu(repeats: int, count: int) -> tuple[list[float], list[float]]:
    """CPU microseconds per rollout through the link, and per bare echo, turn by turn."""
    ours, bare = [], []
    async with canned_server() as address:
        spec = env_spec(name="canned", id="canned:Env", addresses=(address,), ready_timeout_s=30)
        async with Env(spec) as env:
            await keep_inflight(env, count)
            for _ in range(repeats):
                bare.append(1e6 * await echo_cpu_s(address, count))
                ours.append(1e6 * await keep_inflight(env, count))
    return ours, bare


class InstantEndpoint(asyncio.Protocol):
    """Answers every HTTP request with the same completion."""

    body = msgspec.json.encode(
        {
            "choices": [
                {
                    "message": {"role": "assistant", "content": "ok"},
                    "finish_reason": "stop",
                    "token_ids": list(range(32)),
                    "logprobs": {"content": [{"logprob": -0.5} for _ in range(32)]},
                }
            ],
            "prompt_token_ids": list(range(32)),
        }
    )
    answer = (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, rest = self._received.partition(b"\r\n\r\n")
        if end and len(rest) >= int(head.lower().partition(b"content-length:")[2].split()[0]):
            self._received = b""
            self._transport.write(self.answer)


def answer_http_for_ever(ready: str) -> None:
    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(InstantEndpoint, "127.0.0.1", 0)
        Path(ready).write_text(str(server.sockets[0].getsockname()[1]))  # noqa: ASYNC240  once
        await server.serve_forever()

    uvloop.run(serve())


def process_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def server_cpu(repeats: int, count: int) -> tuple[list[float], list[float]]:
    """CPU milliseconds of a real server per single-turn rollout, and of the orchestrator beside it."""
    servers, here = [], []
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        port = Path(directory) / "port"
        code = f"from benchmarks.env_link import answer_http_for_ever; answer_http_for_ever({str(port)!r})"
        endpoint = subprocess.Popen([sys.executable, "-c", code])  # noqa: ASYNC220  returns at once
        try:
            spec = env_spec(
                name="turn",
                id="benchmarks.env_link:OneTurn",
                log_dir=Path(directory),
                capacity=INFLIGHT,
                log_level="error",
            )
            async with Env(spec) as env:
                while not port.exists() or not port.read_text():  # noqa: ASYNC110  a file announces nothing
                    await asyncio.sleep(0.05)
                base_url = f"http://127.0.0.1:{port.read_text()}/v1"
                await keep_inflight(env, 2 * INFLIGHT, base_url)
                [pid] = server_pids(env).values()
                for _ in range(repeats):
                    began = process_cpu_s(pid)
                    here.append(1e3 * await keep_inflight(env, count, base_url))
                    servers.append(1e3 * (process_cpu_s(pid) - began) / count)
        finally:
            endpoint.kill()
            endpoint.wait()
    return servers, here


async def recovery(repeats: int) -> tuple[list[float], list[float]]:
    """Seconds from the SIGKILL of a server to its successor being ready, and of a first start."""
    recovered, started = [], []
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        for _ in range(repeats):
            env = Env(env_spec(name="turn", id="benchmarks.env_link:OneTurn", log_dir=Path(directory)))
            began = time.perf_counter()
            async with env, asyncio.TaskGroup() as group:
                started.append(time.perf_counter() - began)
                supervisor = group.create_task(env.run())
                back = asyncio.Event()
                env.on_free = lambda env=env, back=back: back.set() if env.available else None  # type: ignore[misc]
                began = time.perf_counter()
                os.kill(next(iter(server_pids(env).values())), signal.SIGKILL)
                await back.wait()
                recovered.append(time.perf_counter() - began)
                supervisor.cancel()
    return recovered, started


def codec(repeats: int) -> tuple[int, int, list[float], list[float]]:
    """A group of 8 × 2,048 tokens: bytes as arrays and as lists, microseconds to encode and decode each."""
    group = [rollout_of(2048) for _ in range(8)]
    lists = [
        {"tokens": s.tokens.tolist(), "mask": s.mask.tolist(), "logprobs": s.logprobs.tolist()}
        for rollout in group
        for s in rollout.sequences
    ]
    arrays_s, lists_s = [], []
    for _ in range(repeats):
        began = time.process_time()
        for _ in range(20):
            wire.decode_to_client(wire.encode_result(1, group))
        arrays_s.append((time.process_time() - began) / 20 * 1e6)
        began = time.process_time()
        for _ in range(20):
            msgspec.msgpack.decode(msgspec.msgpack.encode(lists))
        lists_s.append((time.process_time() - began) / 20 * 1e6)
    size = sum(map(len, wire.encode_result(1, group)))
    return size, len(msgspec.msgpack.encode(lists)), arrays_s, lists_s


def run(measure: Callable[[], Awaitable[tuple[list[float], list[float]]]]) -> tuple[list[float], list[float]]:
    async def call() -> tuple[list[float], list[float]]:
        return await measure()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(call())


def figures(effort: Effort = Effort.FULL) -> list[Figure]:
    """What the environment boundary costs."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    repeats, count = effort.pick((7, 20_000), (3, 4_000), (1, 1_024))
    ours, bare = run(lambda: link_cpu(repeats, count))
    link_us, link_spread = median_and_spread(ours)
    bare_us, _ = median_and_spread(bare)
    servers, here = run(lambda: server_cpu(repeats, count // 4))
    server_ms, server_spread = median_and_spread(servers)
    here_ms, here_spread = median_and_spread(here)
    recovered, started = run(lambda: recovery(effort.pick(3, 1, 1)))
    recovered_s, recovered_spread = median_and_spread(recovered)
    started_s, _ = median_and_spread(started)
    size, list_size, arrays, lists = codec(repeats)
    arrays_us, arrays_spread = median_and_spread(arrays)
    lists_us, _ = median_and_spread(lists)
    return [
        Figure(
            f"orchestrator CPU per small rollout through the link, {INFLIGHT} in flight",
            link_us,
            "µs",
            bare_us,
            "µs bare drained echo",
            "within 3×",
            link_us <= 3 * bare_us,
            link_spread,
        ),
        Figure(
            "env server CPU per single-turn rollout, instant HTTP endpoint",
            server_ms,
            "ms",
            goal="≤ 0.15 ms",
            met=server_ms <= 0.15,
            spread=server_spread,
        ),
        Figure("orchestrator CPU per rollout of a real server", here_ms, "ms", spread=here_spread),
        Figure(
            "from SIGKILL of a server to its successor being ready",
            recovered_s,
            "s",
            started_s,
            "s first start",
            "below 2 s plus start",
            recovered_s <= 2 + started_s,
            recovered_spread,
        ),
        Figure("bytes of a group of 8 × 2,048 tokens", size / 1024, "KiB", list_size / 1024, "KiB as lists"),
        Figure(
            "encode and decode that group", arrays_us, "µs", lists_us, "µs as lists", spread=arrays_spread
        ),
    ]
