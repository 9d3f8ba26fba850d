"""The one book of versions and steps: what is published, what the engines sample from, what is formed and trained.

Staleness of a group = versions published between the oldest one that sampled it and its batch's training, queue time
included. Published versions are counted, so a trainer may number them as it likes. A batch that follows `k` untrained
ones is trained `k` versions after the newest, because the trainer publishes at most one version per step, before it
acknowledges it. So a version has a last step that may train on it, which never comes earlier as the run goes on; but for
one case: a version that was withdrawn gives the others a step more, and takes it back when it is published again.
Pure arithmetic: no clock, no I/O.
"""

from bisect import bisect_right
from typing import Any

_HISTORY = 64
"""Published versions that are remembered beyond those that may still be trained on."""


class Versions:
    """Which versions there are, and how old each will be at a step."""

    def __init__(self, *, max_versions: int) -> None:
        self.max_versions = max_versions
        self.serving = 0
        """Version that the inference servers sample from."""
        self.formed = 0
        """Last step that was formed."""
        self.trained = 0
        """Last step that was trained on."""
        self._history = [0]
        self._trained_at = [0]
        """The last step that was trained on when each of these was published."""

    @property
    def published(self) -> int:
        """Newest version that the trainer has published."""
        return self._history[-1]

    def publish(self, version: int) -> None:
        """The trainer has a newer version."""
        if version <= self.published:
            raise ValueError(f"version {version} is not newer than {self.published}")
        self._history.append(version)
        self._trained_at.append(self.trained)
        for remembered in (self._history, self._trained_at):
            del remembered[: -(self.max_versions + _HISTORY)]

    def withdraw(self, version: int) -> None:
        """No inference server could load a version: it is as if it had never been published.

        Nor were those between it and the one that is served: they were passed over, and nobody will load them now.
        """
        book = list(zip(self._history, self._trained_at, strict=True))
        kept = [(one, at) for one, at in book if not self.serving < one <= version] or book[:1]
        self._history, self._trained_at = [one for one, _ in kept], [at for _, at in kept]

    def version_at(self, step: int) -> int:
        """The version that a step is trained on, if every step publishes the next number."""
        return self.published + max(0, step - 1 - self.trained)

    def age(self, version: int, step: int) -> int:
        """How many versions newer than `version` there will be when a step is trained on."""
        return self._newer(version) + max(0, step - 1 - self.trained)

    def steps_left(self, version: int) -> int:
        """How many of the batches still to be formed may hold what this version sampled; below 1: none."""
        newer = len(self._history) - bisect_right(self._history, version)
        return self.trained + 1 + self.max_versions - newer - self.formed

    def oldest_allowed(self, step: int) -> int:
        """The oldest version that may be trained on in a step."""
        at = len(self._history) - 1 + max(0, step - 1 - self.trained) - self.max_versions
        if at <= 0:
            return 0
        return self._history[at] if at < len(self._history) else self.published + 1 + at - len(self._history)

    @property
    def every_step(self) -> bool:
        """Whether the trainer publishes with every step: of as many of the last ones as may be trained on, at most one without."""
        recent = min(len(self._trained_at), self.max_versions + 1)
        return self.trained - self._trained_at[-recent] <= recent + 1

    @property
    def revision(self) -> tuple[int, int, int, int]:
        """Differs whenever anything in the book does."""
        return self.formed, self.trained, self.serving, self.published

    def state_dict(self) -> dict[str, Any]:
        """What a later process needs; steps are the journal's to know."""
        return {
            "published": list(self._history),
            "trained_at": list(self._trained_at),
            "serving": self.serving,
        }

    def load_state_dict(self, state: dict[str, Any], *, formed: int, trained: int) -> None:
        """Continue; the inference servers are brought to the last loaded version before dispatch."""
        self._history = list(state["published"])
        self.serving = state.get("serving", self.published)
        self.formed, self.trained = formed, trained
        # Not in states of earlier releases: as if there had been one with every step.
        count = len(self._history)
        self._trained_at = list(state.get("trained_at") or range(trained - count, trained))

    def _newer(self, version: int) -> int:
        return len(self._history) - bisect_right(self._history, version)
