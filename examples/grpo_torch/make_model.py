"""Makes a tiny transformer with random weights and a tokenizer of single characters: `make_model.py FOLDER [--seed N]`.

It stands for a real model where there is no GPU: the folder is what vLLM serves and what train.py starts from.
"""

import argparse
import string

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SPECIAL = ["<pad>", "<end>"]
CHARACTERS = [*string.ascii_lowercase, "="]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}="


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; a chat is what was said, and an equals sign."""
    vocabulary = {token: number for number, token in enumerate(SPECIAL + CHARACTERS)}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<end>", model_max_length=64
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """Two layers; the vocabulary is exactly that of the tokenizer, so that nothing else can be sampled."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config).to(torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(arguments.folder)
    make_model(tokenizer, arguments.seed).save_pretrained(arguments.folder)


if __name__ == "__main__":
    main()
