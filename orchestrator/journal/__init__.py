"""The record of a run that survives a crash: written by `Journal`, read by `JournalReader`.

`directory` has names, permissions and the lock; `schema` the tables and `migrations` the way to them from older ones;
`mark` what was promised and `opening` whether the files on disk keep it; `rows`, `learned` and `payloads` what goes into
the tables and beside them, and `stage` how the latter reaches the disk; `store` what each record does, `writer` the thread
that commits; `reader` what a restart recovers and people look at; `identity` what decides which tasks come. What the rows
mean is in docs/journal.md.
"""

from orchestrator.journal.identity import (
    EnvIdentity,
    RunIdentity,
    changed_tasks,
    differences,
    digest_of,
    identity_from_meta,
    notices,
)
from orchestrator.journal.journal import Journal
from orchestrator.journal.reader import BatchRow, GroupRow, JournalReader, Recovered

__all__ = [
    "BatchRow",
    "EnvIdentity",
    "GroupRow",
    "Journal",
    "JournalReader",
    "Recovered",
    "RunIdentity",
    "changed_tasks",
    "differences",
    "digest_of",
    "identity_from_meta",
    "notices",
]
