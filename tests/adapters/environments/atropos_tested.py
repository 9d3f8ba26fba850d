"""Atropos environments for the adapter's tests, on the library's base class, one for each way of asking and scoring.

`library_run` is called inside the library's virtualenv: it runs an environment with the library's own server.
"""

# Its library is only in a virtualenv of its own.
# mypy: ignore-errors

import asyncio
import contextlib
import random
import sys
import tempfile
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ["stone", "river", "cloud", "ember"]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


FOLDER = tempfile.TemporaryDirectory(prefix="atropos-tested-")
"""Of this process alone: servers side by side each write theirs."""


def make_tokenizer() -> str:
    """A directory with a tokenizer by characters, whose ids are not the engine's."""
    characters = [chr(number) for number in range(10, 127)]
    vocabulary = {"?": 0, "</s>": 1} | {character: place + 2 for place, character in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", eos_token="</s>")
    made.chat_template = TEMPLATE
    made.save_pretrained(FOLDER.name)
    return FOLDER.name


TOKENIZER = make_tokenizer()


class TestedConfig(BaseEnvConfig):
    """A knob of the environment's own."""

    factor: float = 1.0


class Reversing(BaseEnv):
    """Asks for a word to be reversed, tokenises the answers again, and hands them in in another order."""

    env_config_cls = TestedConfig

    @classmethod
    def config_init(cls) -> tuple[TestedConfig, list[APIServerConfig]]:
        return TestedConfig(tokenizer_name=TOKENIZER, group_size=3), []

    async def setup(self) -> None:
        self.iter = 0

    async def get_next_item(self) -> dict[str, str]:
        self.iter += 1
        return {"word": WORDS[(self.iter - 1) % len(WORDS)]}

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        pass

    def prompt(self, item: dict[str, str]) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"Reverse {item['word']}"}]

    def score(self, item: dict[str, str], text: str) -> float:
        return self.config.factor * (text == item["word"][::-1])

    async def collect_trajectories(self, item: dict[str, str]) -> Any:
        answers = await self.server.chat_completion(
            messages=self.prompt(item), n=self.config.group_size, max_tokens=32, temperature=0.7
        )
        texts = [choice.message.content for choice in answers.choices]
        random.Random(0).shuffle(texts)
        group = ScoredDataGroup(tokens=[], masks=[], scores=[])
        for text in texts:
            chat = [*self.prompt(item), {"role": "assistant", "content": text}]
            tokenised = tokenize_for_trainer(self.tokenizer, chat)
            group["tokens"].append(tokenised["tokens"])
            group["masks"].append(tokenised["masks"])
            group["scores"].append(self.score(item, text))
        return group, []


class Managed(Reversing):
    """By the managed server, with its tokens and log-probabilities; leaves out answers that are too short."""

    async def collect_trajectories(self, item: dict[str, str]) -> Any:
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            answers = await managed.chat_completion(
                messages=self.prompt(item), n=self.config.group_size, max_tokens=32
            )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        for choice, node in zip(answers.choices, nodes, strict=True):
            if len(choice.message.content) < 3:
                continue
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(self.score(item, node.full_text.split("<assistant>")[-1]))
        return group, []


class Seeing(Reversing):
    """Hands in pictures beside the tokens."""

    async def collect_trajectories(self, item: dict[str, str]) -> Any:
        group, left = await super().collect_trajectories(item)
        return {**group, "images": [["picture"]] * len(group["scores"])}, left


class Talking(Reversing):
    """One conversation of two turns for each member of the group; leaves an item over."""

    collect_trajectories = BaseEnv.collect_trajectories

    async def collect_trajectory(self, item: dict[str, str]) -> Any:
        chat = self.prompt(item)
        for said in ("", "Really?"):
            if said:
                chat.append({"role": "user", "content": said})
            answer = await self.server.chat_completion(messages=chat, n=1)
            chat.append({"role": "assistant", "content": answer.choices[0].message.content})
        tokenised = tokenize_for_trainer(self.tokenizer, chat, train_on_all_assistant_turns=True)
        return {**tokenised, "scores": self.score(item, chat[-1]["content"])}, [{"word": "again"}]


class Completing(Reversing):
    """Raw completions, by the managed server."""

    async def collect_trajectories(self, item: dict[str, str]) -> Any:
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            answers = await managed.completion(prompt=f"{item['word']}, reversed: ", n=self.config.group_size)
            nodes = managed.get_state()["nodes"]
        return {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "inference_logprobs": [node.logprobs for node in nodes],
            "scores": [self.score(item, choice.text) for choice in answers.choices],
        }, []


class Dropping(Reversing):
    """Hands in nothing, whatever happens."""

    async def collect_trajectories(self, item: dict[str, str]) -> Any:
        with contextlib.suppress(Exception):
            await super().collect_trajectories(item)
        return None, []


class Stepping(Reversing):
    """Two steps, each a group of its own."""

    async def collect_trajectories(self, item: dict[str, str]) -> Any:
        first, _ = await super().collect_trajectories(item)
        second, _ = await super().collect_trajectories({"word": item["word"][::-1]})
        return [first, second], []


def library_run(environment: str, turns: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Scores and texts of a group by the library's own server, in the order in which the environment handed them in."""
    scripted = sys.modules["__main__"].ScriptedServer(turns)

    async def run() -> dict[str, Any]:
        async with scripted.running():
            found = globals()[environment]
            config, _ = found.config_init()
            config.use_wandb = False
            server = APIServerConfig(
                base_url=scripted.url,
                model_name="policy",
                api_key="x",
                server_type="openai",
                health_check=False,
            )
            env = found(config, [server], slurm=False, testing=False)
            await env.setup()
            group, _ = await env.collect_trajectories(await env.get_next_item())
            return {
                "scores": group["scores"],
                "texts": [env.tokenizer.decode(tokens) for tokens in group["tokens"]],
                "requests": scripted.requests,
            }

    return asyncio.run(run())
