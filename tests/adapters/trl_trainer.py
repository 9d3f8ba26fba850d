"""The example for TRL in a process of its own, watched: what each step was served, and what it was trained on, as JSON lines.

Arguments are those of examples/trl/train.py. RECORD names the file; at step DIES_AT the process kills itself when the step's
samples went through the model, before anything else happens.
"""
# The trainer's libraries are not installed where the project is type-checked:
# mypy: ignore-errors

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "trl"))

import numpy as np
import train
from orchestrator_link import OrchestratorLink
from trl.experimental.async_grpo import AsyncGRPOTrainer

DIES_AT = int(os.environ.get("DIES_AT", "0"))


def record(**facts):
    with Path(os.environ["RECORD"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(facts) + "\n")


def fingerprint(logprobs):
    """Of all sampled tokens, in whatever order they are laid out."""
    return hashlib.sha256(np.sort(np.asarray(logprobs, dtype=np.float32)).tobytes()).hexdigest()[:16]


class WatchedLink(OrchestratorLink):
    def next_samples(self):
        before = self._taken
        samples = super().next_samples()
        if self._taken > before:
            parts = [sample.old_log_probs[1:][sample.completion_mask[1:] != 0] for sample in samples]
            record(served=self._taken, samples=len(samples), print=fingerprint(np.concatenate(parts)))
        return samples

    def update_model_version(self, model_version):
        super().update_model_version(model_version)
        record(acknowledged=self._acknowledged)


class WatchedTrainer(AsyncGRPOTrainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        step = self.state.global_step + 1
        chosen = inputs["old_log_probs"][inputs["token_index"] >= 0]
        metrics = self._metrics["train"]
        record(
            trained=step, print=fingerprint(chosen.numpy()), ratio=metrics["ratio"][-1], kl=metrics["kl"][-1]
        )
        if step == DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss


if __name__ == "__main__":
    train.OrchestratorLink = WatchedLink
    train.AsyncGRPOTrainer = WatchedTrainer
    train.main()
