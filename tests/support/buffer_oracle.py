"""Brute force for the batch buffer: every subset of a short queue, looked at one by one.

Slow and obvious on purpose; it shares no code with what it checks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Queued:
    """One group; `id` is also the order of arrival."""

    id: int
    env: str
    size: int
    version: int = 0


def subsets(queue: Sequence[Queued], size: int) -> list[tuple[int, dict[str, int]]]:
    """Every subset (as a bit mask) that sums to exactly `size`, with its sequences by env."""
    found = []
    for mask in range(1, 1 << len(queue)):
        chosen = [group for at, group in enumerate(queue) if mask >> at & 1]
        if sum(group.size for group in chosen) == size:
            by_env: dict[str, int] = {}
            for group in chosen:
                by_env[group.env] = by_env.get(group.env, 0) + group.size
            found.append((mask, by_env))
    return found


def oldest(queue: Sequence[Queued], masks: Sequence[int]) -> list[Queued] | None:
    """Of these subsets: walk from the front and keep to those with the group, whenever there are any."""
    if not masks:
        return None
    for at in range(len(queue)):
        masks = [mask for mask in masks if mask >> at & 1] or masks
    return [group for at, group in enumerate(queue) if masks[0] >> at & 1]


def expected_batch(queue: Sequence[Queued], size: int, minimums: Mapping[str, int]) -> list[Queued] | None:
    """What the buffer must return for this queue, given in its order."""
    return oldest(
        queue,
        [
            mask
            for mask, by_env in subsets(queue, size)
            if all(by_env.get(env, 0) >= least for env, least in minimums.items())
        ],
    )


def expected_by_quota(queue: Sequence[Queued], size: int, counts: Mapping[str, int]) -> list[Queued] | None:
    """The same with quotas: the largest deviation of any env is as small as can be."""
    found = subsets(queue, size)

    def deviation(by_env: Mapping[str, int]) -> int:
        return max(abs(by_env.get(env, 0) - count) for env, count in counts.items())

    least = min((deviation(by_env) for _, by_env in found), default=0)
    return oldest(queue, [mask for mask, by_env in found if deviation(by_env) == least])


def in_order(queue: Sequence[Queued], order: str) -> list[Queued]:
    """The queue as it is walked."""
    key: Callable[[Queued], tuple[int, int]] = lambda group: (  # noqa: E731  # a sort key, used once
        group.version if order == "version" else 0,
        group.id,
    )
    return sorted(queue, key=key)
