"""Serves batches over HTTP as the API server of Atropos does, to trainers that were written for it.

Such a trainer registers, asks for a batch until it gets one, trains, and asks again; it never says that it has a batch or is done
with one. So a batch is served, the same bytes, until a whole answer has arrived; then one question is answered by "none",
because these trainers take what there is before they train; the question after that says that the batch is done with. Of a trainer
that fetches ahead while it trains it says that of the batch so many before (`ahead`): up to `ahead` + 1 batches are open.
Behind the last batch of the run that "none" says it already, because nobody will ask again.
A trainer that registers again was restarted, and gets the batches once more that it was not done with. What was handed over is
noted on disk, so that a bridge which is killed does not hand it over twice. Where it is killed between the last byte and that note,
nobody can tell: the batch comes again, and the log says so, because its last byte is sent only when that was noted.

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
    """What is on disk: of which run, and how often that was set back before, the last step that was handed over, the last that was
    done with, the last of which all but the last byte had arrived, and who took them."""

    run: str
    rewinds: int = 0
    delivered: int = 0
    done: int = 0
    finishing: int = 0
    registration: Registration | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """A batch as it is sent."""

    step: int
    body: bytes
    sequences: int
    groups: int
    longest: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a registered trainer gets no batch, and never will."""

    reason: str


class Desk:
    """Hands batches over, in order."""

    def __init__(
        self, note_path: Path, run: str, *, rewinds: int = 0, ahead: int = 0, on_done: Callable[[int], None]
    ) -> None:
        """A trainer may have so many batches as `ahead` before it is done with the one before them."""
        self._path = note_path
        self._ahead = ahead
        self._note = _read_note(note_path, run, rewinds)
        self._on_done = on_done
        self._waiting: deque[Served] = deque()
        self._open = 0
        """How many of those that wait, the first ones, the trainer has."""
        self._told_none = False
        self._told_misfit = False
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
        waiting = list(self._waiting)[self._open :]
        return sum(served.groups for served in waiting)

    def offer(self, served: Served) -> None:
        """A batch came in."""
        if served.step <= self._note.done:
            # An earlier process was killed before it could acknowledge it.
            self._on_done(served.step)
            return
        if len(self._waiting) == self._open:
            # The trainer may have it from before this process.
            if served.step <= self._note.delivered:
                self._open += 1
            elif served.step == self._note.finishing:
                log.warning(
                    "bridge.maybe_twice",
                    step=served.step,
                    note="the bridge was killed as the last byte of this batch was sent: it comes again, and the trainer may have it already",
                    remedy="if no batch may be trained on twice, restart the trainer from its checkpoint before it asks",
                )
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
        if self._told_none and self._has_all:
            self._finish_all()

    def register(self, registration: Registration) -> str:
        """A trainer has started; returns why it is refused, empty when it is not."""
        problem = self._misfit(registration)
        if not problem:
            if self._open:
                log.info("bridge.trainer_again", step=self._waiting[0].step, batches=self._open)
            self._warn_of_checkpoint(registration)
            self._open, self._told_none, self._told_misfit = 0, False, False
            self._note.delivered = self._note.finishing = 0
            self._note.registration = registration
            self._write_note()
        return problem

    def ask(self) -> Served | Refused | bytes:
        """What a question for a batch is answered with now."""
        registration = self._note.registration
        if registration is None:
            return _error("Trainer not registered. Call /register first.")
        if problem := self._misfit(registration):
            if not self._told_misfit:  # it asks again and again
                log.error("bridge.trainer_refused", reason=problem)
            self._told_misfit = True
            return Refused(problem)
        if self._open:
            if self._ended and self._has_all:
                self._finish_all()
                return NONE
            if not self._told_none:
                self._told_none = True
                return NONE
            if self._open > self._ahead:
                self._finish_first()
        return self._waiting[self._open] if len(self._waiting) > self._open else NONE

    def finishing(self, served: Served) -> None:
        """All of an answer but its last byte has arrived at the trainer."""
        if self._is_next(served):
            self._note.finishing = served.step
            self._write_note()

    def delivered(self, served: Served) -> None:
        """A whole answer has arrived at the trainer."""
        if self._is_next(served):
            self._open, self._told_none = self._open + 1, False
            self._note.delivered = served.step
            self._write_note()
            log.info("bridge.handed_over", step=served.step, sequences=served.sequences)

    def _finish_first(self) -> None:
        """The trainer is done with the first batch that it has. Noted first: what follows may be handed over at once."""
        served = self._waiting.popleft()
        self._open -= 1
        self._note.done = served.step
        self._write_note()
        self._on_done(served.step)

    def _finish_all(self) -> None:
        """Nothing comes any more, so nobody will say of the last ones that they are done with."""
        while self._open:
            self._finish_first()

    @property
    def _has_all(self) -> bool:
        """Whether the trainer has every batch that is there."""
        return 0 < self._open == len(self._waiting)

    def _is_next(self, served: Served) -> bool:
        return len(self._waiting) > self._open and self._waiting[self._open] is served

    def _warn_of_checkpoint(self, registration: Registration) -> None:
        """These trainers cannot be given earlier batches again; whoever resumes from an older checkpoint should know."""
        if 0 < registration.starting_step < self._note.done:
            log.warning(
                "bridge.trainer_behind",
                starting_step=registration.starting_step,
                done=self._note.done,
                note="the trainer resumes from an older step than it had come to: batches that it was done with do not come again",
                remedy="set the run back with `orchestrator run CONFIG --rewind-to STEP`, or save checkpoints more often",
            )

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


def _read_note(path: Path, run: str, rewinds: int) -> Note:
    """What an earlier process noted, if it was of the same run and of the same steps: those that were given up come anew."""
    try:
        note = msgspec.json.decode(path.read_bytes(), type=Note)
    except FileNotFoundError:
        return Note(run, rewinds)
    except (OSError, msgspec.MsgspecError) as error:
        log.warning(
            "bridge.note_unreadable",
            path=str(path),
            error=str(error),
            note="a batch may be handed over twice",
        )
        return Note(run, rewinds)
    return note if (note.run, note.rewinds) == (run, rewinds) else Note(run, rewinds)
