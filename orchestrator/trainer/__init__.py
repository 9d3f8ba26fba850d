"""What a trainer imports: `TrainerClient`, or `AsyncTrainerClient`, and the batches they yield.

Needs pyzmq, msgspec and numpy, and nothing else of the project but its errors. `client` is the way in, `session` the
conversation without I/O, `channel` and `filesystem` how its messages travel, `protocol` the messages, `batch` how a batch
is read from bytes; `layout` arranges sequences for a model, `measures` says how far they are from what it computes, and
`torch_dataset`, which nothing imports by itself, is a torch `IterableDataset`. The service's side is `orchestrator.trainer_link`; how to write a trainer is in docs/trainer.md.
"""

from orchestrator.errors import TrainerLinkError
from orchestrator.trainer.batch import TrainingBatch, TrainingSequence
from orchestrator.trainer.client import AsyncTrainerClient, TrainerClient
from orchestrator.trainer.conversation import NothingSentError, Publication
from orchestrator.trainer.layout import Packed, Padded, micro_batches, pack, pad
from orchestrator.trainer.measures import LogprobMismatch, staleness

__all__ = [
    "AsyncTrainerClient",
    "LogprobMismatch",
    "NothingSentError",
    "Packed",
    "Padded",
    "Publication",
    "TrainerClient",
    "TrainerLinkError",
    "TrainingBatch",
    "TrainingSequence",
    "micro_batches",
    "pack",
    "pad",
    "staleness",
]
