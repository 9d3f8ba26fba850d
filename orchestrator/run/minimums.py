"""Which minimums hold now.

The minimum of an env that has no server, or that is quarantined because it yields nothing, is waived, unless the
configuration says to wait for it; that of an env that a person has quarantined always is. It holds again when the env
can deliver and, under pace, as soon as what is under way leaves room for it: a minimum that came back at once would
push finished groups of other envs out of their last batch. Every change is logged, counted and shown in the status. Pure.
"""

import structlog

from orchestrator.run.parts import Parts
from orchestrator.run.settings import RunSettings

log = structlog.get_logger()


class Minimums:
    """Waives and restores."""

    def __init__(self, settings: RunSettings, parts: Parts) -> None:
        self._parts = parts
        self._waits = frozenset(env.name for env in settings.train if env.on_unmet_minimum == "wait")
        self.waived: dict[str, str] = {}
        """Envs whose minimum does not hold, and why."""
        self.times_waived = 0

    def refresh(self, available: frozenset[str]) -> None:
        """Bring every env's minimum up to date; `available` has a server."""
        parts = self._parts
        quarantined = parts.mix.quarantined
        if not self.waived and not quarantined and len(available) == len(parts.train):
            return
        for name in parts.train:
            why = "" if name in available else "it has no ready server"
            if not why and name in quarantined:
                why = "it yields next to nothing and is quarantined"
            if name in self._waits:
                why = ""
            if name in parts.mix.held:
                why = "it is quarantined by hand"
            if why:
                parts.buffer.set_available(name, False)
                if name not in self.waived:
                    self._say(name, why)
            elif name in self.waived:
                self._try_restore(name)

    def _try_restore(self, name: str) -> None:
        buffer, pace, sink = self._parts.buffer, self._parts.pace, self._parts.sink
        # Until it holds nothing is started that would need its room: by themselves the others would use it for ever.
        buffer.set_returning(name)
        if buffer.planned.get(name, 0) and pace.mode == "pace":
            room = pace.room(sink.queued_by_version(), sink.minimums(), sink.reserved)
            if not room.holds and not pace.engines_behind:
                return
        buffer.set_available(name, True)
        del self.waived[name]
        if minimum := buffer.minimums.get(name, 0):
            log.info("minimum.restored", env=name, sequences=minimum)

    def _say(self, name: str, why: str) -> None:
        self.waived[name] = why
        minimum = self._parts.buffer.configured_minimums.get(name, 0)
        if minimum:
            self.times_waived += 1
            log.warning("minimum.waived", env=name, sequences=minimum, why=why)
