"""OpenEnv servers for the adapter's tests: text actions, an action as a tool, the environment's own tools.

`serve` and `library_run` are called inside the library's virtualenv: the first serves an app over TCP, the second plays
one by the library's own client.
"""

# Its library is only in a virtualenv of its own.
# mypy: ignore-errors

import asyncio
import importlib
import os
import random
import socket
import threading
from enum import StrEnum
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core import GenericEnvClient
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: str


class Hint(Observation):
    hint: str = ""


class GuessEnvironment(Environment):
    """A number from 0 to 9 that follows from the seed. Half a point for every guess, 2 for the right one."""

    def __init__(self) -> None:
        super().__init__()
        self._secret = 0
        self._top = 9

    def reset(self, seed: int | None = None, top: int = 9, **_: Any) -> Hint:
        self._top = top
        self._secret = random.Random(seed).randint(0, top)
        return Hint(hint=f"Which number from 0 to {top}?")

    def step(self, action: Guess, **_: Any) -> Hint:
        if action.guess == "exit":
            os._exit(7)
        number = int(action.guess)
        if number == self._secret:
            return Hint(hint="right", reward=2.0, done=True)
        return Hint(hint="higher" if number < self._secret else "lower", reward=0.5)

    @property
    def state(self) -> State:
        return State()


guess = create_fastapi_app(GuessEnvironment, Guess, Hint)


class Direction(StrEnum):
    LEFT = "left"
    RIGHT = "right"


class Walk(Action):
    """Walk some steps along the line."""

    direction: Direction
    steps: int = 1


class Place(Observation):
    place: int
    goal: int


class WalkEnvironment(Environment):
    """A line; the reward of a step is what it came nearer, and the last is 10."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, **_: Any) -> Place:
        self._place = 0
        return Place(place=0, goal=3)

    def step(self, action: Walk, **_: Any) -> Place:
        self._place += action.steps if action.direction is Direction.RIGHT else -action.steps
        done = self._place == 3
        return Place(place=self._place, goal=3, reward=10.0 if done else float(self._place), done=done)

    @property
    def state(self) -> State:
        raise RuntimeError("no state before the first reset")


walk = create_fastapi_app(WalkEnvironment, Walk, Place, max_concurrent_envs=3)


class EchoEnvironment(Environment):
    """Asks for a number that follows from the seed; one answer, which is right or not."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, **_: Any) -> Hint:
        self._wanted = str(random.Random(seed).randint(0, 9999))
        return Hint(hint=f"Say {self._wanted}")

    def step(self, action: Guess, **_: Any) -> Hint:
        return Hint(hint="thank you", reward=float(action.guess == self._wanted), done=True)

    @property
    def state(self) -> State:
        return State()


echo = create_fastapi_app(EchoEnvironment, Guess, Hint, max_concurrent_envs=8)


class SumEnvironment(MCPEnvironment):
    """Tools that add and submit; the reward is for submitting 42."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("sums")

        @server.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        @server.tool
        def submit(answer: int) -> str:
            """Hand in the answer."""
            return "thank you"

        super().__init__(server)

    def reset(self, seed: int | None = None, **_: Any) -> Observation:
        return CallToolObservation(tool_name="", result="What is 20 + 22?")

    def _step_impl(self, action: Action, **_: Any) -> Observation:
        raise ValueError("only tools here")

    async def step_async(self, action: Any, **options: Any) -> Observation:
        observation: Observation = await super().step_async(action, **options)
        if getattr(action, "tool_name", "") == "submit":
            observation.done = True
            observation.reward = float(action.arguments["answer"] == 42)
        return observation

    @property
    def state(self) -> State:
        return State()


sums = create_fastapi_app(SumEnvironment, CallToolAction, CallToolObservation, max_concurrent_envs=2)


def serve(app: str, **options: Any) -> str:
    """Serve an app of this module for as long as the process lives, and return its URL."""
    served = getattr(importlib.import_module(__name__), app)
    server = uvicorn.Server(uvicorn.Config(served, log_level="warning", **options))
    listening = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=server.run, args=([listening],), daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


def library_run(app: str, reset: dict[str, Any], actions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Observation, reward and done of a reset and of each action, by the library's own client."""
    url = serve(app)

    async def run() -> list[dict[str, Any]]:
        async with GenericEnvClient(base_url=url) as client:
            results = [await client.reset(**reset)]
            results += [await client.step(action) for action in actions]
        return [
            {"observation": result.observation, "reward": result.reward, "done": result.done}
            for result in results
        ]

    return asyncio.run(run())
