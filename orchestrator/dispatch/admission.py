"""Which training envs may open a group now, and what keeps each of the others from it.

An env may open a group while it has a server with room, is below its caps, and the group could be trained in time
(`pace`) without the queue growing beyond its bound. What the next batch cannot do without is admitted beyond pace and
bound, and only as much of it as is needed: holding it back would be holding everything back for ever. The answer is
computed from what is: what was computed before is used again only while all that it follows from is the same. Pure.
"""

from collections.abc import Callable, Collection, Mapping

from orchestrator.dispatch.ledger import Lane, Ledger
from orchestrator.dispatch.limits import TokenBucket
from orchestrator.dispatch.pace import Pace, Room
from orchestrator.dispatch.ports import EnvRules, Queue
from orchestrator.dispatch.waits import Wait, WaitKind

TOO_OLD = Wait(WaitKind.TRAINER, "the trainer (more work now would be too old when it is trained on)")


class Admission:
    """Asks every limit of every training env."""

    def __init__(
        self,
        *,
        train: Mapping[str, EnvRules],
        pace: Pace,
        ledger: Ledger,
        queue: Queue,
        bound: int,
        closed: Callable[[], Wait | None],
        held: Callable[[], Collection[str]],
        probed: Callable[[], frozenset[str]],
        now: float,
    ) -> None:
        """`bound`: what may be queued, in the unit of the batch. `closed`: why nothing may be opened.

        `held`: envs that a person has quarantined. `probed`: envs that hardly deliver, and are tried now and then.
        """
        self._train = train
        self._pace = pace
        self._ledger = ledger
        self._queue = queue
        self._bound = bound
        self._closed = closed
        self._held = held
        self._probed = probed
        self._seen: tuple[object, ...] = ()
        self._looked: tuple[Collection[str], Mapping[str, Wait | None]] = ((), {})
        self._buckets = {
            name: TokenBucket(env.rollouts_per_minute, burst=env.group_size, now=now)
            for name, env in train.items()
            if env.rollouts_per_minute is not None
        }

    def eligible(self, now: float) -> list[list[str]]:
        """Envs that may open a group, the best choices first: the next of them only where none of these has a task.

        Envs that have less under way than their share of the batches ahead come before those that have more: the room
        of a lost group goes to its own env, and a fast env does not take that of a slow one. Where the next batch needs some, those come first and alone. Beyond what pace allows, the smallest of their
        groups comes first: what is left over of it, no later batch may be able to use. Envs that are only probed are among
        others, of whose turns the mix gives them a few; by themselves they would come again and again, and nothing of it.
        """
        if self._closed() is not None or self._pace.engines_behind:
            return []
        needed, crowded = self._look()
        # Before servers and caps are asked: mostly it is the pace that keeps all envs from it.
        asked = [name for name in self._train if crowded[name] is None or name in needed]
        able = [name for name in asked if self._limit(name, now) is None]
        if not able:
            return []
        behind = self._behind(able)
        starved = [name for name in able if name in needed]
        probed = self._probed()
        if probed.issuperset(starved):
            return [starved, behind, able]
        in_time = [name for name in starved if crowded[name] is None]
        sizes = {name: self._size(name) for name in starved if name not in probed}
        smallest = [name for name in sizes if sizes[name] == min(sizes.values())]
        tiers = [[name for name in in_time if name in behind], in_time]
        if self._queue.splits:
            # Of whole groups it may be any other one that completes a batch, and there is no end to the smallest.
            tiers.append(smallest)
        return [*(tier for tier in tiers if not probed.issuperset(tier)), starved]

    def held_up(self, now: float) -> bool:
        """Whether an env could open a group, were it not for the work that is under way already."""
        if self._closed() is not None or self._pace.engines_behind:
            return False
        _, crowded = self._look()
        return any(crowded[name] is not None and self._limit(name, now) is None for name in self._train)

    def waits(self, now: float) -> list[Wait]:
        """What keeps training envs from opening a group, one entry for each reason."""
        closed = self._closed()
        if closed is not None:
            return [closed]
        if self._pace.engines_behind:
            return [Wait(WaitKind.WEIGHTS, "the inference servers to load the newest version")]
        found: dict[Wait, list[str]] = {}
        _, crowded = self._look()
        for name in self._train:
            wait = self._limit(name, now) or crowded[name]
            if wait is not None:
                found.setdefault(wait, []).append(name)
        return [wait.of(names, all_of=len(names) == len(self._train)) for wait, names in found.items()]

    def opened(self, env: str, now: float) -> None:
        """A group of an env was opened."""
        if env in self._buckets:
            self._buckets[env].take(self._train[env].group_size, now)

    def next_event_at(self, now: float) -> float | None:
        """When a rate lets an env go on."""
        times = [bucket.ready_at(self._train[name].group_size, now) for name, bucket in self._buckets.items()]
        return min((time for time in times if time > now), default=None)

    def under_cap(self, env: str, count: int) -> bool:
        """Whether `count` more rollouts stay within the env's cap; a group larger than it runs alone."""
        cap = self._train[env].max_inflight
        inflight = self._ledger.inflight[Lane.TRAIN, env]
        return cap is None or inflight + count <= cap or inflight == 0

    def _limit(self, name: str, now: float) -> Wait | None:
        """What the env itself has not: permission, a server, room, slots under its cap, its rate."""
        if name in self._held():
            return Wait(WaitKind.QUARANTINE, "the end of its quarantine by hand")
        rules = self._train[name]
        port = rules.port
        count = rules.group_size if port.group_scored else 1
        if not port.has_room(count):
            if not port.available:
                return Wait(WaitKind.SERVER, "a ready server")
            return Wait(WaitKind.ROOM, "room on its servers")
        if not self.under_cap(name, count):
            return Wait(WaitKind.CAP, f"its cap of {rules.max_inflight} in flight")
        bucket = self._buckets.get(name)
        if bucket is not None and (ready := bucket.ready_at(rules.group_size, now)) > now:
            return Wait(WaitKind.RATE, f"its rate of {rules.rollouts_per_minute:g} a minute", until=ready)
        return None

    def _look(self) -> tuple[Collection[str], Mapping[str, Wait | None]]:
        """What the next batch needs, and for which envs the work ahead of a new group is too much: for the trainer's pace, or for
        the queue. The same as the last time as long as nothing has changed that it follows from."""
        probed = self._probed()
        seen = self._pace.outlook, self._queue.revision, probed
        if seen != self._seen:
            # A probe hardly ever fills a place in the batch: whoever counts on it starts nothing else, time after time.
            coming = {name: size for name, size in self._pace.coming.items() if name not in probed}
            self._seen, self._looked = seen, (self._queue.needed(coming), self._crowded())
        return self._looked

    def _behind(self, able: list[str]) -> list[str]:
        """Those of them that have not used up their share of the room; all where room is not what is scarce.

        An env that is only probed has no share, and gets its probes in turns of the others.
        """
        batches = self._pace.shared_out
        probed = self._probed()
        behind = (
            self._queue.behind([name for name in able if name not in probed], self._pace.coming, batches)
            if batches is not None
            else None
        )
        if behind is None:
            return able
        found = [name for name in able if name in behind or name in probed]
        return able if probed.issuperset(found) else found

    def _crowded(self) -> dict[str, Wait | None]:
        room = self._pace.room(self._queue.queued_by_version(), self._queue.minimums(), self._queue.reserved)
        full = sum(self._queue.queued().values()) >= self._bound
        queue = Wait(WaitKind.QUEUE, "the trainer (the queue is full, batch.max_buffered)") if full else None
        return {name: queue if self._fits(name, room) else TOO_OLD for name in self._train}

    def _fits(self, name: str, room: Room) -> bool:
        """Whether there is room for a group of an env: for as much as it may have, where there ever is room for that."""
        expected, size = self._queue.expected(name), self._size(name)
        return room.admits(name, expected) or (
            size < expected and room.admits(name, size) and not room.could_admit(name, expected)
        )

    def _size(self, name: str) -> int:
        """What a group of an env is taken to add. One at a time counts as little as may be while nothing is known of the env:
        as large as is guessed it might never fit, and then nothing would ever be known."""
        return self._queue.expected(name) if self._pace.coming.get(name) else self._queue.portion(name)
