"""Games of TextArena: `textarena::TicTacToe-v0`, alone, by self-play, or against a fixed opponent.

Every seat that the policy plays has its own conversation, one sequence and one reward. The library's `-raw` variant is
played, whose observations are only what is new for a seat, so that its turns extend each other. A task is a seed. The
library draws from the global `random` and blocks, so that all its calls are made on one thread, each game with a
generator of its own: what a game does follows from its seed and the moves.
"""

import asyncio
import importlib
import importlib.metadata
import os
import random
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from envs.adapters.seeds import check_seed_and_size, seeded_tasks
from envs.environment import Environment, Task, Tasks
from envs.errors import EnvironmentLoadError, FailureKind, RolloutFailure
from envs.importing import nearest
from envs.inference_client import InferenceClient
from envs.loader import make_environment
from envs.model import Message, Model, ModelSettings
from envs.rollout import Rollout

INSTALL = "pip install 'rollout-orchestrator[textarena]'"

_VARIANT = re.compile(r"-(raw|train)$")
_MOST_PLAYERS = 15
_OPPONENT_CONNECTIONS = 256
_OPPONENT_OPTIONS = frozenset({"model", "base_url", "api_key_env", "sampling", "system_prompt"})

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Turn:
    """Whose turn it is, and what is new for that seat."""

    player: int
    text: str


class Game:
    """One game; every call is made on the thread that all games share."""

    def __init__(self, game: Any, *, players: int, seed: int) -> None:
        self._game = game
        self._players = players
        self._state = random.Random(seed).getstate()
        self._seed = seed

    def start(self) -> Turn:
        return self._drawn(
            lambda: (self._game.reset(num_players=self._players, seed=self._seed), self._look())[1]
        )

    def step(self, move: str) -> tuple[bool, Turn | None]:
        """Whether the game is over, and else whose turn it is."""

        def step() -> tuple[bool, Turn | None]:
            done, _ = self._game.step(action=move)
            return bool(done), None if done else self._look()

        return self._drawn(step)

    def close(self) -> tuple[dict[int, float] | None, Mapping[int, Any]]:
        """Rewards by player, None while the game has not ended, and what the library tells of each player."""
        rewards, info = self._drawn(self._game.close)
        return None if rewards is None else {
            player: float(reward) for player, reward in rewards.items()
        }, info

    def _look(self) -> Turn:
        player, observation = self._game.get_observation()
        if isinstance(observation, str):  # of a variant with wrappers
            return Turn(player, observation)
        lines = []
        for sender, text, _ in observation:
            if sender == player:
                continue  # its own move, which it knows
            name = "GAME" if sender < 0 else self._game.state.role_mapping.get(sender, f"Player {sender}")
            lines.append(f"[{name}] {text}")
        return Turn(player, "\n".join(lines))

    def _drawn(self, act: Callable[[], T]) -> T:
        """Act with the game's own generator in place of the one that everybody shares."""
        shared = random.getstate()
        random.setstate(self._state)
        try:
            return act()
        finally:
            self._state = random.getstate()
            random.setstate(shared)


class TextArena(Environment):
    """One game. Without `opponent` the policy plays every seat; with one it plays `seat`, or each in turn."""

    def __init__(
        self,
        name: str,
        *,
        players: int | None = None,
        opponent: Mapping[str, Any] | None = None,
        seat: int | None = None,
        max_turns: int = 200,
        unfinished_reward: float = 0.0,
        game: Mapping[str, Any] | None = None,
        seed: int = 0,
        size: int | None = None,
    ) -> None:
        self.name = f"textarena::{name}"
        check_seed_and_size(self.name, seed, size)
        if not isinstance(max_turns, int) or max_turns < 1:
            raise EnvironmentLoadError(
                f"{self.name}: max_turns must be a positive whole number, got {max_turns!r}"
            )
        self._id = name if _VARIANT.search(name) else f"{name}-raw"
        self._options = dict(game or {})
        self._players = self._count_players(players)
        if opponent is not None and self._players == 1:
            raise EnvironmentLoadError(f"{self.name} is for one player, who has no opponent")
        if seat is not None and (opponent is None or seat not in range(self._players)):
            raise EnvironmentLoadError(
                f"{self.name}: seat must be a number below {self._players} and needs an opponent, got {seat!r}"
            )
        self._opponent = _opponent_settings(self.name, opponent)
        self._opponent_url: str | None = (opponent or {}).get("base_url")
        self._seat = seat
        self._max_turns = max_turns
        self._unfinished = unfinished_reward
        self._seed, self._size = seed, size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="textarena")
        self._opened = AsyncExitStack()
        self._client: InferenceClient | None = None

    def tasks(self, split: str) -> Tasks:
        return seeded_tasks(split, seed=self._seed, size=self._size, common={})

    async def setup(self) -> None:
        if self._opponent_url is not None:
            client = InferenceClient(limit=_OPPONENT_CONNECTIONS)
            self._client = await self._opened.enter_async_context(client)

    async def close(self) -> None:
        await self._opened.aclose()
        # A move that never returns must not keep the server from ending.
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def rollout(self, task: Task, model: Model) -> Rollout:
        seats = self._seats(task["seed"], model)
        game = Game(await self._on_thread(self._make), players=self._players, seed=task["seed"])
        turn: Turn | None = await self._on_thread(game.start)
        talks: dict[int, list[Message]] = {player: [] for player in range(self._players)}
        turns, stopped = 0, ""
        while turn is not None:
            if turns == self._max_turns:
                stopped = "max_turns"
                break
            talk = talks[turn.player]
            talk.append({"role": "user", "content": turn.text})
            try:
                reply = await seats[turn.player].chat(talk)
            except RolloutFailure as failure:
                if self._opponent is not None and seats[turn.player] is not model:
                    raise _opponents_fault(failure) from failure
                if failure.kind != FailureKind.CONTEXT_LENGTH or not turns:
                    raise
                stopped = "context_length"
                break
            turns += 1
            talk.append(reply.message)
            _, turn = await self._on_thread(game.step, reply.text)
        rewards, told = await self._on_thread(game.close)
        return self._handed_in(model, seats, talks, rewards, told, turns, stopped)

    def _seats(self, seed: int, model: Model) -> list[Model]:
        """Who plays which seat. The only seat of the policy is the rollout itself."""
        if self._players == 1:
            return [model]
        if self._opponent is None:
            return [model.seat(f"player {player}") for player in range(self._players)]
        own = seed % self._players if self._seat is None else self._seat
        return [model if player == own else self._other(model) for player in range(self._players)]

    def _other(self, model: Model) -> Model:
        assert self._opponent is not None
        if self._opponent_url is None:
            return model.sibling(name=self._opponent.model)
        assert self._client is not None, "setup comes first"
        return Model(self._opponent, client=self._client, base_url=self._opponent_url)

    def _handed_in(
        self,
        model: Model,
        seats: list[Model],
        talks: Mapping[int, list[Message]],
        rewards: Mapping[int, float] | None,
        told: Mapping[int, Any],
        turns: int,
        stopped: str,
    ) -> Rollout:
        earned = {
            player: self._unfinished if rewards is None else rewards.get(player, self._unfinished)
            for player in range(self._players)
        }
        metrics = {"turns": float(turns), "finished": float(rewards is not None)}
        for player in range(self._players):
            metrics[f"player {player} reward"] = earned[player]
            metrics[f"player {player} invalid move"] = float(told[player].get("invalid_move", False))
        end: dict[str, Any] = {
            "metrics": metrics,
            "stop_reason": stopped or "game_over",
            "truncated": bool(stopped) or None,
        }
        own = next((player for player, seat in enumerate(seats) if seat is model), None)
        if own is not None:
            return model.rollout(earned[own], **end)
        # A seat whose turn never came has nothing to train on.
        played = {f"player {player}": earned[player] for player, talk in talks.items() if len(talk) > 1}
        return model.rollout(rewards=played, **end)

    def _make(self) -> Any:
        return _library().make(self._id, **self._options)

    def _count_players(self, wanted: int | None) -> int:
        """How many play: as many as wanted, else the fewest that the game takes. A game that cannot be played says why."""
        tried = range(1, _MOST_PLAYERS + 1) if wanted is None else [wanted]
        problem = ""
        for players in tried:
            try:
                Game(self._make(), players=players, seed=0).start()
            # Foreign code, and some of it does not even parse here: whatever is wrong is told.
            except Exception as error:  # noqa: BLE001  see above
                problem = problem or " ".join(f"{type(error).__name__}: {error}".split())
                if not isinstance(error, (AssertionError, ValueError, KeyError, IndexError)):
                    break
            else:
                return players
        shown = f"{wanted} players: " if wanted is not None else ""
        raise EnvironmentLoadError(f"{self.name} cannot be played here: {shown}{problem}")

    async def _on_thread(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)


class TextArenaLoader:
    """All games of the installed library."""

    def names(self) -> list[str]:
        registry = _registry()
        return sorted(name for name in registry if f"{name}-raw" in registry)

    def load(self, name: str, args: Mapping[str, Any]) -> Environment:
        registry = _registry()
        if name not in registry:
            raise EnvironmentLoadError(f'TextArena has no game "{name}"; {nearest(name, self.names())}')
        return make_environment(partial(TextArena, name), args, f"textarena::{name}")


LOADER = TextArenaLoader()


def _opponent_settings(name: str, table: Mapping[str, Any] | None) -> ModelSettings | None:
    """Another model of the policy's endpoint, or one at an endpoint of its own; never trained on."""
    if table is None:
        return None
    unknown = [key for key in table if key not in _OPPONENT_OPTIONS]
    if unknown:
        raise EnvironmentLoadError(
            f'{name}: opponent has no option "{unknown[0]}"; {nearest(unknown[0], _OPPONENT_OPTIONS)}'
        )
    if not table.get("model"):
        raise EnvironmentLoadError(f"{name}: opponent needs a model")
    key = None
    if variable := table.get("api_key_env"):
        key = os.environ.get(variable)
        if not key:
            raise EnvironmentLoadError(f"{name}: the opponent's API key is not in the variable {variable}")
    try:
        return ModelSettings(
            table["model"], table.get("sampling") or {}, table.get("system_prompt"), key, train=False
        )
    except ValueError as error:
        raise EnvironmentLoadError(f"{name}: opponent: {error}") from None


def _opponents_fault(failure: RolloutFailure) -> RolloutFailure:
    """The same under a name of its own: the policy's endpoint is not to blame."""
    return RolloutFailure(
        f"opponent_{failure.kind}", f"the opponent: {failure.message}", retryable=failure.retryable
    )


def _registry() -> Mapping[str, Any]:
    _library()
    registry: Mapping[str, Any] = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
    return registry


def _library() -> Any:
    try:
        version = importlib.metadata.version("textarena")
    except importlib.metadata.PackageNotFoundError:
        raise EnvironmentLoadError(
            f"textarena is not installed for this interpreter; {INSTALL}, or set `python` to one that has it"
        ) from None
    refuse_other_releases(version)
    return importlib.import_module("textarena")


def refuse_other_releases(version: str) -> None:
    """Raise EnvironmentLoadError unless the adapter fits the release."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers != (0, 7):
        raise EnvironmentLoadError(
            f"textarena {version} is not supported, 0.7 is; {INSTALL} in a virtualenv of its own and set `python` to it"
        )
