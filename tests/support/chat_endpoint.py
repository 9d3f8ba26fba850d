"""A chat endpoint for tests: a real HTTP server on loopback whose answers a test scripts."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Handler = Callable[["ChatEndpoint", web.Request], Awaitable[web.StreamResponse]]


def completion(
    text: str = "ok",
    *,
    prompt: list[int] | None = None,
    sampled: list[int] | None = None,
    logprobs: list[float] | None = None,
    finish_reason: str | None = "stop",
    **message: Any,
) -> dict[str, Any]:
    """A chat completion as vLLM returns it."""
    prompt = [1, 2, 3] if prompt is None else prompt
    sampled = [10, 11] if sampled is None else sampled
    logprobs = [-0.5] * len(sampled) if logprobs is None else logprobs
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": text,
                    "refusal": None,
                    "annotations": None,
                    "tool_calls": [],
                    "reasoning": None,
                    **message,
                },
                "logprobs": {
                    "content": [
                        {"token": "x", "logprob": value, "bytes": [120], "top_logprobs": []}
                        for value in logprobs
                    ]
                },
                "finish_reason": finish_reason,
                "stop_reason": None,
                "token_ids": sampled,
            }
        ],
        "usage": {
            "prompt_tokens": len(prompt),
            "total_tokens": len(prompt) + len(sampled),
            "completion_tokens": len(sampled),
        },
        "prompt_logprobs": None,
        "prompt_token_ids": prompt,
    }


def text_completion(
    text: str = "ok", *, prompt: list[int] | None = None, sampled: list[int] | None = None
) -> dict[str, Any]:
    """A text completion as vLLM returns it."""
    sampled = [10, 11] if sampled is None else sampled
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "text": text,
                "logprobs": {
                    "text_offset": [0] * len(sampled),
                    "token_logprobs": [-0.5] * len(sampled),
                    "tokens": ["x"] * len(sampled),
                    "top_logprobs": [{"x": -0.5}] * len(sampled),
                },
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": sampled,
                "prompt_logprobs": None,
                "prompt_token_ids": [1, 2, 3] if prompt is None else prompt,
            }
        ],
        "usage": {"prompt_tokens": 3, "total_tokens": 3 + len(sampled), "completion_tokens": len(sampled)},
    }


class ChatEndpoint:
    """Answers with what was scripted, in order, the last one again and again; remembers what was asked."""

    def __init__(self) -> None:
        self.base_url = ""
        self.answers: list[Any] = []
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.connections: set[Any] = set()
        self.arrived = asyncio.Event()
        self.aborted = asyncio.Event()

    def script(self, *answers: Any) -> None:
        """Dicts are sent as JSON with 200; others are responses, or functions that make one."""
        self.answers = list(answers)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(json.loads(await request.read()))
        self.headers.append(dict(request.headers))
        self.connections.add(id(request.transport))
        self.arrived.set()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, dict):
            return web.json_response(answer)
        response: web.StreamResponse = await answer(self, request)
        return response


def status(code: int, body: Any = None, **headers: str) -> Handler:
    """An answer with this status."""

    async def answer(endpoint: ChatEndpoint, request: web.Request) -> web.StreamResponse:
        text = (
            body if isinstance(body, str) else json.dumps(body or {"error": {"message": "no", "code": code}})
        )
        return web.Response(
            status=code, text=text, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )

    return answer


async def drop(endpoint: ChatEndpoint, request: web.Request) -> web.StreamResponse:
    """Close the connection without an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def hang(endpoint: ChatEndpoint, request: web.Request) -> web.StreamResponse:
    """Never answer; note when the client goes away."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        endpoint.aborted.set()
        raise
    return web.Response()


@asynccontextmanager
async def chat_endpoint() -> AsyncIterator[ChatEndpoint]:
    """A running endpoint; `base_url` ends in /v1."""
    endpoint = ChatEndpoint()
    endpoint.script(completion())
    app = web.Application()
    app.router.add_post("/v1/chat/completions", endpoint.handle)
    app.router.add_post("/v1/completions", endpoint.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    endpoint.base_url = f"http://127.0.0.1:{port}/v1"
    try:
        yield endpoint
    finally:
        await runner.cleanup()
