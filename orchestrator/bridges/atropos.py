"""Serves batches over HTTP as the API server of Atropos does, to trainers that were written for it.

Such a trainer registers, asks for a batch until it gets one, trains, and asks again; it never says that it has a batch or is done
with one. So a batch is served, the same bytes, until a whole answer has arrived; then one question is answered by "none",
because these trainers take what there is before they train; the question after that says that the batch is done with.
Behind the last batch of the run that "none" says it already, because nobody will ask again.
A trainer that registers again was restarted, and gets the batch once more that it was not done with. What was handed over is
noted on disk, so that a bridge which is killed does not hand it over twice.

`Desk` is that protocol without I/O; `atropos_server` is the HTTP side. Batches are encoded when they come in, so no question waits.
"""

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import structlog

from orchestrator.trainer import TrainingBatch, TrainingSequence

log = structlog.get_logger("bridge")

NONE = b'{"batch":null}'


class Registration(msgspec.Struct, frozen=True):
    """What a trainer says of itself."""

    batch_size: int
    max_token_len: int
    wandb_group: str = ""
    wandb_project: str = ""
    num_steps: int = 0
    starting_step: int = 0
    checkpoint_dir: str = ""
    save_checkpoint_interval: int = 0


class Note(msgspec.Struct):
    """What is on disk: of which run, the last step that was handed over, the last that was done with, and who took them."""

    run: str
    delivered: int = 0
    done: int = 0
    registration: Registration | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """A batch as it is sent."""

    step: int
    body: bytes
    sequences: int
    groups: int
    longest: int


class Desk:
    """Hands batches over, one at a time and in order."""

    def __init__(self, note_path: Path, run: str, *, on_done: Callable[[int], None]) -> None:
        self._path = note_path
        self._note = _read_note(note_path, run)
        self._on_done = on_done
        self._waiting: deque[Served] = deque()
        self._delivered = False
        self._told_none = False
        self._ended = False

    @property
    def registration(self) -> Registration | None:
        return self._note.registration

    @property
    def step(self) -> int:
        """The last step that was handed over."""
        return self._note.delivered

    @property
    def groups(self) -> int:
        """How many groups wait to be handed over."""
        waiting = list(self._waiting)[self._delivered :]
        return sum(served.groups for served in waiting)

    def offer(self, served: Served) -> None:
        """A batch came in."""
        if served.step <= self._note.done:
            # An earlier process was killed before it could acknowledge it.
            self._on_done(served.step)
            return
        if not self._waiting:
            # The trainer may have it from before this process.
            self._delivered = served.step == self._note.delivered
        self._waiting.append(served)
        registration = self._note.registration
        if registration is not None and served.longest > registration.max_token_len > 0:
            log.warning(
                "bridge.long_sequence",
                step=served.step,
                tokens=served.longest,
                max_token_len=registration.max_token_len,
                remedy="lower max_tokens in train.sampling, or raise the trainer's limit",
            )

    def end(self) -> None:
        """There will be no further batch."""
        self._ended = True
        if self._told_none and len(self._waiting) == 1:
            self._finish_first()

    def register(self, registration: Registration) -> str:
        """A trainer has started; returns why it is refused, empty when it is not."""
        problem = self._misfit(registration)
        if not problem:
            if self._delivered:
                log.info("bridge.trainer_again", step=self._note.delivered)
            self._delivered = self._told_none = False
            self._note.delivered = 0
            self._note.registration = registration
            self._write_note()
        return problem

    def ask(self) -> Served | bytes:
        """What a question for a batch is answered with now."""
        registration = self._note.registration
        if registration is None:
            return _error("Trainer not registered. Call /register first.")
        if problem := self._misfit(registration):
            return _error(problem)
        if self._delivered:
            last = self._ended and len(self._waiting) == 1
            if not self._told_none:
                self._told_none = True
                if not last:
                    return NONE
            self._finish_first()
            if last:
                return NONE
        return self._waiting[0] if self._waiting else NONE

    def delivered(self, served: Served) -> None:
        """A whole answer has arrived at the trainer."""
        if self._waiting and self._waiting[0] is served:
            self._delivered, self._told_none = True, False
            self._note.delivered = served.step
            self._write_note()
            log.info("bridge.handed_over", step=served.step, sequences=served.sequences)

    def _finish_first(self) -> None:
        """The trainer is done with the batch that it has. Noted first: what follows may be handed over at once."""
        served = self._waiting.popleft()
        self._delivered = self._told_none = False
        self._note.done = served.step
        self._write_note()
        self._on_done(served.step)

    def _misfit(self, registration: Registration) -> str:
        formed = self._waiting[0].sequences if self._waiting else registration.batch_size
        if formed == registration.batch_size:
            return ""
        return (
            f"the trainer registered batches of {registration.batch_size} sequences, the orchestrator forms batches of {formed} "
            "(batch.size); make them equal"
        )

    def _write_note(self) -> None:
        part = self._path.with_name(f"{self._path.name}.part")
        part.write_bytes(msgspec.json.encode(self._note))
        part.replace(self._path)


def encode(batch: TrainingBatch) -> Served:
    """A batch as these trainers read it: an item for each group. Takes long for a large batch; call it in a thread."""
    groups: dict[str, list[TrainingSequence]] = {}
    for sequence in batch.sequences:
        groups.setdefault(sequence.group_id, []).append(sequence)
    return Served(
        step=batch.step,
        body=msgspec.json.encode({"batch": [_item(group) for group in groups.values()]}),
        sequences=len(batch),
        groups=len(groups),
        longest=int(batch.lengths.max(initial=0)),
    )


def _item(group: list[TrainingSequence]) -> dict[str, Any]:
    """Masks have -100 and log-probabilities 1.0 where the policy did not sample, as in Atropos."""
    heats = [sequence.temperature for sequence in group]
    return {
        "tokens": [sequence.tokens.tolist() for sequence in group],
        "masks": [np.where(sequence.mask, sequence.tokens, -100).tolist() for sequence in group],
        "scores": [sequence.reward for sequence in group],
        "advantages": [sequence.advantages.tolist() for sequence in group],
        "ref_logprobs": None,
        "inference_logprobs": [
            np.where(sequence.mask, sequence.logprobs, np.float32(1.0)).tolist() for sequence in group
        ],
        "messages": None,
        "generation_params": None,
        "overrides": [{} if heat is None else {"temperature": heat} for heat in heats],
        "group_overrides": None,
        "images": None,
        "env_id": None,
        "distill_token_ids": None,
        "distill_logprobs": None,
    }


def _error(message: str) -> bytes:
    return json.dumps({"status": "error", "message": message, "batch": []}).encode()


def _read_note(path: Path, run: str) -> Note:
    """What an earlier process noted, if it was of the same run."""
    try:
        note = msgspec.json.decode(path.read_bytes(), type=Note)
    except FileNotFoundError:
        return Note(run)
    except (OSError, msgspec.MsgspecError) as error:
        log.warning(
            "bridge.note_unreadable",
            path=str(path),
            error=str(error),
            note="a batch may be handed over twice",
        )
        return Note(run)
    return note if note.run == run else Note(run)
