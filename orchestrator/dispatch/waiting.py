"""What waits to be started: attempts of open groups and, after a server's death, its suspects, by lane and env. Pure.

Only envs for which something waits are looked at, however many there are.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator

from orchestrator.dispatch.flight import Key
from orchestrator.dispatch.ledger import Lane
from orchestrator.dispatch.suspects import Suspects
from orchestrator.dispatch.work import Attempt


class Waiting:
    """A line of attempts for each env; envs come in the order in which they are named."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys = list(keys)
        self._places = {key: place for place, key in enumerate(self._keys)}
        self._lines: dict[Key, deque[Attempt]] = {key: deque() for key in self._keys}
        self.suspects = {key: Suspects() for key in self._keys}
        """What is asked again after a server died under it."""
        self._some: list[int] = []
        """Places of the envs for which something waits, ascending; of those too for which nothing does any more."""

    def add(self, key: Key, attempts: Iterable[Attempt]) -> None:
        """Attempts go to the end of the line."""
        self._note(key)
        self._lines[key].extend(attempts)

    def add_first(self, key: Key, attempt: Attempt) -> None:
        """An attempt that has waited before goes to the front."""
        self._note(key)
        self._lines[key].appendleft(attempt)

    def add_suspect(self, key: Key, attempt: Attempt) -> None:
        """An attempt that takes the place of one whose server died."""
        self._note(key)
        self.suspects[key].add(attempt)

    def started(self, key: Key, attempt: Attempt) -> None:
        """One that `firsts` named is in flight on its server."""
        if attempt.suspect:
            self.suspects[key].started(attempt)
        else:
            self._lines[key].popleft()

    def suspected(self) -> list[str]:
        """Envs whose suspects wait."""
        return list(dict.fromkeys(env for (_, env), suspects in self.suspects.items() if suspects.waiting))

    def without(self, lane: Lane, envs: Iterable[str]) -> list[str]:
        """Those envs of which no attempt waits but suspects."""
        lines = self._lines
        return [env for env in envs if not lines[lane, env]]

    def firsts(self) -> Iterator[tuple[Key, Attempt]]:
        """Of every env the attempt that is next in its line, and the suspect that may be asked again."""
        at = 0
        while at < len(self._some):
            key = self._keys[self._some[at]]
            line, suspects = self._lines[key], self.suspects[key]
            while line and line[0].group.closed:
                line.popleft()
            if line:
                yield key, line[0]
            if suspects.waiting and (suspect := suspects.next()) is not None:
                yield key, suspect
            if line or suspects.waiting:
                at += 1
            else:
                del self._some[at]

    def _note(self, key: Key) -> None:
        """Something waits for an env from now on."""
        place = self._places[key]
        at = bisect_left(self._some, place)
        if at == len(self._some) or self._some[at] != place:
            self._some.insert(at, place)
