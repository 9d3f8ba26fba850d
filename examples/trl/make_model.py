"""Makes a tiny transformer with random weights and a tokenizer of single characters: `make_model.py FOLDER [--seed N]`."""

import argparse
import string

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHARACTERS = ["<pad>", "<end>", *string.ascii_lowercase, *string.digits, " ", "="]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}="
CONTEXT = 64


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; a chat is what was said, and an equals sign."""
    vocabulary = {token: number for number, token in enumerate(CHARACTERS)}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<end>", model_max_length=CONTEXT
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(seed: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(CHARACTERS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=1,
    )
    return Qwen2ForCausalLM(config).to(torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    make_tokenizer().save_pretrained(chosen.folder)
    make_model(chosen.seed).save_pretrained(chosen.folder)


if __name__ == "__main__":
    main()
