"""The record of a run that survives a crash: written by `Journal`, read by `JournalReader`.

`schema` has the tables, `rows` and `payloads` what goes into them and beside them, `store` what each record does,
`writer` the thread that commits, `reader` what a restart recovers and people look at. What the rows mean is in
docs/journal.md.
"""

from orchestrator.journal.journal import Journal
from orchestrator.journal.reader import BatchRow, GroupRow, JournalReader, Recovered

__all__ = ["BatchRow", "GroupRow", "Journal", "JournalReader", "Recovered"]
