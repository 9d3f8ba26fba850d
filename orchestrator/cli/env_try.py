"""Runs a few rollouts of one task the way a server would, and prints what a trainer and a person would see.

The same code as in an env server looks the task up, does the rollouts and checks them, so what passes here
passes there. Without a base URL the small local policy answers.
"""

import asyncio
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.markup import escape

from envs import wire
from envs.environment import Environment
from envs.errors import EnvironmentRaisedError, shown_url
from envs.loader import load_environment, parse_id
from envs.logs import configure_logging
from envs.model import ModelSettings
from envs.seeding import seeded
from orchestrator.cli.env import UsageError
from orchestrator.cli.env_check import check_tasks
from orchestrator.errors import ConfigError
from orchestrator.service.rollouts import Opened, opened

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
    log_level: str = "info"


def try_environment(spec: TrySpec, *, console: Console | None = None) -> int:
    """Do it and print it; 0 when every rollout ended well, 1 when one failed, 3 when the environment did not load."""
    configure_logging(spec.log_level, "pretty")
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
    try:
        with seeded(0, "load"):
            environment = load_environment(spec.id, spec.args)
        with asyncio.Runner() as runner:
            return runner.run(_try(spec, environment, settings, console))
    except EnvironmentRaisedError as error:
        console.print(f"{_shown(str(error))}\n", style="bold")
        console.print(_shown(error.traceback.rstrip()), style="dim")
        return EXIT_STARTUP
    except ConfigError as error:
        raise UsageError(str(error)) from None


async def _try(spec: TrySpec, environment: Environment, settings: ModelSettings, console: Console) -> int:
    split = spec.split or parse_id(spec.id).split or "train"
    async with opened(
        environment, spec.id, spec.base_url, settings, split=split, limit=spec.rollouts
    ) as tried:
        tasks = "unbounded" if tried.tasks is None else f"{tried.tasks} tasks"
        scored = ", scored as a group" if tried.responder.group_scored else ""
        console.print(
            f"{_shown(spec.id)}  split {split} ({tasks}), task {spec.index}{scored}; "
            f"model {_shown(tried.settings.model)} at {shown_url(tried.base_url)}"
        )
        answers = await _answers(spec, tried)
    failed = 0
    for answer in answers:
        failed += _show(answer, console)
    return EXIT_FAILED if failed else 0


async def _answers(spec: TrySpec, tried: Opened) -> list[wire.Result | wire.Failure]:
    """The answers a server would send: one for the whole group, or one per rollout."""
    requests = tried.requests(spec.index, spec.rollouts, timeout_s=spec.timeout_s)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(tried.responder.answer(request, tried.settings)) for request in requests]
    answers: list[wire.Result | wire.Failure] = []
    for task in running:
        message = wire.decode_to_client(task.result())
        assert isinstance(message, wire.Result | wire.Failure)
        answers.append(message)
    return answers


def _show(answer: wire.Result | wire.Failure, console: Console) -> bool:
    """Print one answer; whether it is a failure."""
    if isinstance(answer, wire.Failure):
        again = "may help" if answer.retryable else "will not help"
        console.rule(f"rollout {answer.id + 1} failed", align="left")
        console.print(f"{_shown(answer.kind)}: {_shown(answer.described)} (another attempt {again})")
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
