"""Follows the sources of one environment, or of the inference servers, and says who joins and who leaves.

Each source is looked at every few seconds, with a jitter, so that many runs do not ask at once. There is one look at a
time: one that takes too long counts as failed, and is waited for before the next. Whoever is named by several sources, or
listed too, leaves with the last of them. Invariant: `on_join` and `on_leave` take turns for every address, also
over several calls of `follow`.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence

import structlog

from orchestrator.discovery.following import DNS, FILE, Followed, Patience
from orchestrator.discovery.lookup import Found, Look, LookupFailed, look_aside
from orchestrator.discovery.source import DnsSource, Source

log = structlog.get_logger(__name__)

JITTER = 0.2


class Membership:
    """Who the sources name, as long as they are followed."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        of: str,
        listed: Iterable[str],
        look: Look,
        patience: Patience | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`of` is whose members they are, for messages; those that are `listed` neither join nor leave.

        `patience`: for tests, in place of the usual one of each kind of source.
        """
        self.of = of
        self.sources = [
            Followed(source, patience or (DNS if isinstance(source, DnsSource) else FILE))
            for source in sources
        ]
        self.on_join: Callable[[str, str], None] = _nothing
        """Called with an address and the source that names it."""
        self.on_leave: Callable[[str], None] = _nothing
        self._listed = frozenset(listed)
        self._look = look
        self._clock = clock
        self._rng = random.Random()

    def __bool__(self) -> bool:
        """Whether there is any source."""
        return bool(self.sources)

    @property
    def complete(self) -> bool:
        """Whether every source has named somebody already."""
        return all(followed.answered_at is not None for followed in self.sources)

    def named_by(self, address: str) -> str:
        """The source that names an address; empty where none does."""
        return next((one.source.text for one in self.sources if address in one.members), "")

    def explain(self) -> str:
        """What is wrong with the sources; where nothing is, their names."""
        return "; ".join(map(str, [one for one in self.sources if one.trouble] or self.sources))

    def follow(self, group: asyncio.TaskGroup) -> "list[asyncio.Task[None]]":
        """Follow every source, each in a task of the group, until cancelled.

        In the group of those who attend to the members, so that nobody joins any more when that ends.
        """
        return [
            group.create_task(self._follow(followed), name=f"follow {followed.source.text}")
            for followed in self.sources
        ]

    async def _follow(self, followed: Followed) -> None:
        patience = followed.patience
        look: asyncio.Future[Found] | None = None
        while True:
            look = look or look_aside(self._look, followed.source)
            await asyncio.wait([look], timeout=patience.look_within_s)
            trouble = followed.trouble
            if not look.done():
                followed.failed("its resolver does not answer")
            else:
                self._take(followed, look.result())
                look = None
            if followed.trouble and followed.trouble != trouble:
                log.warning("source.trouble", of=self.of, source=followed.source.text, why=followed.trouble)
            if look is None:
                await asyncio.sleep(patience.look_every_s * self._rng.uniform(1 - JITTER, 1 + JITTER))

    def _take(self, followed: Followed, found: Found) -> None:
        if isinstance(found, LookupFailed):
            followed.failed(str(found))
            return
        others = [other for other in self.sources if other is not followed]
        joined, left = followed.answered(found, self._clock())
        for address in joined:
            if not self._elsewhere(address, others):
                self.on_join(address, followed.source.text)
        for address in left:
            if not self._elsewhere(address, others):
                self.on_leave(address)

    def _elsewhere(self, address: str, others: Sequence[Followed]) -> bool:
        return address in self._listed or any(address in other.members for other in others)


def _nothing(*_: object) -> None:
    pass
