"""What the page shows of a run directory, read by threads beside whoever writes there: steps, evaluations, the run's state.

A living run tells its own status. Of any other directory the records tell it, with the summary if the run has got so far
as to write one. Reads only.
"""

import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.facts import Status
from orchestrator.journal import JournalReader
from orchestrator.journal.directory import DATABASE, DIRECTORY
from orchestrator.service.browse import ArchivedRollouts
from orchestrator.views.feed import Feed
from orchestrator.views.past import end_of
from orchestrator.views.recorded import Recorded, RecordedRun, recorded_status


def recorded_run(run_dir: Path) -> RecordedRun:
    """The recorded part of the run in a directory, not read yet."""

    def read(step: int, evals: int) -> Recorded:
        with JournalReader(run_dir) as reader:
            return Recorded(
                reader.meta().get("run_id", ""), reader.steps(since=step), reader.evals(since=evals)
            )

    return RecordedRun(read)


def live_feed(run_dir: Path, status: Callable[[], Status]) -> Feed:
    """The page of a run of this process."""

    def moment() -> object:
        now = status()
        told = {name: report.step for name, report in now.reports.items()}
        return now.step, now.trained, len(now.evals), now.evals[-1:], told

    return Feed(
        name=run_dir.name,
        status=status,
        recorded=recorded_run(run_dir),
        rollouts=ArchivedRollouts(run_dir),
        moment=moment,
    )


class RunDirectory:
    """A run that another process runs, or none any more."""

    def __init__(self, run_dir: Path) -> None:
        """Raises ConfigError where there is no run."""
        self.run_dir = run_dir
        self._database = run_dir / DIRECTORY / DATABASE
        if not self._database.is_file():
            raise ConfigError(f"{run_dir}: there is no journal here; is it the run_dir of a run?")
        self.name = run_dir.resolve().name
        self.recorded = recorded_run(run_dir)
        self.rollouts = ArchivedRollouts(run_dir)

    def feed(self) -> Feed:
        """The page of it."""
        return Feed(
            name=self.name,
            status=self.status,
            recorded=self.recorded,
            rollouts=self.rollouts,
            moment=self._moment,
        )

    def status(self) -> Status:
        """Where the run is in its life, and what its records add up to."""
        state, why, at = end_of(self.run_dir)
        when = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        words = {
            "busy": "An orchestrator works on this run; this is what its journal says.",
            "ended": f"Ended at {when}: {why}.",
            "failed": f"Failed at {when}: {why}",
            "crashed": f"It gave its last sign of life at {when}, and {why}. The same command goes on with it.",
        }[state]
        address = _json_of(self.run_dir / "addresses.json").get("http") if state == "busy" else None
        summary = _json_of(self.run_dir / "summary.json") if state == "ended" else {}
        return recorded_status(
            self.recorded,
            state=state,
            words=f"{words} Its own page is at {address}." if address else words,
            summary=summary,
        )

    def snapshot(self) -> dict[str, Any]:
        """The whole run as the page wants it, at this moment."""
        self.recorded.refresh()
        return {
            "name": self.name,
            "run": self.recorded.run_id,
            "now": time.time(),
            "trouble": "",
            "status": self.status(),
            **self.recorded.parts(),
        }

    def _moment(self) -> object:
        """What changes with every commit."""
        found = []
        for path in (self._database, self._database.with_name(f"{DATABASE}-wal")):
            try:
                told = os.stat(path)  # noqa: PTH116
                found.append((told.st_mtime_ns, told.st_size))
            except OSError:
                found.append((0, 0))
        return found


def _json_of(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
