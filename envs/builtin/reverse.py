"""Write a word backwards: one turn, instant, finite tasks. The shortest way to write an environment."""

import itertools

from envs import Environment, Model, Rollout, Task
from envs.builtin._scoring import overlap


class Reverse(Environment):
    """`letters` is the alphabet of the words, `length` how long they are."""

    def __init__(self, letters: str = "abcdefgh", length: int = 3) -> None:
        words = ["".join(word) for word in itertools.product(letters, repeat=length)]
        self._splits = {
            "eval": words[::8],
            "train": [word for number, word in enumerate(words) if number % 8],
        }

    def tasks(self, split: str) -> list[Task]:
        return [{"word": word} for word in self._splits[split]]

    async def rollout(self, task: Task, model: Model) -> Rollout:
        reply = await model.chat([{"role": "user", "content": f"reverse {task['word']}"}])
        return model.rollout(reward=overlap(reply.text, task["word"][::-1]))
