"""Two seats that each want to be right where the other is wrong: a rollout with a reward for each of its parts.

Both are shown the same letters; white is to name the first, black the last. What one wins the other loses, so that the
rewards of a rollout always have the mean 0: only a policy that is rewarded by seat learns anything here.
"""

import itertools

from envs import Environment, Model, Rollout, Task
from envs.builtin._scoring import overlap


class Duel(Environment):
    """`count` letters out of `letters` are shown."""

    def __init__(self, letters: str = "abcdefghijkl", count: int = 2) -> None:
        shown = ["".join(chosen) for chosen in itertools.permutations(letters, count)]
        self._splits = {
            "eval": shown[::8],
            "train": [letters for number, letters in enumerate(shown) if number % 8],
        }

    def tasks(self, split: str) -> list[Task]:
        return [{"letters": letters} for letters in self._splits[split]]

    async def rollout(self, task: Task, model: Model) -> Rollout:
        letters = task["letters"]
        white = await model.seat("white").chat([{"role": "user", "content": f"white {letters}"}])
        black = await model.seat("black").chat([{"role": "user", "content": f"black {letters}"}])
        scores = {"white": overlap(white.text, letters[0]), "black": overlap(black.text, letters[-1])}
        lead = scores["white"] - scores["black"]
        return model.rollout(rewards={"white": lead, "black": -lead}, metrics=scores)
