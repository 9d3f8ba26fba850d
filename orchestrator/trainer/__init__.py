"""What a trainer imports: `TrainerClient`, or `AsyncTrainerClient`, and the batches they yield.

Needs pyzmq, msgspec and numpy, and nothing else of the project but its errors. `client` is the way in, `session` the
conversation without I/O, `channel` and `filesystem` its ways, `protocol` the messages, `batch` the encoding of batches,
`partition` which rank gets what. The service's side is `orchestrator.serving`; how to write a trainer is in
docs/trainer.md.
"""

from orchestrator.errors import TrainerLinkError
from orchestrator.trainer.batch import TrainingBatch, TrainingSequence
from orchestrator.trainer.client import AsyncTrainerClient, TrainerClient

__all__ = ["AsyncTrainerClient", "TrainerClient", "TrainerLinkError", "TrainingBatch", "TrainingSequence"]
