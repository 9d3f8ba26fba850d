"""What a run's rollouts were: kept for people by `RolloutArchive`, read by `RolloutReader`.

`schema` has the file and its tables, `records` what is read, `filters` what can be asked for, `reader` the reading; `sample`
which groups keep their conversations, `store` what each event does to the tables, `space` what is given up when there is
too much, `archive` the thread that writes. Best effort: whatever happens to the file, the run goes on untouched. What is kept is in docs/rollouts.md.
"""

from orchestrator.archive.reader import RolloutReader
from orchestrator.archive.records import ArchivedFailure, ArchivedGroup, ArchivedRollout, OutcomeCount

__all__ = [
    "ArchivedFailure",
    "ArchivedGroup",
    "ArchivedRollout",
    "OutcomeCount",
    "RolloutReader",
]
