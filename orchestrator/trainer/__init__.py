"""What a trainer imports: `TrainerClient`, or `AsyncTrainerClient`, and the batches they yield.

Needs pyzmq, msgspec and numpy, and nothing else of the project but its errors. `client` is the way in, `session` the
conversation without I/O, `channel` and `filesystem` how its messages travel, `protocol` the messages, `batch` how a batch
is read from bytes. The service's side is `orchestrator.trainer_link`; how to write a trainer is in docs/trainer.md.
"""

from orchestrator.errors import TrainerLinkError
from orchestrator.trainer.batch import TrainingBatch, TrainingSequence
from orchestrator.trainer.client import AsyncTrainerClient, TrainerClient

__all__ = ["AsyncTrainerClient", "TrainerClient", "TrainerLinkError", "TrainingBatch", "TrainingSequence"]
