"""Batches as a torch `IterableDataset`, for trainers whose loop is given and wants one. The only module here that needs torch.

    data = BatchDataset(trainer, lambda batch: [pad(part) for part in micro_batches(batch.sequences, 8192, padded=True)])
    for step, tensors in DataLoader(data, batch_size=None):

Items are (step, tensors by name). The batch of a step is acknowledged when something of the next one is asked for, as without
torch. A loop that asks ahead (accelerate does) would acknowledge too early: give it a client with `auto_ack=False`
and call `trainer.ack(step)` after the optimizer's step. Loader workers would each ask ahead, so they are refused.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from importlib import import_module
from typing import Any

from orchestrator.trainer.batch import TrainingBatch
from orchestrator.trainer.client import TrainerClient
from orchestrator.trainer.layout import Packed, Padded

# Not imported by name, because the types of torch are there only where torch is.
torch: Any = import_module("torch")
data: Any = import_module("torch.utils.data")


class BatchDataset(data.IterableDataset):  # type: ignore[misc]  # see above
    """What `arrange` makes of every batch of the run, as tensors that share the arrays' memory."""

    def __init__(
        self, trainer: TrainerClient, arrange: Callable[[TrainingBatch], Iterable[Padded | Packed]]
    ) -> None:
        super().__init__()
        self._trainer = trainer
        self._arrange = arrange

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        if data.get_worker_info() is not None:
            raise RuntimeError(
                "a BatchDataset is read in the trainer's own process; use DataLoader(…, batch_size=None, num_workers=0)"
            )
        for batch in self._trainer:
            for laid_out in self._arrange(batch):
                yield batch.step, tensors(laid_out)


def tensors(laid_out: Padded | Packed) -> dict[str, Any]:
    """The arrays as tensors, by name, without a copy."""
    return {field.name: torch.from_numpy(getattr(laid_out, field.name)) for field in fields(laid_out)}
