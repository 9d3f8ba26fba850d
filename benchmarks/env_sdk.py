"""CPU that one single-turn rollout costs an env server: HTTP, decoding, recording, checking, encoding.

The endpoint is another process that answers at once with canned bytes, so that only the client's side counts. The peers
post the same request and throw the answer away: a general HTTP library (aiohttp), and the connections of our own client,
which is what no rollout can be below. All are in the same process and in turns, so that they have the same allocator and
the same neighbours, and all connections are kept. Where the machine is shared, compare the ratio, not the figures of two runs.
"""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import cast

import aiohttp
import msgspec
import uvloop
from yarl import URL

from benchmarks.frame import Effort, Figure, median_and_spread
from envs import Environment, Model, ModelSettings, Rollout, Task, wire
from envs.answering import Responder
from envs.http_connections import HttpConnections, Target
from envs.inference_client import InferenceClient

_PROMPT_TOKENS = 128
_INFLIGHT = 64


class OneTurn(Environment):
    """Asks once and is content."""

    def tasks(self, split: str) -> list[Task]:
        return [{"text": "a question of the usual length " * 10}]

    async def rollout(self, task: Task, model: Model) -> Rollout:
        reply = await model.chat([{"role": "user", "content": task["text"]}])
        return model.rollout(reward=float(bool(reply.text)))


def figures(effort: Effort = Effort.FULL) -> list[Figure]:
    """The figures of `python -m benchmarks env_sdk`."""
    found = []
    for tokens, count, goal in ((16, 4000, 0.15), (2048, 500, 0.5)):
        rounds, size = effort.pick((7, count), (3, count // 4), (1, 128))
        with _endpoint(tokens) as base_url, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            ours, bare, own = runner.run(_measure(base_url, rounds, size))
        median, spread = median_and_spread(ours)
        what = f"env server CPU per single-turn rollout of {tokens} tokens, {_INFLIGHT} in flight, without its ZMQ socket"
        found.append(
            Figure(
                what=what,
                ours=median,
                unit="ms",
                peer=median_and_spread(bare)[0],
                peer_name="ms, bare aiohttp post",
                goal=f"≤ {goal} ms",
                met=median <= goal,
                spread=spread,
            )
        )
        limit = median_and_spread(own)[0]
        found.append(
            Figure(what, median, "ms", peer=limit, peer_name="ms, bare post of our own", spread=spread)
        )
    return found


async def _measure(base_url: str, rounds: int, size: int) -> tuple[list[float], list[float], list[float]]:
    """CPU milliseconds per rollout, ours, bare and through our own connections alone, in alternating rounds."""
    settings = ModelSettings(model="m", sampling={"temperature": 1.0, "max_tokens": 2048})
    run = wire.Request(id=1, kind="rollout", split="train", index=0, base_url=base_url, session="s")
    async with (
        InferenceClient(limit=_INFLIGHT) as client,
        _bare(base_url) as post,
        _own(base_url) as own_post,
    ):
        responder = Responder(OneTurn(), client=client, env="bench")

        async def rollout() -> object:
            frames = await responder.answer(run, settings)
            assert len(frames) == wire.RESULT_FRAMES
            return frames

        works = (rollout, post, own_post)
        ours, bare, own = list[float](), list[float](), list[float]()
        for work in works:
            await _cpu_ms(work, _INFLIGHT * 2)
        for _ in range(rounds):
            for work, samples in zip(works, (ours, bare, own), strict=True):
                samples.append(await _cpu_ms(work, size))
    return ours, bare, own


def _request() -> bytes:
    """The body that our own client sends for `OneTurn`."""
    message = {"role": "user", "content": OneTurn().tasks("train")[0]["text"]}
    fields = {
        "model": "m",
        "temperature": 1.0,
        "max_tokens": 2048,
        "logprobs": True,
        "return_token_ids": True,
    }
    return msgspec.json.encode({**fields, "messages": [message]})


@asynccontextmanager
async def _own(base_url: str) -> AsyncIterator[Callable[[], Awaitable[object]]]:
    """Our own HTTP connections and nothing around them."""
    connections = HttpConnections(limit=_INFLIGHT, connect_timeout_s=30.0, keep_s=60.0)
    target, body, headers = Target(URL(f"{base_url}/chat/completions")), _request(), {"X-Session-ID": "s"}

    async def post() -> object:
        answer = await connections.post(target, headers, body, max_bytes=2**28)
        return answer.body()

    try:
        yield post
    finally:
        await connections.aclose()


@asynccontextmanager
async def _bare(base_url: str) -> AsyncIterator[Callable[[], Awaitable[object]]]:
    body = _request()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=_INFLIGHT)) as session:

        async def post() -> object:
            async with session.post(f"{base_url}/chat/completions", data=body) as response:
                return await response.read()

        yield post


async def _cpu_ms(work: Callable[[], Awaitable[object]], size: int) -> float:
    left = size
    started = time.process_time()

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await work()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(_INFLIGHT):
            tasks.create_task(worker())
    return (time.process_time() - started) * 1000 / size


@contextlib.contextmanager
def _endpoint(tokens: int) -> Iterator[str]:
    """An endpoint in a process of its own that answers everything with one completion of so many tokens."""
    argv = [sys.executable, "-m", "benchmarks.env_sdk", str(tokens)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.communicate()  # the end of its standard input ends it


class _Canned(asyncio.Protocol):
    """Answers each request with the same bytes; understands just enough HTTP for our own client."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            length = int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
            if len(self._buffer) < end + 4 + length:
                return
            self._buffer = self._buffer[end + 4 + length :]
            self._transport.write(self._answer)


def _completion(tokens: int) -> bytes:
    """A completion as vLLM would return it."""
    content = [
        {"token": "word", "logprob": -0.5 - index / 7, "bytes": [119, 111], "top_logprobs": []}
        for index in range(tokens)
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "word " * tokens, "refusal": None, "tool_calls": []},
        "logprobs": {"content": content},
        "finish_reason": "stop",
        "token_ids": [1000 + index for index in range(tokens)],
    }
    usage = {"prompt_tokens": _PROMPT_TOKENS, "completion_tokens": tokens}
    body = {"id": "c", "choices": [choice], "usage": usage, "prompt_token_ids": list(range(_PROMPT_TOKENS))}
    encoded = msgspec.json.encode(body)
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(encoded)}\r\n\r\n"
    return head.encode() + encoded


async def _serve(tokens: int) -> None:
    loop = asyncio.get_running_loop()
    answer = _completion(tokens)
    server = await loop.create_server(lambda: _Canned(answer), "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", flush=True)
    async with server:
        await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as _runner:
        _runner.run(_serve(int(sys.argv[1])))
