"""Runs rollouts of one environment inside a virtualenv of the adapters' libraries.

Reads one JSON scenario per line and answers each with one line: what the env server's own `Responder` made of the
runs, and the requests that reached the inference server. That server is here as well: it answers from the
scenario's script and tokenises by characters, so that token ids can be checked by hand.
"""

import asyncio
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from envs import wire
from envs.answering import Responder
from envs.environment import Environment
from envs.errors import EnvironmentLoadError
from envs.importing import import_attribute
from envs.inference_client import InferenceClient
from envs.loader import find_loader, load_environment
from envs.model import ModelSettings

START, END = 1, 2


class ScriptedServer:
    """Chat completions from a script: one list of possible replies per turn, taken in order of arrival."""

    def __init__(self, turns: list[list[dict[str, Any]]]) -> None:
        self._turns = [itertools.cycle(replies) for replies in turns]
        self.requests: list[dict[str, Any]] = []
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        try:
            yield
        finally:
            await runner.cleanup()

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        replies = [next(self._turns[min(turn, len(self._turns) - 1)]) for _ in range(body.get("n") or 1)]
        await asyncio.sleep(replies[0].get("delay_s", 0.0))
        if "status" in replies[0]:
            return web.json_response({"error": {"message": replies[0]["error"]}}, status=replies[0]["status"])
        choices = []
        for reply in replies:
            message = {"role": "assistant", "content": reply.get("content", "")}
            if reply.get("tool_calls"):
                message["tool_calls"] = [
                    {"id": f"call_{place}", "type": "function", "function": call}
                    for place, call in enumerate(reply["tool_calls"])
                ]
            sampled = [ord(char) for char in text_of(message)] + [END]
            logprobs = {"content": [{"token": "", "logprob": -token / 1000} for token in sampled]}
            choices.append({"message": message, **_sampled(reply, sampled, logprobs)})
        return _answer("chat.completion", body, render(body["messages"]), choices)

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        prompt = [ord(char) for char in body["prompt"]] if isinstance(body["prompt"], str) else body["prompt"]
        choices = []
        for _ in range(body.get("n") or 1):
            reply = next(self._turns[0])
            sampled = [ord(char) for char in reply["content"]] + [END]
            logprobs = {"token_logprobs": [-token / 1000 for token in sampled]}
            choices.append({"text": reply["content"], **_sampled(reply, sampled, logprobs)})
        return _answer("text_completion", body, prompt, choices)


def _sampled(reply: Mapping[str, Any], sampled: list[int], logprobs: dict[str, Any]) -> dict[str, Any]:
    return {
        "index": 0,
        "finish_reason": reply.get("finish_reason", "stop"),
        "token_ids": sampled,
        "logprobs": logprobs,
    }


def _answer(
    kind: str, body: Mapping[str, Any], prompt: list[int], choices: list[dict[str, Any]]
) -> web.Response:
    sampled = sum(len(choice["token_ids"]) for choice in choices)
    return web.json_response(
        {
            "id": "x",
            "object": kind,
            "created": 0,
            "model": body["model"],
            "prompt_token_ids": prompt,
            "choices": choices,
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": sampled, "total_tokens": 0},
        }
    )


def text_of(message: Mapping[str, Any]) -> str:
    """A message as the template writes it: its text, then its tool calls."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return text + "".join(f"<{call['name']} {call['arguments']}>" for call in calls)


def render(messages: list[dict[str, Any]]) -> list[int]:
    """Tokens of a prompt; the sampled tokens of a turn are a prefix of how the next prompt writes it."""
    tokens = []
    for message in messages:
        tokens += [START, ord(message["role"][0]), *map(ord, text_of(message)), END]
    return [*tokens, START, ord("a")]


async def play(scenario: Mapping[str, Any], environment: Environment) -> dict[str, Any]:
    """Do the runs of a scenario, side by side."""
    server = ScriptedServer(scenario["turns"])
    settings = ModelSettings(
        "policy",
        sampling=scenario.get("sampling", {}),
        system_prompt=scenario.get("system_prompt"),
        train=scenario.get("train", True),
    )
    async with server.running(), InferenceClient(limit=64) as client:
        try:
            await environment.setup()
            responder = Responder(environment, client=client, env="tested")
            splits = {split: responder.tasks_in(split) for split in scenario.get("splits", ["train"])}
            requests = [
                wire.Request(
                    number, base_url=server.url, **{"kind": "rollout", "split": "train", "index": 0, **run}
                )
                for number, run in enumerate(scenario["runs"])
            ]
            async with asyncio.TaskGroup() as tasks:
                answers = [tasks.create_task(responder.answer(request, settings)) for request in requests]
            return {
                "tasks": splits,
                "group_scored": responder.group_scored,
                "capacity": environment.capacity,
                "answers": [readable(answer.result()) for answer in answers],
                "requests": server.requests,
            }
        finally:
            await environment.close()


def readable(frames: list[bytes]) -> dict[str, Any]:
    """A wire message as JSON."""
    message = wire.decode_to_client(frames)
    if isinstance(message, wire.Failure):
        return {"kind": message.kind, "message": message.message, "retryable": message.retryable}
    assert isinstance(message, wire.Result)
    return {
        "rollouts": [msgspec.to_builtins(rollout) for rollout in message.rollouts],
        "tokens": message.tokens.tolist(),
        "mask": message.mask.tolist(),
        "logprobs": message.logprobs.tolist(),
        "digest": message.digest,
        "transcripts": msgspec.msgpack.decode(message.transcript),
    }


def answer(scenario: Mapping[str, Any]) -> dict[str, Any]:
    """Load the environment as a server does, on the main thread and before the loop, and play."""
    if "names" in scenario:
        return {"names": list(find_loader(scenario["names"]).names())}
    if "call" in scenario:
        return {"returned": import_attribute(scenario["call"], what="function")(**scenario["args"])}
    try:
        environment = load_environment(scenario["id"], scenario.get("args", {}))
        return asyncio.run(play(scenario, environment))
    except EnvironmentLoadError as error:
        return {"load_error": str(error)}


def main() -> None:
    # Libraries may print; the answers have a channel of their own.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=channel, flush=True)


if __name__ == "__main__":
    main()
