"""Whether a server that is connected is still of use: it is heard of, and it stops what it is told to stop. No I/O, no clock.

Time is counted in ticks of the link, so that a stall of our own loop counts as one.
"""

import structlog

log = structlog.get_logger()


class Pulse:
    """Told of every tick; says when the server is to be given up."""

    def __init__(self, *, env: str, server: str, interval_s: float, silence_timeout_s: float) -> None:
        self._env = env
        self._server = server
        self._interval_s = interval_s
        self._most = max(2, round(silence_timeout_s / interval_s))
        self._quiet = 0
        self._clogged = 0
        self.heard = False
        """Whether anything has come since the last tick."""

    def unclogged(self) -> None:
        """A cancelled request has stopped."""
        self._clogged = 0

    def tick(self, *, loading: bool, inflight: int, abandoned: int, capacity: int) -> str:
        """Why the server is given up; empty while it is not.

        `loading`: it may block, because readiness has a deadline of its own. `abandoned`: what of `inflight` was cancelled and
        has not stopped. A server whose room is taken by nothing else pongs, and would never run anything again.
        """
        clogged = abandoned == inflight and 2 * abandoned >= capacity > 0
        self._clogged = self._clogged + 1 if clogged else 0
        if self._clogged >= self._most:
            return f"it has not stopped {abandoned} cancelled rollouts, which take its room"
        if self.heard or loading:
            self.heard = False
            self._quiet = 0
            return ""
        self._quiet += 1
        quiet_s = self._quiet * self._interval_s
        if self._quiet == 2:
            log.warning(
                "env.frozen",
                env=self._env,
                server=self._server,
                quiet_s=quiet_s,
                inflight=inflight,
                remedy="blocking code in the environment? the server's own log has its stack",
            )
        return f"nothing heard for {quiet_s:g} s" if self._quiet >= self._most else ""
