"""Makes a LoRA adapter with random weights for the tiny model, for a real engine on the CPU.

Usage: make_adapter.py FOLDER --seed N [--rank 8] [--hidden 64]. Another hidden size than the model's makes one that does
not fit it. Runs in the engine's own virtualenv (torch, safetensors).
"""
# The engine's libraries are not installed where the project is type-checked:
# mypy: ignore-errors

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=64)
    asked = parser.parse_args()
    torch.manual_seed(asked.seed)
    hidden, rank = asked.hidden, asked.rank
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.v_proj": (hidden, hidden // 2),
        "mlp.down_proj": (2 * hidden, hidden),
    }
    tensors = {}
    for layer in range(LAYERS):
        for name, (wide, high) in sizes.items():
            place = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{place}.lora_A.weight"] = 0.3 * torch.randn(rank, wide)
            tensors[f"{place}.lora_B.weight"] = 0.3 * torch.randn(high, rank)
    asked.folder.mkdir(parents=True)
    save_file(tensors, asked.folder / "adapter_model.safetensors")
    targets = sorted({name.rpartition(".")[2] for name in sizes})
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": targets,
        "bias": "none",
    }
    (asked.folder / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()
