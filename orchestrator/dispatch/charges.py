"""What a failed attempt costs its rollout, decided here: one of its attempts, or nothing.

A server that stops and an engine that goes away say nothing about the rollout that was there, so it is asked again for
nothing: a rolling update must not use up anybody's attempts. Nothing is free for ever: a rollout under which that
happens again and again may be what makes it happen, and is charged from then on. (What a server's sudden death costs is
for `suspects` to say, which finds the one that killed it.) Pure.
"""

from orchestrator.dispatch.work import Attempt

ENDPOINT_LOST = "endpoint_lost"
"""The kind of failure of what ran on an inference server that is out of service."""

FREE = frozenset(
    {
        "server_stopping",  # an env server that was told to end cancels what it has
        "not_accepted",  # and takes nothing new, like one that is loading or full
        ENDPOINT_LOST,
        "connection",  # the engine could not be reached, before anybody knew that it is gone
    }
)
"""Kinds of failure that are not charged to the rollout."""

MOST_FREE = 8
"""Retries of one rollout that are not charged. With the pauses between them they last for minutes: longer than a
network is usually gone, and than it takes to replace the servers of an environment one by one."""


def next_attempt(attempt: Attempt, kind: str, *, max_attempts: int) -> Attempt | None:
    """The attempt that takes the place of one which failed in a way that may pass; None when none is left."""
    free = kind in FREE and attempt.free < MOST_FREE
    if not free and attempt.number >= max_attempts:
        return None
    return Attempt(
        group=attempt.group,
        count=attempt.count,
        number=attempt.number + (not free),
        free=attempt.free + free,
    )
