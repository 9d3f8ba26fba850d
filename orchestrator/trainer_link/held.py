"""The batches that are there for the trainer: leased, and kept for a rank that asks again. No I/O, no ranks' connections.

A batch is leased from its offer until every rank has acknowledged it, and a rank acknowledges only what it was served. Then it
is kept, the last so many of them, for ranks that resume from an older checkpoint. Steps come in order. What a rank says of a step counts only
where it can have had it: steps that were there before this process, and those that it was served with since.
"""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto

from orchestrator.groups.group import Batch
from orchestrator.trainer_link.encoding import check_shares


class Acknowledged(Enum):
    """What an acknowledgement comes to."""

    NEW = auto()
    LAST = auto()
    """Now every rank has acknowledged the batch."""
    BEFORE = auto()
    NEVER_SERVED = auto()


@dataclass(slots=True)
class _Lease:
    """A batch that not every rank has acknowledged; `served_to` are the ranks that may have it."""

    batch: Batch
    served_to: set[int] = field(default_factory=set)
    acknowledged_by: set[int] = field(default_factory=set)


class HeldBatches:
    """What is leased and what is kept."""

    def __init__(self, *, world_size: int, keep: int, last_step: int) -> None:
        self._world_size = world_size
        self._keep = keep
        self.last_step = last_step
        self._leased: dict[int, _Lease] = {}
        self._kept: OrderedDict[int, Batch] = OrderedDict()
        self._recovered = last_step
        self._served: dict[int, int] = {}

    @property
    def leased(self) -> list[int]:
        """Steps that not every rank has acknowledged."""
        return list(self._leased)

    def offer(self, batch: Batch) -> None:
        """Lease a new batch."""
        self._lease(_Lease(batch))

    def restore(self, batch: Batch, acked_by: Collection[int]) -> bool:
        """Lease a batch of an earlier process again, which any rank may have; whether every rank needs it no more."""
        self._lease(_Lease(batch, set(range(self._world_size)), set(acked_by)))
        self._recovered = self.last_step
        return len(acked_by) >= self._world_size

    def keep(self, batch: Batch) -> None:
        """Put back a batch that every rank had acknowledged before a restart."""
        self.last_step = self._recovered = max(self.last_step, batch.step)
        self._kept[batch.step] = batch
        self._trim()

    def serve(self, step: int, rank: int) -> Batch | None:
        """The batch of a step, which goes to a rank; None where it is not here."""
        lease = self._leased.get(step)
        if lease is None:
            return self._kept.get(step)
        lease.served_to.add(rank)
        self._served[rank] = max(step, self._served.get(rank, 0))
        return lease.batch

    def had_by(self, rank: int) -> int:
        """The last step that a rank can have: of an earlier process, or served by this one."""
        return max(self._recovered, self._served.get(rank, 0))

    def was_served(self, rank: int) -> bool:
        """Whether this process has served a rank with a batch that was not acknowledged by all."""
        return rank in self._served

    def acknowledge(self, step: int, rank: int) -> Acknowledged:
        """A rank is done with a step."""
        lease = self._leased.get(step)
        if lease is None or rank in lease.acknowledged_by:
            return Acknowledged.BEFORE
        if rank not in lease.served_to:
            return Acknowledged.NEVER_SERVED
        lease.acknowledged_by.add(rank)
        return Acknowledged.LAST if len(lease.acknowledged_by) >= self._world_size else Acknowledged.NEW

    def complete(self, step: int) -> None:
        """Every rank has acknowledged a batch: from now on it is kept."""
        self._kept[step] = self._leased.pop(step).batch
        self._trim()

    def done_by(self, rank: int) -> int:
        """The step behind which a rank goes on: all up to it need nothing of that rank."""
        open_steps = (step for step, lease in self._leased.items() if rank not in lease.acknowledged_by)
        return min(open_steps, default=self.last_step + 1) - 1

    def explain_missing(self, step: int) -> str:
        """Why a step cannot be served."""
        if step > self.last_step or step < 1:
            return f"there is no batch of step {step}; the last one is step {self.last_step}"
        available = sorted([*self._kept, *self._leased])
        kept = f"steps {available[0]} to {available[-1]} are" if available else "none is"
        gone = f"the batch of step {step} is no longer kept ({kept}); resume the trainer from a later checkpoint, or"
        if step == 1:
            return f"{gone} start over with `orchestrator run CONFIG --fresh` (and raise trainer.keep_batches for the next time)"
        return (
            f"{gone} set the run back with `orchestrator run CONFIG --rewind-to {step - 1}` (and raise trainer.keep_batches for "
            "the next time, or let the trainer do it: trainer.allow_rewind)"
        )

    def _lease(self, lease: _Lease) -> None:
        step = lease.batch.step
        if self._leased and step <= max(self._leased):
            raise ValueError(f"batch {step} offered after batch {max(self._leased)}")
        check_shares([lease.batch], self._world_size)
        self._leased[step] = lease
        self.last_step = max(self.last_step, step)

    def _trim(self) -> None:
        while len(self._kept) > self._keep:
            self._kept.popitem(last=False)
