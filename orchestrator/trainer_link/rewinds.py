"""Ranks that ask for the run to be set back: it is, when all of them ask for the same step.

A rank that goes on from an old checkpoint while another is further on would train on other batches than that one, so until the
last rank has asked the others wait, and a rank that asks for another batch instead has them refused. No I/O: whether it can be done, and
doing it, is `begin`'s, which asks back once it knows: somebody may have changed their mind meanwhile.
"""

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from orchestrator.trainer.protocol import Missing, ToTrainer
from orchestrator.trainer_link.ranks import Rank

log = structlog.get_logger("trainer")

Begin = Callable[[int, Callable[[str], bool]], None]
"""Finds out what stands in the way of a step, calls back with it (empty: nothing), and sets the run back where that says so."""


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """A request for the batch behind a step, which waits."""

    peer: bytes
    request_id: int
    step: int


class Rewinds:
    """Who asks for what."""

    def __init__(self, *, world_size: int, send: Callable[[bytes, ToTrainer], None], begin: Begin) -> None:
        self._world_size = world_size
        self._send = send
        self._begin = begin
        self._asked: dict[int, _Asked] = {}

    def ask(self, rank: Rank, request_id: int, step: int) -> None:
        """A rank wants the run to be set back to a step."""
        self._asked[rank.number] = _Asked(rank.peer, request_id, step)
        steps = {number: asked.step for number, asked in sorted(self._asked.items())}
        if len(set(steps.values())) > 1:
            told = ", ".join(f"rank {number} to step {wanted}" for number, wanted in steps.items())
            self._refuse(
                f"the ranks do not agree where to set the run back to ({told}); resume all of them from one step"
            )
            return
        missing = [number for number in range(self._world_size) if number not in steps]
        if missing:
            log.warning("trainer.rewind_waits", to_step=step, asked_by=list(steps), waits_for=missing)
            return
        log.warning("trainer.rewind_asked", to_step=step)
        asked = dict(self._asked)

        def decide(obstacle: str) -> bool:
            if self._asked != asked:
                return False  # refused meanwhile, or asked anew: then that is what counts
            if obstacle:
                self._refuse(obstacle)
            return not obstacle

        self._begin(step, decide)

    def went_on(self, number: int, after: int) -> None:
        """A rank asks for the batch behind a step, whatever others ask for."""
        wanted = next((asked.step for asked in self._asked.values()), after)
        if after != wanted:
            self._refuse(
                f"the run is not set back to step {wanted}: rank {number} goes on with step {after + 1}; resume every rank from one "
                "step, and stop the processes that go on"
            )

    def lose(self, number: int) -> None:
        """A rank is gone; it asks again when it is back."""
        self._asked.pop(number, None)

    def _refuse(self, reason: str) -> None:
        log.warning("trainer.rewind_refused", reason=reason)
        asked, self._asked = self._asked, {}
        for one in asked.values():
            self._send(one.peer, Missing(one.request_id, reason))
