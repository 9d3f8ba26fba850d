"""The batch buffer: finished groups wait here until an exact batch can be made of them.

A batch is emitted if and only if some set of whole queued groups sums to exactly the batch size and meets
every minimum, and of those the oldest, unless it is told to follow targets: walking the queue from its front, a group is in
the batch whenever an exact batch with it and those already chosen exists. Every group that is added leaves exactly once, taken or
evicted. Cost does not grow with the queue. A call that raises leaves everything as it was.

It knows an environment's name, a size and a version of what it holds, and nothing of rollouts. It has no
clock and never waits. It does not refuse what is finished: how much is started is somebody else's decision.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from typing import Generic, Literal, TypeVar

from orchestrator.buffer.completing import can_complete, completing
from orchestrator.buffer.even import EvenRule
from orchestrator.buffer.options import check_options, whole
from orchestrator.buffer.queue import Entry, EnvQueue, SizeQueue
from orchestrator.buffer.quotas import Quotas, minimum_counts
from orchestrator.buffer.rules import (
    ExactRule,
    ExactSelection,
    QuotaRule,
    QuotaSelection,
    Selection,
    TokenRule,
    describe_misfit,
)
from orchestrator.buffer.splitting import Cut, cut_overshoots, plan_cuts, whole_groups

T = TypeVar("T")

_PLACES = 1 << 16
"""Room between two arrivals, so that the rest of a split group keeps its place in the queue."""

_ARRIVALS = 1 << 64
"""More places than arrivals can use: ordered by version, each version has its own range."""


class BatchBuffer(Generic[T]):
    """Whole groups in, exact batches out.

    - `batch_size`: sequences of a batch, exact; with `unit="tokens"` the token budget that is never exceeded.
    - `minimums`: each env's least share of every batch, `ceil(share × batch_size)`; scaled down where they
      cannot all be kept.
    - `envs`: the only names that are accepted; any if left out.
    - `targets`: each env's share; of the batches that could be taken, the one that follows them most nearly is, instead
      of the oldest; see `even`.
    - `quotas`: each env's target; every batch follows them as nearly as whole groups allow and carries the
      difference over. An env with less queued than its quota is made up for by the others
      (`on_starved="redistribute"`) or waited for (`"wait"`).
    - `on_stuck="split"`: where a full batch is queued but no exact one for `stuck_after_s`, a group is split by
      `split(item, n)` into its first `n` sequences and the rest.
    - `order`: the front of the queue is what arrived first, or what was sampled by the oldest version.
    """

    def __init__(
        self,
        batch_size: int,
        *,
        minimums: Mapping[str, float | Fraction] | None = None,
        envs: Collection[str] | None = None,
        unit: Literal["sequences", "tokens"] = "sequences",
        targets: Mapping[str, float] | None = None,
        quotas: Mapping[str, float] | None = None,
        on_starved: Literal["redistribute", "wait"] = "redistribute",
        on_stuck: Literal["wait", "split"] = "wait",
        stuck_after_s: float = 60.0,
        split: Callable[[T, int], tuple[T, T]] | None = None,
        order: Literal["arrival", "version"] = "arrival",
    ) -> None:
        self.batch_size = whole("batch size", batch_size, least=1)
        check_options(
            unit=unit,
            on_starved=on_starved,
            on_stuck=on_stuck,
            order=order,
            stuck_after_s=stuck_after_s,
            can_split=split is not None,
            targets=targets,
            quotas=quotas,
            minimums=minimums,
            envs=envs,
        )
        self.unit = unit
        self._by_version = order == "version"
        self._split = split if on_stuck == "split" else None
        self._stuck_after_s = stuck_after_s
        self._stuck_since: float | None = None
        shares = quotas or targets
        if envs is None and shares:
            envs = shares
        self._known = None if envs is None else dict.fromkeys(envs)
        self._quotas = Quotas(shares, at_once=None if quotas else 1) if shares else None
        self._rule = self._build_rule(strict=bool(quotas), wait=on_starved == "wait")
        self._envs: dict[str, EnvQueue] = {}
        self._lanes: dict[tuple[str, int], SizeQueue] = {}
        self._ranks = 0
        self._arrivals = 0
        self._groups = 0
        self._sequences = 0
        self._versions: dict[int, int] = {}  # queued groups of each version
        self._choice: Selection | None = None  # of the queue as it is; None: not known
        self._ready: bool | None = None  # whether there is a batch; None: not known
        self._due_next: Mapping[str, int] | None = None
        self._due: dict[int, Mapping[str, float]] = {}
        self._shares: Mapping[str, float] | None = None
        self.revision = 0
        """Counts every change of what is queued, of whose minimum holds, or of who has a share."""
        for env in self._known or ():
            self._env(env)
        for env, count in minimum_counts(minimums or {}, self.batch_size).items():
            self._env(env).minimum = count
        self._note_shares(shares or {})

    def _build_rule(self, *, strict: bool, wait: bool) -> TokenRule | ExactRule | QuotaRule:
        """The rule that the options ask for; `strict`: shares are quotas."""
        if self.unit == "tokens":
            return TokenRule(self.batch_size)
        if self._quotas is None:
            return ExactRule(self.batch_size)
        if strict:
            return QuotaRule(self.batch_size, self._quotas, wait=wait)
        return EvenRule(self.batch_size, self._quotas)

    def __len__(self) -> int:
        return self._groups

    @property
    def sequences(self) -> int:
        """Sequences queued in all."""
        return self._sequences

    @property
    def tokens(self) -> int:
        """Tokens queued in all, where the batch counts tokens."""
        return sum(env.tokens for env in self._envs.values())

    def add(
        self,
        item: T,
        *,
        env: str,
        size: int,
        version: int = 0,
        tokens: int | None = None,
        rollouts: int | None = None,
    ) -> None:
        """Queue a group of `size` sequences; `tokens` is needed where the batch counts tokens.

        `rollouts`: where it is not `size`, of which targets are shares.
        """
        if type(size) is not int or size < 1:
            size = whole("group size", size, least=1)
        if type(version) is not int:
            version = whole("version", version)
        if self.unit == "tokens":
            tokens = whole("tokens", tokens, least=1)
            if tokens > self.batch_size:
                raise ValueError(f"a group of {tokens} tokens exceeds the budget of {self.batch_size}")
            lane = self._lane(env, 0)
        else:
            if size > self.batch_size:
                raise ValueError(f"a group of {size} sequences exceeds the batch of {self.batch_size}")
            lane = self._lane(env, size)
        lane.env.recent.append(size)
        if isinstance(self._rule, EvenRule) and self._rule.saw(env, size, rollouts or size):
            self._forget_dues()
        self.revision += 1
        self._arrivals += 1
        place = self._arrivals * _PLACES
        if self._by_version:
            place += version * _ARRIVALS
        self._insert(lane, (place, version, size, tokens or 0, item, lane.env))
        if self._ready is not True or self.has_quotas:
            self._ready = None  # one more group never takes a batch away, but for quotas
        self._choice = None

    def take(
        self,
        now: float | None = None,
        *,
        at_once: bool = False,
        spare: int = 0,
        least: Mapping[str, int] | None = None,
        most: Mapping[str, int] | None = None,
        fits: Callable[[Mapping[tuple[str, int], int]], bool] | None = None,
    ) -> list[T] | None:
        """The next batch in queue order, or None.

        `now` is needed to split groups after a time, `at_once` splits without waiting for it; by tokens it lets a
        batch lack up to `spare` of its budget. `least` is what the batch must have of each env's oldest groups, beyond
        the minimums; `most` what it had better not exceed. `fits` judges a batch by what it has of each env and
        version: where whole groups make none that fits, groups are split at once.
        """
        envs = list(self._envs.values())
        choice = self._choose()
        if isinstance(self._rule, TokenRule):
            short = choice is None and (not at_once or self._rule.shortage(envs, spare))
            choice = None if short else self._rule.choose(envs, least or {})
        elif choice is not None and (least or most):
            choice = self._prefer(self._rule, least or {}, most or {}, fits)
        elif choice is None and self._split is not None and now is not None:
            choice = self._choose_by_splitting(self._split, now, at_once=at_once, least=least)
        if choice is None:
            return None
        self._stuck_since = None
        return self._let_go(choice.commit())

    @property
    def split_at(self) -> float | None:
        """When a group is split if nothing else makes a batch; None while no batch is stuck."""
        if self._split is None or self._stuck_since is None:
            return None
        return self._stuck_since + self._stuck_after_s

    @property
    def splits(self) -> bool:
        """Whether groups are split where whole ones make no exact batch; by tokens none needs to be."""
        return self._split is not None or self.unit == "tokens"

    def can_take(self) -> bool:
        """Whether `take` would return a batch without splitting a group."""
        return self._ready if self._ready is not None else self._choose() is not None

    def is_stuck(self, spare: int) -> bool:
        """Whether enough is queued for a batch, of every env too, and still none can be made without `at_once`."""
        envs = list(self._envs.values())
        if isinstance(self._rule, TokenRule):
            return not self.can_take() and not self._rule.shortage(envs, spare)
        return not self.can_take() and not self._rule.shortage(envs)

    def evict_older_than(self, version: int) -> list[T]:
        """Remove the groups of versions below `version`, in queue order."""
        if not self._versions or min(self._versions) >= version:
            return []
        gone: list[Entry] = []
        for lane in self._lanes.values():
            gone += lane.filter(lambda entry: entry[1] >= version)
        gone.sort(key=lambda entry: entry[0])
        return self._let_go(gone)

    def set_available(self, env: str, available: bool) -> None:
        """The minimum of an unavailable env is waived, and its quota never waited for."""
        queue = self._env(env)
        if queue.available != available or queue.returning:
            queue.available, queue.returning = available, False
            self._changed()

    def set_returning(self, env: str) -> None:
        """An unavailable env can deliver again: from now on its minimum is `planned`, though it does not hold yet."""
        queue = self._env(env)
        if not queue.available and not queue.returning:
            queue.returning = True
            self._changed()

    def set_quotas(self, targets: Mapping[str, float]) -> None:
        """Other targets from now on, where batches follow any; what was carried over is forgotten.

        Of an env whose target is 0 no further groups are expected, whether batches follow targets or not.
        """
        if isinstance(self._rule, EvenRule):
            self._rule.retarget(targets)
            self._changed()
        elif self._quotas is not None:
            self._quotas.set_targets(targets)
            self._changed()
        self._note_shares(targets)

    def _note_shares(self, targets: Mapping[str, float]) -> None:
        for env, target in targets.items():
            queue = self._env(env)
            if queue.has_share != (target > 0):
                queue.has_share = target > 0
                self._changed()

    def explain(self) -> str:
        """In one sentence, why there is no batch now, or that there is one."""
        envs = list(self._envs.values())
        waived = [f'"{env.name}"' for env in envs if env.minimum and not env.available]
        note = f" (minimum waived for unavailable {', '.join(waived)})" if waived else ""
        if self.can_take():
            return f"a batch of {self.batch_size} {self.unit} can be taken{note}"
        return (self._rule.shortage(envs) or describe_misfit(self.batch_size, envs)) + note

    def needed(self, coming: Mapping[str, int], *, spare: int = 0) -> frozenset[str]:
        """Envs of which the next batch needs more than is queued and `coming`: to be started whatever else holds.

        While nothing is coming and no exact batch can be had, and groups are not split, it is as few envs as possible
        whose further groups, of the sizes that they had lately, would make one.
        """
        envs = list(self._envs.values())
        found = self._rule.needed(envs, coming, spare)
        mixed = len({size for env in envs for size in env.recent}) > 1
        if self._split is None and mixed and len(found) == len(envs) and any(coming.values()):
            # Of whole groups one too many is a group for nothing: first what is coming, then one at a time.
            return frozenset()
        if (
            found
            or self.unit == "tokens"
            or self._split is not None
            or any(coming.values())
            or self.can_take()
        ):
            return frozenset(found)
        # Quotas may refuse a batch that the sizes alone would make: then any further group may help.
        more = [env for env in envs if env.has_share]
        more = [env for env in more if env.available] or more
        return frozenset(completing(self.batch_size, envs) or [env.name for env in more])

    @property
    def minimums(self) -> dict[str, int]:
        """Sequences (or tokens) that every batch has at least of each env; 0 where waived."""
        return {env.name: env.required for env in self._envs.values() if env.minimum}

    @property
    def planned(self) -> Mapping[str, int | Fraction]:
        """What the next batches will have of each env at least, or those after them of one that returns: its minimum, or its quota."""
        there = {env.name for env in self._envs.values() if env.available or env.returning}
        if self._quotas is None or not self.has_quotas:
            return {name: (name in there) * count for name, count in self.configured_minimums.items()}
        shares = {env: share * self.batch_size for env, share in self._quotas.targets.items()}
        return {env: share for env, share in shares.items() if env in there}

    @property
    def has_quotas(self) -> bool:
        """Whether batches follow quotas."""
        return isinstance(self._rule, QuotaRule)

    @property
    def due_next(self) -> Mapping[str, int]:
        """What the next batch should have of each env."""
        if self._due_next is None:
            self._due_next = self._quotas.counts(self.batch_size) if self._quotas is not None else {}
        return self._due_next

    @property
    def shares(self) -> Mapping[str, float]:
        """What a batch should have of each available env by the targets, whatever it is owed; empty where batches do not follow any."""
        if not isinstance(self._rule, EvenRule):
            return {}
        if self._shares is None:
            self._shares = self._rule.shares(list(self._envs.values()))
        return self._shares

    def due(self, batches: int) -> Mapping[str, float] | None:
        """What so many batches will have of each available env by the targets; None where batches do not follow any."""
        if not isinstance(self._rule, EvenRule):
            return None
        if batches not in self._due:
            self._due[batches] = self._rule.due(list(self._envs.values()), batches)
        return self._due[batches]

    @property
    def configured_minimums(self) -> dict[str, int]:
        """The same, waived or not."""
        return {env.name: env.minimum for env in self._envs.values() if env.minimum}

    @property
    def queued_by_env(self) -> dict[str, int]:
        """Sequences queued of each env."""
        return {env.name: env.sequences for env in self._envs.values()}

    @property
    def oldest_version(self) -> int | None:
        """The oldest version that sampled anything queued."""
        return min(self._versions, default=None)

    def state_dict(self) -> dict[str, str]:
        """What is carried over to the next batch, as exact fractions; what is queued is not part of it."""
        carried = self._quotas.carried if self._quotas else {}
        return {env: str(amount) for env, amount in carried.items()}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Continue with what an earlier run carried over; envs that have no quota now are left out."""
        carried = {env: Fraction(amount) for env, amount in state.items()}
        if self._quotas is not None:
            self._quotas.carried.update({e: c for e, c in carried.items() if e in self._quotas.carried})
            self._changed()

    def _choose(self) -> Selection | None:
        if self._choice is None and self._ready is not False:
            envs = list(self._envs.values())
            self._choice = None if self._rule.shortage(envs) else self._rule.choose(envs)
            self._ready = self._choice is not None
        return self._choice

    def _prefer(
        self,
        rule: ExactRule | QuotaRule,
        least: Mapping[str, int],
        most: Mapping[str, int],
        fits: Callable[[Mapping[tuple[str, int], int]], bool] | None,
    ) -> Selection | None:
        """A batch that fits, where there is one; given that there is a batch."""
        envs = list(self._envs.values())

        def good(choice: ExactSelection | QuotaSelection | None) -> bool:
            return choice is not None and (fits is None or fits(choice.amounts()))

        choice: Selection | None = None
        if isinstance(rule, QuotaRule | EvenRule) and fits is not None and good(choice := rule.choose(envs)):
            return choice  # what must leave the queue can be of any env: the shares have the first word
        if isinstance(rule, ExactRule) and most and good(choice := rule.choose(envs, least, most)):
            return choice
        if good(choice := rule.choose(envs, least)):
            return choice
        # Of several envs a part of a group each may be too much together, where whole groups of some of them would do.
        if fits is not None and good(choice := rule.choose(envs, whole_groups(envs, least))):
            return choice
        if self._split is not None:
            choice = self._cut_in_order(rule, least, self._split)
        return choice or rule.choose(envs)

    def _choose_by_splitting(
        self,
        split: Callable[[T, int], tuple[T, T]],
        now: float,
        *,
        at_once: bool,
        least: Mapping[str, int] | None,
    ) -> Selection | None:
        """There is no exact batch: make one by splitting a group, once waiting cannot help or has lasted.

        With `least` the oldest groups are all taken whole, and the one that does not fit any more is split.
        """
        envs = list(self._envs.values())
        if self._rule.shortage(envs):
            self._stuck_since = None
            return None
        if self._stuck_since is None:
            self._stuck_since = now
        waited = now >= self._stuck_since + self._stuck_after_s  # the same sum as `split_at`, to the last bit
        if not at_once and not waited and can_complete(self.batch_size, envs):
            return None
        choice = None
        if least is not None and not isinstance(self._rule, TokenRule):
            choice = self._cut_in_order(self._rule, least, split)
        if choice is None:
            self._rule.choose(envs)  # sets what each env must and may give
            self._cut(plan_cuts(self.batch_size, envs), split)
            choice = self._choose()
        return choice

    def _cut_in_order(
        self, rule: ExactRule | QuotaRule, least: Mapping[str, int], split: Callable[[T, int], tuple[T, T]]
    ) -> Selection | None:
        """The oldest groups with the least of each env among them; what fits only in part is cut."""
        envs = list(self._envs.values())
        rule.bound(envs, least)
        self._cut(cut_overshoots(self.batch_size, envs), split)
        return rule.select(envs)

    def _cut(self, cuts: Sequence[Cut], split: Callable[[T, int], tuple[T, T]]) -> None:
        parts = [split(cut.entry[4], cut.size) for cut in cuts]
        for cut, (first, rest) in zip(cuts, parts, strict=True):
            self._replace(cut, first, rest)
        self._changed()

    def _replace(self, cut: Cut, first: T, rest: T) -> None:
        place, version, size, _, _, env = cut.entry
        cut.lane.remove({cut.lane.offset(cut.entry)})
        env.sequences -= size
        self._sequences -= size
        self._groups -= 1
        self._versions[version] -= 1
        for shift, (item, part) in enumerate(((first, cut.size), (rest, size - cut.size))):
            lane = self._lane(env.name, part)
            self._insert(lane, (place + shift, version, part, 0, item, env))

    def _insert(self, lane: SizeQueue, entry: Entry) -> None:
        lane.insert(entry)
        _, version, size, tokens, _, env = entry
        env.sequences += size
        env.tokens += tokens
        self._sequences += size
        self._groups += 1
        self._versions[version] = self._versions.get(version, 0) + 1

    def _let_go(self, entries: list[Entry]) -> list[T]:
        """Account for groups that have left their lanes."""
        items: list[T] = []
        versions = self._versions
        for _, version, size, tokens, item, env in entries:
            items.append(item)
            env.sequences -= size
            env.tokens -= tokens
            self._sequences -= size
            versions[version] -= 1
        self._groups -= len(entries)
        for version in [version for version, count in versions.items() if not count]:
            del versions[version]
        for lane in [lane for lane in self._lanes.values() if lane.head == len(lane.entries)]:
            del self._lanes[lane.env.name, lane.size]
            del lane.env.lanes[lane.size]
        self._changed()
        return items

    def _changed(self) -> None:
        self.revision += 1
        self._choice = None
        self._ready = None
        self._forget_dues()

    def _forget_dues(self) -> None:
        """They follow from the targets, from what is carried over and from who is available, and are asked for with every group."""
        self._due_next = self._shares = None
        self._due = {}

    def _env(self, name: str) -> EnvQueue:
        queue = self._envs.get(name)
        if queue is None:
            if self._known is not None and name not in self._known:
                raise ValueError(f'unknown env "{name}"; there are: {", ".join(sorted(self._known))}')
            queue = self._envs[name] = EnvQueue(name, len(self._envs))
        return queue

    def _lane(self, env: str, size: int) -> SizeQueue:
        lane = self._lanes.get((env, size))
        if lane is None:
            queue = self._env(env)
            self._ranks += 1
            lane = self._lanes[env, size] = queue.lanes[size] = SizeQueue(queue, size, self._ranks)
        return lane
