"""Makes a tiny model with random weights, a byte-level tokenizer and a chat template, for a real engine on the CPU.

Usage: make_model.py FOLDER --seed N. The tokenizer is the same for every seed, so that two folders differ in
their weights alone. Runs in the engine's own virtualenv (torch, transformers, tokenizers).
"""
# The engine's libraries are not installed where the project is type-checked:
# mypy: ignore-errors

import argparse

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

MAX_POSITIONS = 2048
CORPUS = [
    f"question {a}: what is {a} plus {b}? think step by step. the answer is {a + b}."
    for a in range(60)
    for b in range(20)
]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=MAX_POSITIONS,
    )
    fast.chat_template = TEMPLATE
    return fast


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    )
    model = Qwen2ForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(
            20
        )  # fresh weights give an almost uniform distribution, in which no error would show
        model.lm_head.weight[len(tokenizer) :] = 0
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(arguments.folder)
    make_model(tokenizer, arguments.seed).save_pretrained(arguments.folder)


if __name__ == "__main__":
    main()
