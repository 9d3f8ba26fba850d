"""A few rollouts of one environment against an endpoint, without a service: what scripts call and `env try` prints.

The same code as in an env server looks tasks up, does the rollouts and checks them, so what passes here passes there.
The environment runs in this process. Without a base URL the small local policy answers.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import msgspec

from envs import wire
from envs.answering import Responder
from envs.environment import Environment
from envs.errors import shown_url
from envs.inference_client import InferenceClient
from envs.loader import check_methods, load_environment, parse_id
from envs.model import ModelSettings
from envs.rollout import Rollout
from orchestrator.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One attempt at one task. `rollout` has its messages and sequences; None where it failed, and `failure` says why."""

    split: str
    index: int
    attempt: int
    reward: float | None
    rollout: Rollout | None = field(repr=False)
    failure: str = ""
    failure_kind: str = ""


async def rollouts(
    environment: str | Environment,
    *,
    base_url: str | None = None,
    model: str | None = None,
    n: int = 1,
    indices: Sequence[int] = (0,),
    split: str | None = None,
    args: Mapping[str, Any] | None = None,
    sampling: Mapping[str, Any] | None = None,
    system_prompt: str | None = None,
    api_key: str | None = None,
    train: bool = True,
    timeout_s: float = 300.0,
    max_inflight: int = 64,
) -> list[RolloutRow]:
    """Run `n` rollouts of each task of `indices`; a row for each, in order, failed ones included.

    `environment` is an id, as in a configuration, or an Environment. Without `model` the first that the endpoint serves
    is taken; without `base_url` the local policy answers. `train = False` asks for no token ids, so that any chat
    endpoint will do. EnvironmentLoadError if the environment cannot be loaded, ConfigError if the endpoint cannot be used.
    """
    shown = environment if isinstance(environment, str) else type(environment).__name__
    if isinstance(environment, str):
        split = split or parse_id(environment).split
        environment = load_environment(environment, args)
    elif args:
        raise ConfigError("args are for an environment that is named by its id; this one is made already")
    else:
        check_methods(environment, shown)
    if n < 1 or max_inflight < 1:
        raise ConfigError(f"n and max_inflight must be at least 1, got {n} and {max_inflight}")
    try:
        settings = ModelSettings(
            model=model or "",
            sampling=dict(sampling or {}),
            system_prompt=system_prompt,
            api_key=api_key,
            train=train,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    rows: list[RolloutRow] = []
    async with opened(
        environment, shown, base_url, settings, split=split or "train", limit=max_inflight
    ) as tried:
        slots = asyncio.Semaphore(max(1, max_inflight // (n if tried.responder.group_scored else 1)))

        async def ask(request: wire.Request) -> list[Rollout] | wire.Failure:
            async with slots:
                return await tried.responder.rollouts(request, tried.settings)

        requests = [request for index in indices for request in tried.requests(index, n, timeout_s=timeout_s)]
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(ask(request)) for request in requests]
        for request, task in zip(requests, running, strict=True):
            rows += _rows(request, task.result())
    return rows


def _rows(request: wire.Request, ended: list[Rollout] | wire.Failure) -> list[RolloutRow]:
    """The rows of one request: of one attempt, or of a group that was scored together."""
    attempts = range(request.count) if request.kind == "group" else [request.id]
    if isinstance(ended, wire.Failure):
        return [
            RolloutRow(request.split, request.index, attempt, None, None, ended.described, ended.kind)
            for attempt in attempts
        ]
    return [
        RolloutRow(request.split, request.index, attempt, rollout.reward, rollout)
        for attempt, rollout in zip(attempts, ended, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Opened:
    """A loaded environment and an endpoint for it. `tasks` is their number, None when unbounded."""

    responder: Responder
    settings: ModelSettings
    base_url: str
    split: str
    tasks: int | None

    def requests(self, index: int, n: int, *, timeout_s: float) -> list[wire.Request]:
        """What a service would ask of a server: one request for a group that is scored together, or one per rollout."""
        grouped = self.responder.group_scored
        return [
            wire.Request(
                id=number,
                kind="group" if grouped else "rollout",
                split=self.split,
                index=index,
                base_url=self.base_url,
                count=n if grouped else 1,
                session=f"try-{os.getpid()}-{index}",
                timeout_s=timeout_s,
            )
            for number in range(1 if grouped else n)
        ]


@asynccontextmanager
async def opened(
    environment: Environment,
    shown: str,
    base_url: str | None,
    settings: ModelSettings,
    *,
    split: str,
    limit: int,
) -> AsyncIterator[Opened]:
    """Load an environment's tasks and find its endpoint; closed when the block is left."""
    async with _endpoint(base_url) as url, InferenceClient(limit=limit) as client:
        if not settings.model:
            settings = replace(settings, model=await _first_model(url, settings.api_key))
        responder = Responder(environment, client=client, env=shown, log_failures=False)
        count = (await responder.prepare([split]))[split]
        try:
            yield Opened(responder, settings, url, split, count)
        finally:
            await environment.close()


@asynccontextmanager
async def _endpoint(base_url: str | None) -> AsyncIterator[str]:
    if base_url is not None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url {base_url} is not like http://127.0.0.1:8000/v1")
        yield base_url
        return
    from orchestrator.local.server import run_policy_server

    try:
        async with run_policy_server() as local_url:
            yield local_url
    except ExceptionGroup as errors:
        # The server's own task group wraps what is raised beside it.
        raise errors.exceptions[0] from errors.exceptions[0].__cause__


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
        raise ConfigError(f"{where}: {error or type(error).__name__}; is the inference server up?") from None
    with contextlib.suppress(msgspec.DecodeError, KeyError, IndexError, TypeError):
        if status == 200:
            return str(msgspec.json.decode(body)["data"][0]["id"])
    raise ConfigError(f"{where} answered {status} and names no model; give one with --model")
