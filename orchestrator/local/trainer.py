"""The reference trainer: reads batches, learns from them with GRPO, publishes every new version of the policy.

The example of how to write a trainer. Batch N is trained on the weights after batch N-1, which are kept in
`<checkpoints>/step_<N-1>`; a trainer that was killed finds them there and goes on, and a batch that is served
again is learned from the same weights again, with the same result. Weights are saved before they are published
and the batch is acknowledged after that, so that no batch is ever counted and lost.

As a child process (`python -m orchestrator.local.trainer`) it reads its `TrainerSpec` as one JSON line from
standard input and ends when the service has no more batches, or when standard input ends.
"""

import math
import re
import shutil
import signal
from pathlib import Path

import msgspec
import numpy as np
import structlog

from envs.logs import configure_logging
from orchestrator.local.lifeline import read_spec
from orchestrator.local.policy import WEIGHTS_FILE, Experience, Policy, load_policy
from orchestrator.trainer import TrainerClient

log = structlog.get_logger()

_SHUTDOWN_S = 2.0


class TrainerSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What the trainer needs to know; `keep` is how many checkpoints stay on disk."""

    address: str
    checkpoints: str
    learning_rate: float = 2.5
    clip: float = 3.0
    keep: int = 4
    rank: int = 0
    world_size: int = 1
    token: str | None = None


class Checkpoints:
    """The directories `step_<N>` of a run; one counts once its weights are complete."""

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory = directory
        self.keep = max(keep, 2)

    def steps(self) -> list[int]:
        """Steps with complete weights, oldest first."""
        found = self.directory.glob(f"step_*/{WEIGHTS_FILE}")
        return sorted(
            int(path.parent.name[5:]) for path in found if re.fullmatch(r"step_\d+", path.parent.name)
        )

    def save(self, policy: Policy, step: int) -> Path:
        """Keep the weights after a step, and drop those of steps long past."""
        path = policy.save(self.directory / f"step_{step}").resolve()
        for old in self.steps():
            # Later steps than this one are of a run that was begun anew or fell back.
            if old <= step - self.keep or old > step:
                shutil.rmtree(self.directory / f"step_{old}", ignore_errors=True)
        return path

    def load_before(self, step: int) -> tuple[Policy, int]:
        """The newest weights from before a step, and their step; a new policy is of step 0."""
        earlier = [saved for saved in self.steps() if saved < step]
        if step == 1 or not earlier:
            return Policy(), 0
        return load_policy(self.directory / f"step_{earlier[-1]}"), earlier[-1]


def train(spec: TrainerSpec, trainer: TrainerClient) -> int:
    """Learn from every batch until there are no more; returns the last step."""
    checkpoints = Checkpoints(Path(spec.checkpoints), spec.keep)
    policy, step = Policy(), 0
    for batch in trainer:
        if batch.step != step + 1:
            policy, step = checkpoints.load_before(batch.step)
            if step != batch.step - 1:
                log.warning("trainer.weights_missing", step=batch.step, wanted=batch.step - 1, found=step)
        experience = Experience()
        for sequence in batch.sequences:
            experience.add(sequence.tokens, sequence.mask, sequence.logprobs, sequence.advantages)
        seen = policy.learn(experience, learning_rate=spec.learning_rate, clip=spec.clip)
        step = batch.step
        if spec.rank == 0:
            trainer.publish(version=step, path=str(checkpoints.save(policy, step)))
            shown = {name: seen[name] for name in ("ratio", "clipped", "entropy")}
            trainer.report(step, {name: value for name, value in shown.items() if math.isfinite(value)})
        reward = float(np.mean([sequence.reward for sequence in batch.sequences]))
        log.info("trainer.step_done", step=step, reward=reward, **seen)
    return step


def main() -> None:
    """Entry point of the child process."""
    spec, lifeline = read_spec(TrainerSpec)
    # Weights are saved whole or not at all, so that ending at any moment loses nothing.
    lifeline.watch(lambda: signal.raise_signal(signal.SIGTERM), kill_after_s=_SHUTDOWN_S)
    configure_logging(process="trainer")
    with TrainerClient(spec.address, rank=spec.rank, world_size=spec.world_size, token=spec.token) as trainer:
        train(spec, trainer)


if __name__ == "__main__":
    main()
