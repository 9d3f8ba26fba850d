"""What a run's rollouts were: kept for people by `RolloutArchive`, read by `RolloutReader`.

`schema` has the file and its tables; `events` what the run tells, `archive` the thread that writes, `store` what each event does to
the tables, `sample` which groups keep their conversations, `space` what is given up when there is too much; `records` what is
read, `filters` what can be asked for, `reader` the reading, `export` files for other programs. Best effort: whatever happens to the file,
the run goes on untouched. What is kept is in docs/rollouts.md.
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
