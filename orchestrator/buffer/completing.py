"""Which further groups would make an exact batch of a queue that holds none. Pure arithmetic.

An environment's further groups are taken to have the sizes that its groups had lately, in any number.
"""

from collections.abc import Collection, Sequence

from orchestrator.buffer.queue import EnvQueue
from orchestrator.buffer.splitting import PartOf, Piece
from orchestrator.buffer.subset_sum import Stock, completable


def can_complete(size: int, envs: Sequence[EnvQueue]) -> bool:
    """Whether further groups could make an exact batch; true also while an environment's sizes are not known."""
    more = [env for env in envs if env.available and env.has_share]
    return any(not env.recent for env in more) or _completable(size, envs, [env.name for env in more])


def completing(size: int, envs: Sequence[EnvQueue]) -> list[str]:
    """As few environments as possible whose further groups make an exact batch; all where none do.

    Those that are not available count only where the others alone cannot.
    """
    more = [env for env in envs if env.available and env.has_share]
    chosen = [env.name for env in more]
    if any(not env.recent for env in more):
        return chosen
    if not _completable(size, envs, chosen):
        # A probe of an env that hardly delivers may be all that could make a batch.
        return [env.name for env in envs if env.has_share]
    # Those that have most queued are left out first.
    for env in sorted(envs, key=lambda env: -env.sequences):
        fewer = [name for name in chosen if name != env.name]
        if _completable(size, envs, fewer):
            chosen = fewer
    return chosen


def _completable(size: int, envs: Sequence[EnvQueue], with_more: Collection[str]) -> bool:
    """Whether an exact batch exists with any number of further groups of these environments."""
    parts = []
    for env in envs:
        stock: list[Stock] = [Piece(lane.size, len(lane)) for lane in env.lanes.values()]
        if env.name in with_more:
            stock += [Piece(recent, size // recent) for recent in set(env.recent) if recent <= size]
        parts.append(PartOf(env.required, size, stock))
    return completable(size, parts)
