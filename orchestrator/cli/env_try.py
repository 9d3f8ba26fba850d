"""Runs a few rollouts of one task the way a server would, and prints what a trainer and a person would see.

The same code as in an env server looks the task up, does the rollouts and checks them, so what passes here
passes there. Without a base URL the small local policy answers.
"""

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import msgspec
import numpy as np
from rich.console import Console
from rich.markup import escape

from envs import wire
from envs.answering import Responder
from envs.environment import Environment
from envs.errors import shown_url
from envs.inference_client import InferenceClient
from envs.loader import load_environment, parse_id
from envs.logs import configure_logging
from envs.model import ModelSettings
from envs.seeding import seeded
from orchestrator.cli.env import UsageError
from orchestrator.cli.env_check import check_tasks

EXIT_FAILED = 1
EXIT_STARTUP = 3
_TEXT_CHARS = 4000
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What a terminal obeys instead of showing it; line ends and tabs stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrySpec:
    """What to try. Without `base_url` the local policy is used; without `model` the first that is served.

    `check` is how many tasks are compared in two processes before that.
    """

    id: str
    base_url: str | None = None
    model: str | None = None
    rollouts: int = 4
    split: str | None = None
    index: int = 0
    args: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None
    api_key_env: str | None = None
    timeout_s: float = 300.0
    train: bool = True
    check: int = 0


def try_environment(spec: TrySpec, *, console: Console | None = None) -> int:
    """Do it and print it; 0 when every rollout ended well, 1 when one failed, 3 when the environment did not load."""
    configure_logging("critical")  # failures are printed here, in full; the log would only repeat them
    console = console or Console(highlight=False, soft_wrap=True)
    api_key = None
    if spec.api_key_env is not None:
        api_key = os.environ.get(spec.api_key_env)
        if not api_key:
            raise UsageError(f"--api-key-env: the environment variable {spec.api_key_env} is not set")
    try:
        settings = ModelSettings(
            model=spec.model or "",
            sampling=spec.sampling,
            system_prompt=spec.system_prompt,
            api_key=api_key,
            train=spec.train,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    split = spec.split or parse_id(spec.id).split or "train"
    if spec.check and not check_tasks(spec.id, spec.args, split, spec.check, console):
        return EXIT_FAILED
    with seeded(0, "load"):
        environment = load_environment(spec.id, spec.args)
    with asyncio.Runner() as runner:
        return runner.run(_try(spec, environment, settings, console))


async def _try(spec: TrySpec, environment: Environment, settings: ModelSettings, console: Console) -> int:
    split = spec.split or parse_id(spec.id).split or "train"
    async with _endpoint(spec) as base_url, InferenceClient(limit=spec.rollouts) as client:
        if not settings.model:
            settings = replace(settings, model=await _first_model(base_url, settings.api_key))
        responder = Responder(environment, client=client, env=spec.id)
        try:
            with seeded(0, "setup"):
                await environment.setup()
            count = responder.tasks_in(split)
        # The environment's own code, which may raise anything: show where, as the server's log would.
        except Exception:  # noqa: BLE001  see above
            console.print_exception(show_locals=False)
            return EXIT_STARTUP
        try:
            tasks = "unbounded" if count is None else f"{count} tasks"
            scored = ", scored as a group" if responder.group_scored else ""
            console.print(
                f"{_shown(spec.id)}  split {split} ({tasks}), task {spec.index}{scored}; "
                f"model {_shown(settings.model)} at {shown_url(base_url)}"
            )
            answers = await _run(spec, split, responder, settings, base_url)
        finally:
            await environment.close()
    failed = 0
    for answer in answers:
        failed += _show(answer, console)
    return EXIT_FAILED if failed else 0


async def _run(
    spec: TrySpec, split: str, responder: Responder, settings: ModelSettings, base_url: str
) -> list[wire.Result | wire.Failure]:
    """The answers a server would send: one for the whole group, or one per rollout."""
    grouped = responder.group_scored
    requests = [
        wire.Request(
            id=number,
            kind="group" if grouped else "rollout",
            split=split,
            index=spec.index,
            base_url=base_url,
            count=spec.rollouts if grouped else 1,
            session=f"try-{os.getpid()}",
            timeout_s=spec.timeout_s,
        )
        for number in range(1 if grouped else spec.rollouts)
    ]
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(responder.answer(request, settings)) for request in requests]
    answers: list[wire.Result | wire.Failure] = []
    for task in running:
        message = wire.decode_to_client(task.result())
        assert isinstance(message, wire.Result | wire.Failure)
        answers.append(message)
    return answers


@asynccontextmanager
async def _endpoint(spec: TrySpec) -> AsyncIterator[str]:
    if spec.base_url is not None:
        if not spec.base_url.startswith(("http://", "https://")):
            raise UsageError(f"--base-url {spec.base_url} is not like http://127.0.0.1:8000/v1")
        yield spec.base_url
        return
    from orchestrator.local.server import run_policy_server

    async with run_policy_server() as base_url:
        yield base_url


async def _first_model(base_url: str, api_key: str | None) -> str:
    """The model that the endpoint names first."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    where = shown_url(base_url.rstrip("/") + "/models")
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
            session.get(base_url.rstrip("/") + "/models", headers=headers) as response,
        ):
            body = await response.read()
            status = response.status
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise UsageError(f"{where}: {error or type(error).__name__}; is the inference server up?") from None
    with contextlib.suppress(msgspec.DecodeError, KeyError, IndexError, TypeError):
        if status == 200:
            return str(msgspec.json.decode(body)["data"][0]["id"])
    raise UsageError(f"{where} answered {status} and names no model; give one with --model")


def _show(answer: wire.Result | wire.Failure, console: Console) -> bool:
    """Print one answer; whether it is a failure."""
    if isinstance(answer, wire.Failure):
        again = "may help" if answer.retryable else "will not help"
        console.rule(f"rollout {answer.id + 1} failed", align="left")
        console.print(f"{_shown(answer.kind)}: {_shown(answer.message)} (another attempt {again})")
        # Other kinds say it all in their message; only the environment's own exceptions need their place.
        if answer.kind == "error" and answer.detail:
            console.print(_shown(answer.detail.rstrip()), style="dim")
        return True
    transcripts = msgspec.msgpack.decode(answer.transcript)
    start = 0
    for number, (header, transcript) in enumerate(zip(answer.rollouts, transcripts, strict=True)):
        end = start + sum(header.lengths)
        console.rule(f"rollout {answer.id + number + 1}  reward {header.reward:g}", align="left")
        for message in transcript["messages"]:
            who = " ".join(str(message[key]) for key in ("seat", "role") if message.get(key)) or "?"
            console.print(f"[bold]{_shown(who)}[/bold]  {_shown(_said(message))}")
        console.print(_facts(header, answer, start, end), style="dim")
        start = end
    return False


def _shown(text: str) -> str:
    """Text of others as it may be printed: it neither moves the cursor nor is it taken for markup."""
    return escape(_CONTROL.sub("", text))


def _said(message: dict[str, Any]) -> str:
    """What a message says, tool calls included, cut to a screenful."""
    content = message.get("content")
    text = content if isinstance(content, str) else msgspec.json.encode(content).decode() if content else ""
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        text = f"<reasoning>{reasoning}</reasoning> {text}"
    for call in message.get("tool_calls") or []:
        function = call.get("function", {}) if isinstance(call, dict) else {}
        text += f" → {function.get('name')}({function.get('arguments')})"
    text = text.strip()
    return text if len(text) <= _TEXT_CHARS else f"{text[:_TEXT_CHARS]} … ({len(text)} characters)"


def _facts(header: wire.RolloutHeader, answer: wire.Result, start: int, end: int) -> str:
    seats = dict(zip(header.seats, header.rewards or [header.reward] * len(header.seats), strict=True))
    parts = [f"reward of {seat} {reward:g}" for seat, reward in seats.items()]
    parts += [f"stop {header.stop_reason}{' (truncated)' if header.truncated else ''}"]
    if header.lengths:
        sampled = int(answer.mask[start:end].sum())
        mean = float(np.sum(answer.logprobs[start:end], dtype=np.float64)) / max(1, sampled)
        parts.append(f"sequences {_join(header.lengths)}, sampled {sampled}, mean log-probability {mean:.3f}")
    parts += [f"{name} {value * 1000:.1f} ms" for name, value in header.timings.items()]
    parts += [f"{name} {value:g}" for name, value in header.metrics.items()]
    return " · ".join(_shown(part) for part in parts)


def _join(lengths: Sequence[int]) -> str:
    return f"{len(lengths)} of {'+'.join(map(str, lengths))} tokens"
