"""A trainer that says what it gets and can be killed: `python -m tests.support.trainer_victim ADDRESS [RANK WORLD_SIZE]`.

It prints `batch STEP DIGEST`, then does what the next line on stdin says: `next` goes on (which acknowledges), `ack`
acknowledges and prints `acked STEP`, nothing at all leaves it where it is.
"""

import hashlib
import signal
import sys

from orchestrator.trainer import TrainerClient, TrainingBatch


def digest(batch: TrainingBatch) -> str:
    """All bytes of a batch in a few."""
    arrays = (
        batch.lengths,
        batch.rewards,
        batch.sequence_advantages,
        batch.tokens,
        batch.logprobs,
        batch.mask,
    )
    names = ",".join(sequence.group_id for sequence in batch.sequences).encode()
    return hashlib.sha256(names + b"".join(array.tobytes() for array in arrays)).hexdigest()


def main() -> None:
    # A shell that starts the tests in the background has its children ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    address, rank, world_size = sys.argv[1], *map(int, sys.argv[2:] or (0, 1))
    with TrainerClient(address, rank=rank, world_size=world_size) as trainer:
        print("joined", flush=True)
        for batch in trainer:
            print("batch", batch.step, digest(batch), flush=True)
            if sys.stdin.readline().strip() == "ack":
                trainer.ack(batch.step)
                print("acked", batch.step, flush=True)
                sys.stdin.readline()
        print("finished", trainer.finished, flush=True)


if __name__ == "__main__":
    main()
