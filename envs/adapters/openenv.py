"""Environments behind an OpenEnv server: `openenv::http://host:8000`, or `openenv::package.server.app:app`.

The second starts the app of an installed package beside this process. Only its HTTP and WebSocket protocol is spoken,
with aiohttp, so nothing of the library is needed here. A rollout is one session, from reset until done; a task is the
seed of a reset. Servers serve few sessions at once, often one: their limit becomes the environment's capacity, so that
the service sends no more, and a rollout that meets a full server nevertheless (another client has a session) waits.
"""

import asyncio
import importlib.metadata
import os
import random
import re
import ssl
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

import aiohttp
import msgspec
import structlog

from envs.adapters.openenv_actions import (
    LIST_TOOLS,
    ActionKind,
    Move,
    action_kind,
    moves_of,
    observation_text,
)
from envs.adapters.openenv_server import LocalServer
from envs.adapters.openenv_session import ActionRefusedError, Outcome, ServerFullError, Session, open_session
from envs.adapters.seeds import check_seed_and_size, seeded_tasks
from envs.backoff import backoff_s
from envs.environment import Environment, Task, Tasks
from envs.errors import EnvironmentLoadError, FailureKind, RolloutFailure, shown_url
from envs.loader import make_environment
from envs.model import Message, Model, Reply
from envs.rollout import Rollout

Counting = Literal["sum", "last"]
"""How the rewards of the steps become one: all of them, or the last that was given."""

_PROBED = 16
"""Sessions that are opened to learn how many a server has; most have 1 or 8."""

_ANY = "<URL>"
_UNLIMITED = 2**31
_LOCAL_URL = "http://openenv"
_CONNECT_S = 30.0

log = structlog.get_logger()


class OpenEnv(Environment):
    """One server. `reset` goes to every reset beside the seed; `observation` names the fields that are shown.

    `token_env` is the variable with a token for a server elsewhere, `ca_file` whom to trust besides the system's authorities.
    """

    def __init__(
        self,
        address: str,
        *,
        reward: Counting = "sum",
        max_turns: int = 16,
        reset: Mapping[str, Any] | None = None,
        observation: Sequence[str] | str | None = None,
        text_field: str | None = None,
        sessions: int | None = None,
        seed: int = 0,
        size: int | None = None,
        token_env: str = "",
        ca_file: str = "",
    ) -> None:
        self.name = f"openenv::{shown_url(address)}"
        if reward not in get_args(Counting):
            raise EnvironmentLoadError(f'{self.name}: reward must be "sum" or "last", got {reward!r}')
        for option, value in (("max_turns", max_turns), ("sessions", sessions)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise EnvironmentLoadError(
                    f"{self.name}: {option} must be a positive whole number, got {value!r}"
                )
        check_seed_and_size(self.name, seed, size)
        self._server = None if _is_url(address) else LocalServer(address)
        self._base_url = _LOCAL_URL if self._server is not None else address.rstrip("/")
        self._headers = _token_header(self.name, token_env)
        self._tls = _tls(self.name, ca_file)
        self._counting = reward
        self._max_turns = max_turns
        self._reset = dict(reset or {})
        self._fields = [observation] if isinstance(observation, str) else observation
        self._text_field = text_field
        self._sessions = sessions
        self._seed, self._size = seed, size
        self._kind = ActionKind(None)
        self._places = asyncio.Semaphore(sessions or _UNLIMITED)
        self._jitter = random.Random()  # spreads attempts in time only
        self._opened = AsyncExitStack()
        self._http: aiohttp.ClientSession | None = None

    @property
    def capacity(self) -> int | None:
        return self._sessions

    def tasks(self, split: str) -> Tasks:
        return seeded_tasks(split, seed=self._seed, size=self._size, common=self._reset)

    async def setup(self) -> None:
        if self._server is not None:
            self._opened.push_async_callback(self._server.aclose)
        self._http = await self._opened.enter_async_context(
            aiohttp.ClientSession(
                connector=self._server.connector()
                if self._server is not None
                else aiohttp.TCPConnector(limit=0, ssl=self._tls),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            )
        )
        if self._server is not None:
            await self._server.ensure(self._http, self._base_url)
        schema = await self._schema()
        self._kind = action_kind(schema, text_field=self._text_field, env=self.name)
        if self._sessions is None:
            self._sessions = await self._count_sessions()
        log.info("openenv.connected", server=self.name, sessions=self._sessions)
        self._places = asyncio.Semaphore(self._sessions or _UNLIMITED)

    async def close(self) -> None:
        await self._opened.aclose()

    async def rollout(self, task: Task, model: Model) -> Rollout:
        attempt = 0
        async with self._places:
            while True:
                if self._server is not None:
                    await self._server.ensure(self._client, self._base_url)
                try:
                    async with open_session(self._client, self._base_url) as session:
                        return await self._episode(session, await session.reset(task), model)
                except ServerFullError:
                    # Another client has the session, or the server has not noticed yet that ours is over.
                    attempt += 1
                    pause_s = backoff_s(attempt, first_s=0.05, max_s=2.0)
                    await asyncio.sleep(pause_s * (0.5 + 0.5 * self._jitter.random()))
                except RolloutFailure as failure:
                    if failure.kind == FailureKind.CONNECTION and self._server is not None:
                        await self._server.wait_ended()
                    raise

    async def _episode(self, session: Session, outcome: Outcome, model: Model) -> Rollout:
        kind = self._kind
        if kind.own_tools:
            kind = kind.with_tools((await session.step(LIST_TOOLS)).observation.get("tools"))
        episode = _Episode(session, kind, self._fields, outcome)
        while not episode.stopped:
            if episode.turns == self._max_turns:
                episode.stopped = "max_turns"
                break
            try:
                reply = await model.chat(episode.messages, tools=kind.tools or None)
            except RolloutFailure as failure:
                if failure.kind != FailureKind.CONTEXT_LENGTH or not episode.turns:
                    raise
                episode.stopped = "context_length"
                break
            await episode.answer(reply)
        rewards = episode.rewards if self._counting == "sum" else episode.rewards[-1:]
        return model.rollout(
            sum(rewards),
            metrics={
                "turns": episode.turns,
                "refused_actions": episode.refused,
                "done": float(episode.stopped == "done"),
            },
            stop_reason=episode.stopped,
            truncated=episode.stopped in ("max_turns", "context_length") or None,
        )

    @property
    def _client(self) -> aiohttp.ClientSession:
        assert self._http is not None, "setup comes first"
        return self._http

    async def _schema(self) -> Mapping[str, Any]:
        """The JSON schema of actions; an address where there is no such server is told in one line."""
        try:
            async with self._client.get(f"{self._base_url}/schema") as response:
                if response.status == 200:
                    schema = msgspec.json.decode(await response.read())["action"]
                    if isinstance(schema, dict):
                        return schema
                problem = f"it answered {response.status} to /schema"
                if response.status in (401, 403):
                    problem += "; args.token_env names the variable with a token for it"
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            problem = str(error) or type(error).__name__
        except (msgspec.DecodeError, KeyError, TypeError):
            problem = "its /schema is not that of an OpenEnv server"
        raise EnvironmentLoadError(
            f"{self.name} cannot be used: {problem}; is an OpenEnv server running there?"
        )

    async def _count_sessions(self) -> int | None:
        """How many sessions the server has, None if more than anybody would open to find out."""
        async with AsyncExitStack() as probes:
            for opened in range(_PROBED):
                session = await probes.enter_async_context(open_session(self._client, self._base_url))
                try:
                    await session.state()
                except ServerFullError as full:
                    return max(1, full.max_sessions or opened)
                except RolloutFailure as failure:
                    # An environment that has no state before its first reset still has a session.
                    if failure.kind == FailureKind.CONNECTION:
                        raise
        return None


class _Episode:
    """What has been said and done in one session. `stopped` says why it is over, and is empty before."""

    def __init__(
        self, session: Session, kind: ActionKind, fields: Sequence[str] | None, first: Outcome
    ) -> None:
        self._session = session
        self._kind = kind
        self._fields = fields
        self.messages: list[Message] = [
            {"role": "user", "content": observation_text(first.observation, fields)}
        ]
        self.rewards: list[float] = []
        self.turns = 0
        self.refused = 0
        self.stopped = "done" if first.done else ""

    async def answer(self, reply: Reply) -> None:
        """Do what a reply says, and note what the policy is told."""
        self.turns += 1
        self.messages.append(reply.message)
        moves = moves_of(reply, self._kind)
        if not moves:
            self.stopped = "no_action"
        for move in moves:
            said = await self._act(move)
            role: Message = {"role": "user"}
            if move.call_id is not None:
                role = {"role": "tool", "tool_call_id": move.call_id}
            self.messages.append({**role, "content": said})
            if self.stopped:
                break

    async def _act(self, move: Move) -> str:
        if isinstance(move.action, str):
            self.refused += 1
            return f"error: {move.action}"
        try:
            outcome = await self._session.step(move.action)
        except ActionRefusedError as error:
            self.refused += 1
            return f"error: {error}"
        if outcome.reward is not None:
            self.rewards.append(outcome.reward)
        if outcome.done:
            self.stopped = "done"
        return observation_text(outcome.observation, self._fields)


class OpenEnvLoader:
    """Servers by their address, and the apps of installed packages."""

    def names(self) -> list[str]:
        """Apps of installed environments, and what stands for a server elsewhere."""
        apps = {
            f"{module}:app"
            for distribution in importlib.metadata.distributions()
            if any(re.match(r"openenv(-core)?\b(?!-)", needed) for needed in distribution.requires or ())
            for module in _apps(distribution)
        }
        return sorted({_ANY, *apps})

    def about(self, name: str) -> str:
        return "a running OpenEnv server, as http://host:8000" if name == _ANY else "served for the run"

    def load(self, name: str, args: Mapping[str, Any]) -> Environment:
        return make_environment(partial(OpenEnv, name), args, f"openenv::{shown_url(name)}")


LOADER = OpenEnvLoader()


def _is_url(address: str) -> bool:
    if re.fullmatch(r"[\w.]+:[\w.]+", address):
        return False
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise EnvironmentLoadError(
            f"openenv::{shown_url(address)} is neither the URL of a server (http://host:8000) nor the app of an "
            "installed environment (package.server.app:app)"
        )
    return True


def _token_header(name: str, variable: str) -> dict[str, str]:
    if not variable:
        return {}
    token = os.environ.get(variable)
    if not token:
        raise EnvironmentLoadError(f"{name}: the server's token is not in the variable {variable}")
    return {"Authorization": f"Bearer {token}"}


def _tls(name: str, ca_file: str) -> ssl.SSLContext | bool:
    """Whom to trust: the system's authorities, and those of a file."""
    if not ca_file:
        return True
    context = ssl.create_default_context()
    try:
        context.load_verify_locations(ca_file)
    except (OSError, ssl.SSLError) as error:
        raise EnvironmentLoadError(f"{name}: ca_file {ca_file} cannot be used: {error}") from None
    return context


def _apps(distribution: importlib.metadata.Distribution) -> set[str]:
    """Modules of a distribution that are where OpenEnv puts an environment's app."""
    paths = [file.parts for file in distribution.files or ()]
    return {".".join((*parts[:-1], "app")) for parts in paths if parts[-2:] == ("server", "app.py")}
