"""Limits in time: a rate per env, and a ramp for a limit that was raised. Pure; time is an argument."""


class TokenBucket:
    """At most `per_minute` in the long run, with a burst of one second's worth (at least `burst`)."""

    def __init__(self, per_minute: float, *, burst: int, now: float) -> None:
        self._per_s = per_minute / 60
        self._size = max(self._per_s, float(burst))
        self._tokens = self._size
        self._at = now

    def ready_at(self, n: int, now: float) -> float:
        """When `n` may be taken: `now` if at once."""
        self._refill(now)
        missing = min(n, self._size) - self._tokens
        return now if missing <= 0 else now + missing / self._per_s

    def take(self, n: int, now: float) -> None:
        """Take `n`; may go below zero when `n` is larger than the bucket."""
        self._refill(now)
        self._tokens -= n

    def _refill(self, now: float) -> None:
        self._tokens = min(self._size, self._tokens + (now - self._at) * self._per_s)
        self._at = now


class Ramp:
    """Follows a limit: down at once, up over `ramp_s` seconds for the whole of it."""

    def __init__(self, *, ramp_s: float, now: float) -> None:
        self._ramp_s = ramp_s
        self._value = 0.0
        self._at = now

    def limit(self, target: int, now: float) -> int:
        """The limit in force now."""
        if self._ramp_s <= 0:
            return target
        self._value = min(float(target), self._value + (now - self._at) * target / self._ramp_s)
        self._at = now
        return max(1, int(self._value)) if target else 0

    def settled(self, target: int) -> bool:
        """Whether the limit has reached its target."""
        return self._ramp_s <= 0 or self._value >= target
