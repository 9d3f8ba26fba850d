"""Versions of the policy that the trainer publishes: each is checked once, and counts only when it can be loaded.

Invariants: versions only grow; a version that is refused leaves no trace but a line in the log; everybody who asked for
a version while it was checked gets the one decision. A rank that asks again, as it does after a reconnect, takes
the place of its earlier request. No I/O: `check` looks at the weights, here or elsewhere, now or later.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import structlog

log = structlog.get_logger("trainer")

CheckVersion = Callable[[int, str | None, Callable[[str], None]], None]
"""Called with a version, its path and `decided`, which takes the reason why it cannot be loaded, "" when it can."""

OnPublish = Callable[[int, str | None, int], None]
"""Called with a version that counts, its path, and the last step that it was trained on, 0 when nobody said."""

Loads = Callable[[str, Mapping[str, str]], None]
"""Called with the reason why a version is refused after all, "" when it is not, and by engine why it does not have it."""

WaitLoaded = Callable[[int, float, Loads], None]
"""Called with a version that was published, how many seconds may be waited for it, and what to call once with the outcome."""

Began = Callable[[str, list[str]], None]
"""Called with the reason why a version cannot be sent, "" when it can, and the base URLs of the servers that stand still for it."""

Ended = Callable[[str, str], None]
"""Called with the reason why a version that was sent is refused, "" when it is not, and the path under which to publish it."""

_MAX_PENDING = 16


class Updates(Protocol):
    """Versions that the trainer sends to the inference servers itself."""

    @property
    def waiting(self) -> int:
        """Inference servers that wait for the trainer to send them weights."""

    def begin(self, client: str, version: int, then: Began) -> None: ...
    def end(self, client: str, version: int, failed: str, untouched: bool, then: Ended) -> None: ...
    def gone(self, client: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of a publication; `note` says why it was refused, or what is odd about it."""

    accepted: bool
    note: str = ""


class Publications:
    """Knows which versions are being checked; the newest one is the run's to know."""

    def __init__(self, *, newest: Callable[[], int], check: CheckVersion, on_publish: OnPublish) -> None:
        self._newest = newest
        self._check = check
        self._on_publish = on_publish
        self._pending: dict[tuple[int, str | None], dict[str, Callable[[Decision], None]]] = {}

    def publish(
        self, version: int, path: str | None, *, step: int, source: str, then: Callable[[Decision], None]
    ) -> None:
        """A version can be sampled from, `source` says, and comes of a step; `then` is called once, now or when it is decided."""
        if version <= self._newest():
            then(Decision(accepted=True, note=self._ignored(version, source)))
            return
        key = version, path
        if key in self._pending:
            self._pending[key][source] = then
            return
        if len(self._pending) >= _MAX_PENDING:
            note = f"{_MAX_PENDING} versions are being checked already; publish version {version} again later"
            then(Decision(accepted=False, note=note))
            return
        waiting = self._pending[key] = {source: then}

        def decided(reason: str) -> None:
            # A decision counts once, also when the same version was published and is checked again meanwhile.
            if self._pending.get(key) is waiting:
                del self._pending[key]
                decision = self._decide(version, path, reason, step=step, source=source)
                for answer in waiting.values():
                    answer(decision)

        try:
            self._check(version, path, decided)
        except Exception as error:
            log.exception("trainer.version_check_failed", version=version, path=path)
            decided(f"version {version} could not be checked: {error}")

    def _decide(self, version: int, path: str | None, reason: str, *, step: int, source: str) -> Decision:
        if reason:
            log.warning("trainer.version_refused", version=version, path=path, source=source, reason=reason)
            return Decision(accepted=False, note=reason)
        if version <= self._newest():
            # A newer one was decided first.
            return Decision(accepted=True, note=self._ignored(version, source))
        log.info("trainer.version_published", version=version, path=path, source=source)
        self._on_publish(version, path, step)
        return Decision(accepted=True)

    def _ignored(self, version: int, source: str) -> str:
        before = (
            "was published before"
            if version == self._newest()
            else f"is older than the published {self._newest()}"
        )
        note = f"version {version} {before}; nothing changes"
        log.info("trainer.version_ignored", version=version, source=source, note=note)
        return note
