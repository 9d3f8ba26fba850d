"""A trainer that takes batches as fast as they come, as a process of its own: `python -m benchmarks._trainer ADDRESS`."""

import sys

from orchestrator.trainer import TrainerClient


def main() -> None:
    with TrainerClient(sys.argv[1]) as trainer:
        for batch in trainer:
            trainer.publish(version=batch.step)


if __name__ == "__main__":
    main()
