"""The example trainer of Atropos without its model: its own functions register, take batches and lay them out; JSON says what they made."""

import json
import sys
from importlib import import_module
from typing import Any


def main() -> None:
    url, steps = sys.argv[1], int(sys.argv[2])
    api: Any = import_module("example_trainer.api")
    data: Any = import_module("example_trainer.data")
    config: Any = import_module("example_trainer.config")
    assert api.check_atropos_api(url=url)
    settings = config.TrainingConfig(
        model_name="none", atropos_url=url, batch_size=4, gradient_accumulation_steps=2, training_steps=steps
    )
    api.register_trainer(settings)
    seen: list[Any] = []
    while len(seen) < steps:
        batches, _ = data.get_data(batch_size=4, seq_len=2048, atropos_url=url)
        for tokens, labels, advantages, temperatures, logprobs in batches:
            assert logprobs is not None
            parts = zip(tokens, labels, logprobs, strict=True)
            rows = [
                [
                    row_tokens[0].item(),
                    int((row_labels != -100).sum()),
                    float(row_logprobs[row_labels != -100].sum()),
                ]
                for part in parts
                for row_tokens, row_labels, row_logprobs in zip(*part, strict=True)
            ]
            heats = [float(heat) for part in temperatures for heat in part.flatten()]
            counted = sum(int(part.numel()) for part in advantages)
            seen.append({"rows": rows, "temperatures": heats, "advantages": counted, "at_once": len(batches)})
    print(json.dumps({"seen": seen}))


if __name__ == "__main__":
    main()
