"""Which weights a run has: the newest published version, the one that the inference servers have, and where each lies.

The numbers stand in the book of versions (`dispatch.versions`), which staleness is computed from; here are their paths, and
the rules by which a version comes and goes. Invariants: published versions only grow; `loaded_path` is where the version lies
that the servers have, and `path` where the newest published one does; a version that no server could load leaves the book,
the journal and `path` as they were before it. No clock, no I/O.
"""

from typing import Any

import structlog

from orchestrator.dispatch.versions import Versions
from orchestrator.run.ports import LoadWeights, RunJournal

log = structlog.get_logger()


class RunWeights:
    """Published, loaded and refused versions of a run."""

    def __init__(self, versions: Versions, journal: RunJournal) -> None:
        self._versions = versions
        self._journal = journal
        self.path: str | None = None
        """Where the newest published version lies."""
        self.loaded_path: str | None = None
        """Where the version lies that the inference servers have."""
        self.begins_with_trainer = False
        """Whether the trainer publishes version 0, before which nothing is sampled."""
        self.sending: tuple[int, float] | None = None
        """What the trainer is sending to the inference servers itself, and when it is given up; they stand still meanwhile."""
        self.refused = ""
        """The last version that no inference server could load, and why; empty when a later one was loaded."""

    @property
    def newest(self) -> int:
        """The version that the next one must be above: -1 while version 0 itself is to be published."""
        published = self._versions.published
        initial = self.begins_with_trainer and published == 0 and self.path is None
        return -1 if initial else published

    @property
    def asked_for(self) -> LoadWeights | None:
        """What the inference servers have not loaded yet; None when they have the newest."""
        versions = self._versions
        return LoadWeights(versions.published, self.path) if versions.serving != versions.published else None

    def trained(self, step: int) -> bool:
        """A step was trained on; whether that was not known."""
        versions = self._versions
        step = min(step, versions.formed)
        known = step <= versions.trained
        versions.trained = max(versions.trained, step)
        return not known

    def publish(self, version: int, path: str | None, *, step: int = 0) -> LoadWeights | None:
        """The trainer has a version: what is to be loaded. None for an older one or a repetition, which are harmless.

        `step` is the last one that it was trained on. Where the trainer does not say (0), a version that is named after a step says that
        the step was trained on; others are told by `trained`.
        """
        versions = self._versions
        if version <= self.newest:
            log.info("version.ignored", version=version, newest=versions.published)
            return None
        if version > versions.published:
            versions.publish(version)
        self.path = path
        if not step and version <= versions.formed:
            step = version
        if step:
            self.trained(step)
        else:
            # Numbered in another way: it comes after the step that follows those which are known to be trained on.
            step = versions.trained + 1
        self._journal.record_version(version, min(step, versions.formed), path)
        return LoadWeights(version, path)

    def loaded(self, version: int, path: str | None) -> None:
        """The inference servers have a version."""
        self._versions.serving = version
        self.loaded_path = path
        self.refused = ""

    def refuse(self, version: int, why: str) -> None:
        """No inference server could load a version: the last one stays in use, and it was never published."""
        log.error("version.refused", version=version, why=why)
        self.refused = f"version {version} could not be loaded: {why}"
        if version == self._versions.published:
            self.path = self.loaded_path
        self._versions.withdraw(version)
        self._journal.forget_version(version)

    def state(self) -> dict[str, Any]:
        """What a later process needs."""
        versions = self._versions
        return {
            **versions.state_dict(),
            "path": self.path,
            "loaded_path": self.loaded_path,
            "trained": versions.trained,
        }
