"""Versions and staleness: how far ahead of the trainer work may run.

Staleness of a group = versions published between the oldest one that sampled it and its batch's training, queue time
included. Published versions are counted, so a trainer may number them as it likes. A batch that follows `k` untrained
ones is trained `k` versions after the newest, because the trainer publishes at most one version per step, before it
acknowledges it. So a version has a last step that can train it. `pace` admits a group only while the step it falls into
comes in time, and holds a batch back while it would take newer work and leave more of an older version behind than its
remaining steps can hold; `drop` admits freely and gives up what became too old. Pure arithmetic: no clock, no I/O.
Every loss gives its budget back, because the budget is computed from what is under way and never counted down.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, Literal

_HISTORY = 64
"""Published versions that are remembered beyond those that may still be trained on."""


class Staleness:
    """Who may start, and which batches may be formed."""

    def __init__(
        self, *, batch_size: int, max_versions: int, mode: Literal["pace", "drop"], slack: int = 0
    ) -> None:
        """`slack`: what a batch may lack of the oldest groups because only whole ones sum to it exactly."""
        self.batch_size = batch_size
        self._planned = max(1, batch_size - slack)
        self.max_versions = max_versions
        self.mode = mode
        self.serving = 0
        """Version that the inference servers sample from."""
        self.formed = 0
        """Last step that was formed."""
        self.trained = 0
        """Last step that was trained on."""
        self._history = [0]
        self._open: Counter[tuple[str, int]] = Counter()
        self.reserved = 0
        """Sequences that open groups are expected to yield."""

    @property
    def published(self) -> int:
        """Newest version that the trainer has published."""
        return self._history[-1]

    def publish(self, version: int) -> None:
        """The trainer has a newer version."""
        if version <= self.published:
            raise ValueError(f"version {version} is not newer than {self.published}")
        self._history.append(version)
        del self._history[: -(self.max_versions + _HISTORY)]

    def opened(self, env: str, version: int, size: int) -> None:
        """A group of `size` expected sequences is under way."""
        self._open[env, version] += size
        self.reserved += size

    def closed(self, env: str, version: int, size: int) -> None:
        """That group ended, however."""
        self._open[env, version] -= size
        if not self._open[env, version]:
            del self._open[env, version]
        self.reserved -= size

    def open_size(self, env: str) -> int:
        """What open groups of an env are expected to yield."""
        return sum(size for (name, _), size in self._open.items() if name == env)

    def version_at(self, step: int) -> int:
        """The version that a step is trained on, if every step publishes the next number."""
        return self.published + max(0, step - 1 - self.trained)

    def age(self, version: int, step: int) -> int:
        """How many versions newer than `version` there will be when a step is trained on."""
        newer = len(self._history) - bisect_right(self._history, version)
        return newer + max(0, step - 1 - self.trained)

    def admits(self, size: int, queued: int, *, stuck: bool) -> bool:
        """Whether a group started now could be trained in time, behind `queued` sequences and all in flight.

        Never while the inference servers are so far behind that even the next batch could not have it. `stuck`: the
        queue cannot make a batch. With nothing in flight that could change it, one more group is let in whatever its
        age will be: the alternative is to wait for ever.
        """
        if self.age(self.serving, self.formed + 1) > self.max_versions:
            return False
        if self.mode == "drop" or (stuck and self.reserved == 0):
            return True
        steps_ahead = -(-(self.reserved + queued + size) // self._planned)
        return self.age(self.serving, self.formed + steps_ahead) <= self.max_versions

    def explain(self) -> str:
        """Whom more work waits for."""
        if self.age(self.serving, self.formed + 1) > self.max_versions:
            return f"the inference servers to load version {self.published} (they have {self.serving})"
        return "the trainer (more work now would be too old when it is trained on)"

    def oldest_allowed(self, step: int) -> int:
        """The oldest version that may be trained on in a step."""
        at = len(self._history) - 1 + max(0, step - 1 - self.trained) - self.max_versions
        if at <= 0:
            return 0
        return self._history[at] if at < len(self._history) else self.published + 1 + at - len(self._history)

    def held_back_by(self, queued: Mapping[int, int], available: Collection[str]) -> tuple[str, int] | None:
        """The env and version of a group in flight that the next batch must wait for, or None.

        `queued` has the size of what is queued by version; the next batch takes the oldest of it. Groups of envs that
        have no server now are not waited for.
        """
        if self.mode == "drop" or not self._open:
            return None
        open_sizes: Counter[int] = Counter()
        for (env, version), size in self._open.items():
            if env in available:
                open_sizes[version] += size
        waiting = in_queue = 0
        for version in sorted(open_sizes.keys() | queued.keys()):
            waiting += open_sizes[version]
            in_queue += queued.get(version, 0)
            left = waiting + max(0, in_queue - self._planned)
            steps_left = self.max_versions - self.age(version, self.formed + 2) + 1
            if waiting and left > max(0, steps_left) * self._planned:
                return next((env, old) for (env, old) in self._open if old <= version and env in available)
        return None

    def state_dict(self) -> dict[str, Any]:
        """What a later process needs; what is open is asked again, and steps are the journal's to know."""
        return {"published": list(self._history)}

    def load_state_dict(self, state: dict[str, Any], *, formed: int, trained: int) -> None:
        """Continue; the inference servers are brought up to the published version before dispatch."""
        self._history = list(state["published"])
        self.serving = self.published
        self.formed, self.trained = formed, trained
