"""Feeds TRL's AsyncGRPOTrainer with batches of the orchestrator, and gives the orchestrator its weights.

One object is all that TRL asks for: its rollout worker, its weight transfer, and a callback that learns when a step is over.

    link = OrchestratorLink("tcp://127.0.0.1:5555", args, weights=Path("weights"))
    AsyncGRPOTrainer(…, args=args, rollout_worker=link, weight_transfer=link, callbacks=[link])

A step of TRL is a step of the orchestrator: both have the same number and the same samples. After step N its weights are
written to a folder and published as version N, and only then batch N is acknowledged. A trainer that resumes from its checkpoint of step
C is served from step C + 1 on, so that whatever was lost with a killed process is trained on again, and nothing else is.

Everything happens in the thread that trains; on other ranks than the first, TRL uses none of it and the callback does nothing.
"""

import math
import queue
import shutil
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from orchestrator.trainer import TrainerClient, TrainerLinkError, TrainingBatch, TrainingSequence, staleness

REPORTED = ("loss", "grad_norm", "learning_rate", "ratio", "kl", "entropy", "clip_ratio/region_mean")
"""What TRL logs of a step that the orchestrator shows, too."""
NEVER_TOO_OLD = 10**6


class OrchestratorLink(TrainerCallback):
    """The orchestrator, as TRL sees it."""

    def __init__(
        self,
        address: str,
        args: AsyncGRPOConfig,
        *,
        weights: Path,
        keep_weights: int = 3,
        token: str | None = None,
    ) -> None:
        """`weights` is a folder that the inference servers can read; this process keeps its last `keep_weights` versions there.

        The arguments are those of the trainer. They must have steps of one size that are counted; and TRL is told to
        drop nothing, because the orchestrator bounds the age of samples (`staleness.max_versions`).
        """
        self.rollout_buffer = RolloutQueue(self)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._address = address
        self._token = token
        self._temperature = args.temperature
        self._batch_size = _samples_of_a_step(args)
        args.max_staleness = NEVER_TOO_OLD
        self._weights = weights.absolute()
        self._keep_weights = keep_weights
        self._written: deque[Path] = deque()
        self._client: TrainerClient | None = None
        self._trained = 0
        self._taken = 0
        self._acknowledged = 0
        self._over = False
        self._model_version = 0
        self._groups: dict[str, int] = {}

    # What a callback hears.

    def on_train_begin(self, args, state, control, *, model, processing_class, **kwargs) -> None:
        """Join before TRL sends its first weights and asks for its first sample."""
        if not state.is_world_process_zero:
            return
        self._config, self._tokenizer = model.config, processing_class
        self._trained = self._taken = self._acknowledged = state.global_step
        client = TrainerClient(
            self._address, resume_after=state.global_step, auto_ack=False, prefetch=True, token=self._token
        )
        self._client = client.__enter__()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        """Called before TRL's own callback for the end of a step, which sends the weights."""
        self._trained = state.global_step
        if self._over and self._trained >= self._taken:
            control.should_training_stop = True

    def on_save(self, args, state, control, **kwargs) -> None:
        """A checkpoint is on disk: the trainer can go on behind this step."""
        if self._client is not None:
            self._client.checkpointed(state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        """Numbers of a step, for those who look at the run."""
        found = {name: logs[name] for name in REPORTED if name in (logs or {})}
        numbers = {name: float(value) for name, value in found.items() if math.isfinite(value)}
        if self._client is not None and numbers and state.global_step:
            self._client.report(state.global_step, numbers)

    # What TRL asks a rollout worker for.

    def start(self) -> None:
        """Nothing to do: the orchestrator is at work already."""

    def stop(self) -> None:
        """Leave. What was not acknowledged is served again to whoever comes next."""
        client, self._client = self._client, None
        if client is not None:
            client.__exit__(None, None, None)

    def update_model_version(self, model_version: int) -> None:
        """The weights of the last step were sent: its batch, and those before, are done with."""
        self._model_version = model_version
        while self._acknowledged < self._trained:
            self._joined().ack(self._acknowledged + 1)
            self._acknowledged += 1

    def check_health(self, stale_after_s: float) -> None:
        """Nothing to do: a client that waits notices itself when the orchestrator is gone."""

    # What TRL asks a weight transfer for.

    def init_weight_transfer(self) -> None:
        self._weights.mkdir(parents=True, exist_ok=True)

    def pause(self) -> None:
        """Nothing to do: the orchestrator pauses an engine while it loads."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write them beside, rename, publish: whoever sees the folder sees all of it."""
        version = self._trained
        part = self._weights / f".step_{version}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in iterator}
        save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
        self._config.save_pretrained(part)
        self._tokenizer.save_pretrained(part)
        folder = part.rename(self._unused_name(version))
        self._joined().publish(version, str(folder), step=self._trained)
        self._written.append(folder)
        while len(self._written) > self._keep_weights:
            shutil.rmtree(self._written.popleft())

    def resume(self) -> None:
        """Nothing to do, as for `pause`."""

    def destroy(self) -> None:
        """Nothing to do: the folders stay, for engines that come later."""

    # Samples.

    def next_samples(self) -> list[RolloutSample]:
        """The samples of the next batch; behind the last one, samples that TRL looks at and does not train on."""
        batch = None if self._over else self._joined().next_batch()
        if batch is None:
            return self._fillers()
        if len(batch) != self._batch_size:
            raise ValueError(
                f"batch {batch.step} has {len(batch)} sequences (batch.size), a step of this trainer {self._batch_size} "
                "(per_device_train_batch_size * gradient_accumulation_steps * processes); make them equal"
            )
        self._taken = batch.step
        self.metrics_queue.put({f"orchestrator/{name}": value for name, value in staleness(batch).items()})
        self._last = [self._sample(batch, sequence) for sequence in batch.sequences]
        return self._last

    def _sample(self, batch: TrainingBatch, sequence: TrainingSequence) -> RolloutSample:
        if sequence.temperature not in (None, self._temperature):
            raise ValueError(
                f"batch {batch.step} was sampled at temperature {sequence.temperature}, the trainer computes at "
                f"{self._temperature} (temperature in its arguments); make them equal"
            )
        return RolloutSample(
            prompt=[],  # batches have tokens, and no messages
            completion=[],
            input_ids=sequence.tokens,
            completion_mask=sequence.mask,
            old_log_probs=sequence.logprobs,
            advantage=sequence.advantage,
            # TRL counts versions from its own start; the difference is the same.
            model_version=self._model_version - (self._trained - sequence.version),
            group_id=self._groups.setdefault(sequence.group_id, len(self._groups)),
            metrics={"reward": sequence.reward, f"reward/{sequence.env}": sequence.reward},
            enqueued_at=time.time(),
        )

    def _fillers(self) -> list[RolloutSample]:
        """TRL trains on a step only when it has seen a sample of the next, which does not come behind the last step."""
        self._over = True
        if self._trained >= self._taken:
            raise TrainerLinkError(
                f"the run is over ({self._joined().finished}): nothing is left to train on"
            )
        return [replace(sample, advantage=0.0) for sample in self._last]

    def _joined(self) -> TrainerClient:
        if self._client is None:
            raise RuntimeError("callbacks=[link] is missing, or training has ended")
        return self._client

    def _unused_name(self, version: int) -> Path:
        """A folder that was published is never written to again: an engine may be reading it."""
        folder, again = self._weights / f"step_{version}", 0
        while folder.exists():
            again += 1
            folder = self._weights / f"step_{version}_{again}"
        return folder


class RolloutQueue:
    """The queue that TRL takes samples from, in the thread that trains; empty, it asks for the next batch."""

    def __init__(self, link: OrchestratorLink) -> None:
        self._link = link
        self._samples: deque[RolloutSample] = deque()

    def get(self, block: bool = True, timeout: float | None = None) -> RolloutSample:
        """Waits longer than it is told to: the client raises by itself where the orchestrator is silent for too long."""
        if not self._samples:
            self._samples.extend(self._link.next_samples())
        return self._samples.popleft()

    def qsize(self) -> int:
        return len(self._samples)


def _samples_of_a_step(args: AsyncGRPOConfig) -> int:
    wrong = [
        f"{name} must be {wanted}, got {getattr(args, name)}"
        for name, wanted in (("token_budget", 0), ("weight_sync_steps", 1))
        if getattr(args, name) != wanted
    ]
    if args.max_steps < 1:
        wrong.append("max_steps must be set")
    if wrong:
        raise ValueError(f"a step of TRL must be a step of the orchestrator: {', '.join(wrong)}")
    return args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
