"""How long the trainer has each batch, and how long the inference servers take for each version.

Seen from outside, in the book of versions, whenever the run looks: nobody has to tell. The trainer has one batch at a
time; its time begins when the batch is formed, or when it is done with the one before. Pure.
"""

from orchestrator.dispatch.versions import Versions

MOST = 64
"""Times between two steps that are kept of each kind."""


class Turns:
    """Looks at the book of versions."""

    def __init__(self, versions: Versions, now: float) -> None:
        self._versions = versions
        self._trained_s: list[float] = []
        self._loaded_s: list[float] = []
        self.begin(now)

    def begin(self, now: float) -> None:
        """The run starts, or goes on: what is under way counts from now."""
        versions = self._versions
        self._trained = versions.trained
        self._training_since = now if versions.formed > versions.trained else None
        self._loading_since = now if versions.serving != versions.published else None

    def look(self, now: float) -> None:
        """Time has passed, and things may have changed."""
        versions = self._versions
        done = versions.trained - self._trained
        if done > 0:
            if self._training_since is not None:
                self._trained_s += [(now - self._training_since) / done] * min(done, MOST)
            self._trained, self._training_since = versions.trained, None
        if self._training_since is None and versions.formed > versions.trained:
            self._training_since = now
        behind = versions.serving != versions.published
        if behind and self._loading_since is None:
            self._loading_since = now
        elif not behind and self._loading_since is not None:
            self._loaded_s.append(now - self._loading_since)
            self._loading_since = None

    def drain_trained(self) -> list[float]:
        """Seconds for which the trainer had batches, since the last call."""
        told, self._trained_s = self._trained_s[-MOST:], []
        return [round(seconds, 4) for seconds in told]

    def drain_loaded(self) -> list[float]:
        """Seconds that versions took to be loaded, since the last call."""
        told, self._loaded_s = self._loaded_s[-MOST:], []
        return [round(seconds, 4) for seconds in told]
