"""How tests open a journal: with the configuration's own defaults, but for what a test is about."""

from pathlib import Path
from typing import Any

from orchestrator.config.sections import JournalConfig, TrainerConfig
from orchestrator.journal import Journal
from orchestrator.journal.payloads import SEGMENT_BYTES
from orchestrator.journal.store import JournalStore


def open_journal(run_dir: Path, **options: Any) -> Journal:
    """The journal of a run directory as `orchestrator run` would open it."""
    config = JournalConfig()
    settings = {
        "commit_interval_s": config.commit_interval_s,
        "commit_bytes": config.commit_bytes,
        "max_backlog_bytes": config.max_backlog_bytes,
        "fsync": config.fsync,
        "compress": config.compress_level,
        "keep_batches": TrainerConfig().keep_batches,
    }
    return Journal.open(run_dir, **{**settings, **options})


def open_store(run_dir: Path, **options: Any) -> JournalStore:
    """The store behind a journal, without the thread and the lock."""
    settings = {"keep_batches": TrainerConfig().keep_batches, "compress": 0, "fsync": True}
    return JournalStore(run_dir, **{**settings, "segment_bytes": SEGMENT_BYTES, **options})
