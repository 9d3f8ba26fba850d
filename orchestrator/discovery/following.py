"""Who a source names, and when somebody joins or leaves by its answers. Pure: time is an argument.

Whoever is named for the first time joins. Whoever is missing leaves only when every answer has left it out for
`leave_after_s`, because many resolvers answer with a part of what they know. An answer that names nobody removes
nobody until answers have been empty for `empty_after_s`. A look that fails removes nobody, and every absence is
counted anew after it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.discovery.source import Source

MOST_MEMBERS = 1024
"""Each has a connection, or a watch, of its own."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How often a source is looked at, how long a look may take, and how long an absence lasts before it counts."""

    look_every_s: float
    look_within_s: float
    leave_after_s: float
    empty_after_s: float


DNS = Patience(look_every_s=3.0, look_within_s=5.0, leave_after_s=10.0, empty_after_s=60.0)
FILE = Patience(look_every_s=1.0, look_within_s=5.0, leave_after_s=2.0, empty_after_s=60.0)
"""A file is changed by somebody who means it; the two seconds are for one that is being written."""


class Followed:
    """What is known of one source. `trouble` is why its last look was of no use; empty while all is well."""

    def __init__(self, source: Source, patience: Patience) -> None:
        self.source = source
        self.patience = patience
        self.trouble = "it has not answered yet"
        self.answered_at: float | None = None
        """When it last named somebody."""
        self.members: dict[str, None] = {}
        self._missing: dict[str, float] = {}
        self._empty_since: float | None = None

    def answered(self, addresses: Iterable[str], now: float) -> tuple[list[str], list[str]]:
        """An answer came: who joins, and who leaves."""
        named = dict.fromkeys(addresses)
        if len(named) > MOST_MEMBERS:
            self.failed(f"it names {len(named)} servers; {MOST_MEMBERS} are the most")
            return [], []
        if not named:
            return [], self._nobody(now)
        self.trouble, self._empty_since, self.answered_at = "", None, now
        joined = [address for address in named if address not in self.members]
        self.members.update(dict.fromkeys(joined))
        self._missing = {
            address: self._missing.get(address, now) for address in self.members if address not in named
        }
        return joined, self._let_go(
            address for address, since in self._missing.items() if now - since >= self.patience.leave_after_s
        )

    def failed(self, why: str) -> None:
        """A look was of no use."""
        self.trouble = why
        self._missing.clear()
        self._empty_since = None

    def _nobody(self, now: float) -> list[str]:
        self.trouble = "it names no server"
        if self._empty_since is None:
            self._empty_since = now
        lasted = now - self._empty_since >= self.patience.empty_after_s
        return self._let_go(self.members) if lasted else []

    def _let_go(self, addresses: Iterable[str]) -> list[str]:
        leaving = list(addresses)
        for address in leaving:
            del self.members[address]
            self._missing.pop(address, None)
        return leaving

    def __str__(self) -> str:
        """The source, and what is wrong with it."""
        return f"{self.source.text}: {self.trouble}" if self.trouble else self.source.text
