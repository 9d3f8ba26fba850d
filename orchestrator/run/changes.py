"""What was changed by hand and lasts: how the run differs from its configuration, and since when.

Kept in the journal as the state "control". `Changes.against` holds it against the configuration of a later process: a
setting that the configuration itself has changed meanwhile counts as it stands there, and the difference is dropped.
Pure; nothing is applied here.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from envs.addresses import shown_url
from orchestrator.run.commands import Origin


class Change(msgspec.Struct, frozen=True):
    """One setting: what the configuration said when it was changed, and what holds instead."""

    configured: int | float | None
    value: int | float
    at: float
    by: str


class Mark(msgspec.Struct, frozen=True):
    """Since when something holds, and by whom."""

    at: float
    by: str


class Changes(msgspec.Struct, kw_only=True):
    """Every difference; empty at first."""

    ratios: dict[str, Change] = {}
    max_inflight: Change | None = None
    quarantined: dict[str, Mark] = {}
    added: dict[str, Mark] = {}
    removed: dict[str, Mark] = {}

    @classmethod
    def load(cls, state: Mapping[str, Any] | None) -> Self:
        """From the journal's state."""
        return msgspec.convert(state or {}, type=cls)

    def state(self) -> dict[str, Any]:
        """For the journal."""
        return dict(msgspec.to_builtins(self))

    def against(
        self,
        *,
        ratios: Mapping[str, float | None],
        max_inflight: int,
        endpoints: Sequence[str],
        sourced: bool,
    ) -> list[str]:
        """Drop what the configuration says otherwise by now; returns a sentence for each.

        `sourced`: others than the listed endpoints are named by sources, so that any may have been removed.
        """
        dropped = []
        for env, change in list(self.ratios.items()):
            if env not in ratios or ratios[env] != change.configured:
                del self.ratios[env]
                dropped.append(f'the ratio {change.value:g} of env "{env}"')
        if self.max_inflight is not None and self.max_inflight.configured != max_inflight:
            dropped.append(f"max_inflight {self.max_inflight.value}")
            self.max_inflight = None
        for env in [env for env in self.quarantined if env not in ratios]:
            del self.quarantined[env]
            dropped.append(f'the quarantine of env "{env}"')
        for url in [url for url in self.added if url in endpoints]:
            del self.added[url]
            dropped.append(f"the added inference server {shown_url(url)}")
        for url in [url for url in self.removed if url not in endpoints and not sourced]:
            del self.removed[url]
            dropped.append(f"the removal of the inference server {shown_url(url)}")
        if len(self.removed) == len(endpoints) and not self.added and not sourced:
            dropped += [f"the removal of the inference server {shown_url(url)}" for url in self.removed]
            self.removed.clear()
        return dropped

    @property
    def changed_max_inflight(self) -> int | None:
        """What it was changed to; None where nobody has."""
        return None if self.max_inflight is None else int(self.max_inflight.value)

    def endpoints(self, configured: Sequence[str], *, sourced: bool) -> tuple[list[str], list[str]]:
        """The inference servers that a run starts with, and those that join when it has started.

        One that was added by hand and does not fit any more keeps no run from starting, as long as another is there.
        """
        staying = [url for url in configured if url not in self.removed]
        return (staying, list(self.added)) if staying or sourced else (list(self.added), [])

    def held(self, env: str) -> str:
        """Since when an env is quarantined by hand, and by whom; empty where it is not."""
        mark = self.quarantined.get(env)
        return "" if mark is None else _since(mark)

    def lines(self) -> list[str]:
        """Each difference from the configuration, for people."""
        found = [
            f"ratio of env {env}: {_told(change.configured)} -> {change.value:g} ({_since(change)})"
            for env, change in self.ratios.items()
        ]
        if (change := self.max_inflight) is not None:
            found.append(f"max_inflight: {change.configured} -> {change.value} ({_since(change)})")
        found += [
            f"env {env} is quarantined by hand ({_since(mark)})" for env, mark in self.quarantined.items()
        ]
        found += [
            f"inference server added: {shown_url(url)} ({_since(mark)})" for url, mark in self.added.items()
        ]
        found += [
            f"inference server removed: {shown_url(url)} ({_since(mark)})"
            for url, mark in self.removed.items()
        ]
        return found


def _told(ratio: float | None) -> str:
    return "by its number of tasks" if ratio is None else f"{ratio:g}"


def _since(change: Change | Mark) -> str:
    return str(Origin(change.by, change.at))
