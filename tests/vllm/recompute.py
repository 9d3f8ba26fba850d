"""Recomputes log-probabilities of sampled tokens from the weights alone, with transformers, for the tests of a real engine.

Reads JSON from standard input: `model` (a folder), `temperature`, `top_p`, `sequences` (lists of token ids) and, if there is one, `adapter`
(the folder of a LoRA adapter, which is added to the weights). Prints, for
each sequence, the log-probability of every token under the distribution that it was sampled from, given those
before it; the first has none (0), and a token outside the cut has -inf. Runs in the engine's own virtualenv.
"""
# The engine's libraries are not installed where the project is type-checked:
# mypy: ignore-errors

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def main() -> None:
    asked = json.load(sys.stdin)
    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32).eval()
    if "adapter" in asked:
        merge(model, Path(asked["adapter"]))
    found = []
    for tokens in asked["sequences"]:
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, :-1].double() / asked["temperature"]
        logits = keep_likeliest(logits, asked["top_p"])
        chosen = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        found.append([0.0, *chosen.tolist()])
    json.dump(found, sys.stdout)


def merge(model: torch.nn.Module, folder: Path) -> None:
    """Add an adapter to the weights: W + B A alpha / r, for every layer that it has."""
    config = json.loads((folder / "adapter_config.json").read_text())
    halves = load_file(folder / "adapter_model.safetensors")
    scale = config["lora_alpha"] / config["r"]
    for name in halves:
        if name.endswith(".lora_A.weight"):
            layer = name.removesuffix(".lora_A.weight")
            module = model.get_submodule(layer.removeprefix("base_model.model."))
            with torch.no_grad():
                module.weight += scale * halves[f"{layer}.lora_B.weight"] @ halves[name]


def keep_likeliest(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest number of tokens whose probabilities sum to at least `top_p`; the others get none."""
    ordered, order = torch.softmax(logits, dim=-1).sort(dim=-1, descending=True)
    needed = ordered.cumsum(dim=-1) - ordered < top_p
    return logits.masked_fill(~torch.zeros_like(needed).scatter(-1, order, needed), float("-inf"))


if __name__ == "__main__":
    main()
