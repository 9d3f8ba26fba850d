"""An environment of Atropos, on the library's base class: the last digit of a number. Runs without a download."""

import random
import tempfile

from atroposlib.envs.base import BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = "{% for message in messages %}{{ message.content }}</s>{% endfor %}"


FOLDER = tempfile.TemporaryDirectory(prefix="tokenizer-")


def make_tokenizer() -> str:
    """A directory with a tokenizer by characters; with a real model this is the model's, by `args.tokenizer_name`."""
    vocabulary = {"?": 0, "</s>": 1} | {chr(code): code - 8 for code in range(10, 127)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", eos_token="</s>")
    made.chat_template = TEMPLATE
    made.save_pretrained(FOLDER.name)
    return FOLDER.name


class LastDigit(BaseEnv):
    @classmethod
    def config_init(cls):
        return BaseEnvConfig(tokenizer_name=make_tokenizer()), []

    async def setup(self):
        self.numbers = random.Random(0)

    async def get_next_item(self):
        return str(self.numbers.randrange(1000, 10_000))

    async def evaluate(self, *args, **kwargs):
        pass

    async def collect_trajectories(self, item):
        asked = [{"role": "user", "content": f"Last digit of {item}"}]
        answers = await self.server.chat_completion(messages=asked, n=self.config.group_size)
        group = ScoredDataGroup(tokens=[], masks=[], scores=[])
        for choice in answers.choices:
            said = choice.message.content
            tokenised = tokenize_for_trainer(self.tokenizer, [*asked, {"role": "assistant", "content": said}])
            group["tokens"].append(tokenised["tokens"])
            group["masks"].append(tokenised["masks"])
            group["scores"].append(float(said.strip() == item[-1]))
        return group, []
