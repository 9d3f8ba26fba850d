"""The parts of a run, made and joined by `build`."""

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.buffer import BatchBuffer
from orchestrator.dispatch.dispatcher import Dispatcher
from orchestrator.dispatch.ledger import Ledger
from orchestrator.dispatch.pace import Pace
from orchestrator.dispatch.versions import Versions
from orchestrator.facts import Facts
from orchestrator.groups.group import Group
from orchestrator.mix import CircuitBreaker
from orchestrator.run.ports import Pool, RunJournal, TrainPort
from orchestrator.sinks.archive import Archive
from orchestrator.sinks.eval_sink import EvalSink
from orchestrator.sinks.train_sink import TrainSink
from orchestrator.tasks.evaluations import Evaluations
from orchestrator.tasks.source import TrainSource


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is made of; `build` makes and joins them."""

    train: Mapping[str, TrainPort]
    pool: Pool
    journal: RunJournal
    archive: Archive
    versions: Versions
    ledger: Ledger
    mix: CircuitBreaker
    source: TrainSource
    buffer: BatchBuffer[Group]
    pace: Pace
    facts: Facts
    sink: TrainSink
    evaluations: Evaluations
    eval_sink: EvalSink
    dispatcher: Dispatcher
