"""The files that `orchestrator init` writes: a small project in which everything runs as printed, without a GPU.

The environment and the trainer are those of the README, letter by letter; tests hold both to it.
"""

SPELLING = '''\
# spelling.py
from envs import Environment, Model, Rollout, Task


class Spelling(Environment):
    """Spell a word, letter by letter."""

    def __init__(self, words: list[str]) -> None:
        self._words = words

    def tasks(self, split: str) -> list[Task]:
        return [{"word": word} for word in self._words]

    async def rollout(self, task: Task, model: Model) -> Rollout:
        reply = await model.chat([{"role": "user", "content": f"Spell {task['word']}."}])
        wanted = "-".join(task["word"])
        right = sum(given == letter for given, letter in zip(reply.text, wanted, strict=False))
        return model.rollout(reward=right / max(len(wanted), len(reply.text)))
'''

TRAINER = """\
# trainer.py
from pathlib import Path

from orchestrator.local.policy import Experience, Policy
from orchestrator.trainer import TrainerClient

policy = Policy()  # your model; here the small one that [local] serves

with TrainerClient("tcp://127.0.0.1:5555", rank=0, world_size=1) as trainer:
    for batch in trainer:
        experience = Experience()
        for sequence in batch.sequences:  # numpy arrays, and .reward, .env, .seat, …
            experience.add(sequence.tokens, sequence.mask, sequence.logprobs, sequence.advantages)
        policy.learn(experience, learning_rate=2.5)
        weights = policy.save(Path("ckpt", f"step_{batch.step}").resolve())
        trainer.publish(version=batch.step, path=str(weights))
"""

TEST = '''\
# test_spelling.py
import json
import unittest

from envs import Model, ModelSettings
from spelling import Spelling


class Saying:
    """An inference server that always says the same."""

    def __init__(self, text: str) -> None:
        self.text = text

    async def chat(self, base_url: str, body: bytes, headers: object) -> bytes:
        message = {"role": "assistant", "content": self.text}
        return json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()


class SpellingTest(unittest.IsolatedAsyncioTestCase):
    async def reward_of(self, answer: str) -> float:
        environment = Spelling(words=["cat"])
        model = Model(ModelSettings(model="any", train=False), client=Saying(answer), base_url="")
        rollout = await environment.rollout(environment.tasks("train")[0], model)
        return rollout.reward

    async def test_the_right_answer_earns_all(self) -> None:
        self.assertEqual(await self.reward_of("c-a-t"), 1.0)

    async def test_a_wrong_answer_earns_less(self) -> None:
        self.assertEqual(await self.reward_of("c-a"), 0.6)
        self.assertEqual(await self.reward_of("no"), 0.0)


if __name__ == "__main__":
    unittest.main()
'''

CONFIG = """\
# Spelling words with the small policy that comes along, which needs no GPU, and a trainer of your own.
#:schema ./schema.json
run_dir = "runs/spelling"
max_steps = 20

[local]
# Your trainer is trainer.py; without this line a reference trainer is started too.
trainer = false

[batch]
size = 64

[train]
group_size = 8
sampling = { temperature = 1.0, max_tokens = 8 }

[[train.env]]
name = "spelling"
id = "spelling:Spelling"
args = { words = ["cat", "dog", "sun", "pig"] }

[[eval.env]]
name = "spelling"
id = "spelling:Spelling"
# Words that are not trained on.
args = { words = ["fox", "hen"] }

[dispatch]
# A new policy earns nothing in most groups; they are trained on too, so that the first batches come soon.
keep_equal_rewards = true

[http]
port = 0
"""

README = """\
# A project for the rollout orchestrator

| file | what it is |
|---|---|
| `spelling.py` | an environment: its tasks, and one attempt at one of them |
| `test_spelling.py` | a test of it, without any model |
| `config.toml` | the configuration of a run |
| `trainer.py` | a trainer: learns from every batch and publishes new weights |
| `schema.json` | what an editor needs to complete and check `config.toml`; `orchestrator schema` prints it |

Look at the environment, first with a test, then with a small policy that answers:

```sh
python -m unittest
orchestrator env try spelling:Spelling --args '{"words": ["cat", "horse"]}'
```

Check the configuration, and everything that it names:

```sh
orchestrator check config.toml --deep
```

Run it. The orchestrator and the trainer are two processes, for instance in two terminals:

```sh
orchestrator run config.toml
```

```sh
python trainer.py
```

The same command again continues the run where it ended; `--fresh` starts over. Results are in `runs/spelling`.
With a real model, name its servers instead of `[local]`: `inference.base_urls` and `inference.weight_update`.
"""

FILES = {
    "spelling.py": SPELLING,
    "test_spelling.py": TEST,
    "config.toml": CONFIG,
    "trainer.py": TRAINER,
    "README.md": README,
}
