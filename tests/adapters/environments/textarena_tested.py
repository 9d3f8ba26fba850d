"""Games for the tests of the TextArena adapter, on the library's base classes, and the library's own way to play."""

# Its library is only in a virtualenv of its own.
# mypy: ignore-errors

import random
from typing import Any

import textarena as ta
from textarena.envs.registration import register_with_versions
from textarena.wrappers import LLMObservationWrapper


class Dice(ta.Env):
    """One player guesses dice that are thrown as the game goes on, from the global `random` as games do."""

    def reset(self, num_players: int, seed: int | None = None) -> None:
        self.state = ta.SinglePlayerState(num_players=num_players, seed=seed, max_turns=3)
        self.state.reset(game_state={"right": 0}, player_prompt_function=lambda **_: "Guess the next die.")

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        self.state.add_observation(
            from_id=0, message=action, observation_type=ta.ObservationType.PLAYER_ACTION
        )
        die = random.randint(1, 6)
        self.state.game_state["right"] += action == f"[{die}]"
        self.state.add_observation(message=f"It was {die}.", observation_type=ta.ObservationType.GAME_MESSAGE)
        if self.state.turn == 2:
            self.state.set_outcome(reward=self.state.game_state["right"] / 3, reason="over")
        return self.state.step()


class Nobody(ta.Env):
    """Cannot be made at all."""

    def __init__(self) -> None:
        raise RuntimeError("no key in SOME_API_KEY")

    def reset(self, num_players: int, seed: int | None = None) -> None:
        pass

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        return True, {}


register_with_versions("Dice-v0", Dice, wrappers={"default": [LLMObservationWrapper]})
register_with_versions("Nobody-v0", Nobody, wrappers={"default": [LLMObservationWrapper]})


def register() -> bool:
    """Importing this module is what registers."""
    return True


def library_run(game: str, seed: int, players: int, moves: list[str]) -> dict[str, Any]:
    """What each player has seen at its last turn, and the rewards, with the library's default wrappers."""
    env = ta.make(game)
    env.reset(num_players=players, seed=seed)
    seen: dict[int, str] = {}
    done = False
    for move in moves:
        player, seen[player] = env.get_observation()
        done, _ = env.step(action=move)
        if done:
            break
    rewards, _ = env.close()
    return {"seen": seen, "rewards": rewards, "done": done}
