"""A trainer with real torch, in a process of its own: reads batches through a DataLoader and says what it saw, as JSON."""

import json
import sys
from importlib import import_module
from typing import Any

from orchestrator.trainer import LogprobMismatch, TrainerClient, TrainingBatch, micro_batches, pack, pad
from orchestrator.trainer.layout import Packed, Padded
from orchestrator.trainer.torch_dataset import BatchDataset

torch: Any = import_module("torch")


def arrange(batch: TrainingBatch) -> list[Padded | Packed]:
    parts = micro_batches(batch.sequences, 64, padded=True)
    return [*map(pad, parts), pack(batch.sequences, multiple_of=8)]


def main() -> None:
    address = sys.argv[1]
    seen = []
    with TrainerClient(address) as trainer:
        loader = torch.utils.data.DataLoader
        for step, tensors in loader(BatchDataset(trainer, arrange), batch_size=None):
            vocabulary = 160_000
            # A model that is sure of nothing: what matters is that shapes and types go through torch's own functions.
            logits = torch.zeros((*tensors["tokens"].shape, 1)).expand(*tensors["tokens"].shape, vocabulary)
            chosen = logits.log_softmax(-1).gather(-1, tensors["targets"].unsqueeze(-1)).squeeze(-1)
            found = LogprobMismatch()
            found.add(chosen, tensors["logprobs"], tensors["mask"])
            seen.append([step, list(tensors["tokens"].shape), int(tensors["mask"].sum()), found.tokens])
        workers = loader(BatchDataset(trainer, arrange), batch_size=None, num_workers=1)
        try:
            next(iter(workers))
        except RuntimeError as error:
            refused = "num_workers=0" in str(error)
    print(json.dumps({"seen": seen, "finished": trainer.finished, "workers_refused": refused}))


if __name__ == "__main__":
    main()
