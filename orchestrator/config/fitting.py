"""Whether batches can be made at all: batch size, group sizes, minimums and quotas, seen together.

A token budget takes whatever fits, so that there only the targets are looked at. With `on_stuck = "split"` every batch
can be made, perhaps by splitting groups, which is worth a warning; with "wait" what can never be made is a
problem. Like all checks, these look at data that may be of the wrong type, and leave that to validation.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from orchestrator.buffer import BatchBuffer
from orchestrator.buffer.minimums import BatchMinimums, achievable_minimums, reachable_sums
from orchestrator.config.domains import raw_domain_of, raw_targets
from orchestrator.config.env_sections import TrainConfig
from orchestrator.config.sections import MOST_SEQUENCES, BatchConfig
from orchestrator.config.shapes import Problem
from orchestrator.mix.strategy import MixError
from orchestrator.mix.targets import EnvShare, mix_targets

# Quotas are only tried out below this batch size, and for a number of batches that so many groups make, so that a check ends soon.
_MOST_TRIED = 1 << 16
_BATCHES_TRIED = 24
_GROUPS_TRIED = 50_000


@dataclass(frozen=True, slots=True)
class _Env:
    name: str
    path: str
    """The setting that says how large its groups are."""
    group_size: int
    minimum: float
    ratio: float | None
    domain: str


@dataclass(frozen=True, slots=True)
class _Plan:
    """What batches are made of."""

    size: int
    by_tokens: bool
    splits: bool
    quotas: bool
    waits_for_quotas: bool
    min_valid: int | None
    envs: list[_Env]
    domains: dict[str, float]
    """Targets by domain; empty where there are none."""

    @property
    def mixed(self) -> list[list[float | None]]:
        """The ratios of envs that are weighed against each other."""
        found: dict[str, list[float | None]] = {}
        for env in self.envs:
            found.setdefault(env.domain if self.domains else "", []).append(env.ratio)
        return list(found.values())

    @property
    def sizes(self) -> dict[str, int]:
        """Group sizes of the envs that can be picked."""
        return {env.name: env.group_size for env in self.envs if env.ratio != 0}

    @property
    def shrinks(self) -> bool:
        """Whether groups may be smaller than they were asked to be."""
        return self.min_valid is not None and any(self.min_valid < env.group_size for env in self.envs)

    def listed(self) -> str:
        return ", ".join(str(size) for size in sorted(set(self.sizes.values())))


def find_misfits(data: Mapping[str, Any]) -> Iterator[Problem]:
    """What keeps every batch, or every group of some env, from ever being formed."""
    plan = _read(data)
    if plan is None:
        return
    if plan.by_tokens:
        try:
            _targets(plan)
        except MixError as error:
            yield "train.env", str(error)
        return
    if plan.size > MOST_SEQUENCES:
        yield "batch.size", f"a batch has at most {MOST_SEQUENCES} sequences, not {plan.size}"
        return
    too_large = {env.path: env.group_size for env in plan.envs if env.group_size > plan.size}
    for path, group_size in too_large.items():
        yield path, f"a group of {group_size} does not fit into a batch of {plan.size}"
    smallest = min((env.group_size for env in plan.envs), default=plan.min_valid or 1)
    if plan.min_valid is not None and plan.min_valid > smallest:
        yield "dispatch.min_valid", f"{plan.min_valid} is more than the smallest group has ({smallest})"
    if too_large or not plan.sizes:
        return
    targets = None
    try:
        targets = _targets(plan)
    except MixError as error:
        yield "train.env", str(error)
    if not plan.splits and plan.min_valid is None:
        yield from _whole_groups(plan, targets)


def _whole_groups(plan: _Plan, targets: Mapping[str, float] | None) -> Iterator[Problem]:
    """What can never work where groups are neither split nor smaller than asked."""
    sums = reachable_sums(plan.sizes, plan.size)
    if not sums >> plan.size & 1:
        yield (
            "batch.size",
            f"no number of whole groups of {plan.listed()} ever sums to {plan.size}; change batch.size or group_size",
        )
        return
    for path, group_size in {env.path: env.group_size for env in plan.envs if env.ratio != 0}.items():
        if not sums >> (plan.size - group_size) & 1:
            what = f"no batch of {plan.size} made of whole groups of {plan.listed()} has one of {group_size} in it"
            yield path, f'{what}; change batch.size or group_size, or set batch.on_stuck = "split"'
    if plan.quotas and plan.waits_for_quotas and targets is not None and not _meets_quotas(plan, targets):
        what = (
            f"whole groups of {plan.listed()} never come near enough to the quotas of a batch of {plan.size}"
        )
        remedy = 'set batch.on_starved = "redistribute" or batch.on_stuck = "split"'
        yield "batch.quotas", f"{what}; change the sizes or ratios, or {remedy}"


def _targets(plan: _Plan) -> dict[str, float] | None:
    """The mix targets, None where they depend on how many tasks there are; MixError where there are none."""
    for ratios in plan.mixed:
        if (None in ratios and any(ratio is not None for ratio in ratios)) or not any(
            ratio is None or ratio > 0 for ratio in ratios
        ):
            return None  # reported as a problem of the ratios
    if plan.domains and any(env.domain not in plan.domains for env in plan.envs):
        return None  # reported as a problem of the domains
    shares = [EnvShare(env.name, env.ratio, 1, env.minimum, env.group_size, env.domain) for env in plan.envs]
    targets = mix_targets(shares, batch_size=None if plan.by_tokens else plan.size, domains=plan.domains)
    counted = any(None in ratios and (len(ratios) > 1 or not plan.domains) for ratios in plan.mixed)
    return None if counted else dict(zip((env.name for env in plan.envs), targets, strict=True))


def _meets_quotas(plan: _Plan, targets: Mapping[str, float]) -> bool:
    """Whether batch after batch can be made where enough of every env is queued: what one owes, the next makes up for."""
    if plan.size > _MOST_TRIED:
        return True
    buffer = BatchBuffer[None](plan.size, quotas=targets, on_starved="wait")
    groups = sum(2 * plan.size // size for size in plan.sizes.values())
    for _ in range(max(1, min(_BATCHES_TRIED, _GROUPS_TRIED // groups))):
        queued = buffer.queued_by_env
        for env, size in plan.sizes.items():
            for _ in range(queued.get(env, 0), 2 * plan.size, size):
                buffer.add(None, env=env, size=size)
        if buffer.take() is None:
            return False
    return True


def find_misfit_warnings(data: Mapping[str, Any]) -> Iterator[Problem]:
    """Where a full queue can hold no exact batch of whole groups, or minimums are not kept as they were asked."""
    plan = _read(data)
    if plan is None or plan.by_tokens or not plan.sizes:
        return
    minimums = None if plan.quotas else _achievable(plan)
    if minimums is not None and minimums.lowered and not plan.splits:
        changes = ", ".join(
            f'"{env}" {count} -> {minimums.kept[env]}'
            for env, count in minimums.wanted.items()
            if minimums.kept[env] < count
        )
        yield (
            "train.env",
            f"whole groups cannot keep every minimum in a batch of {plan.size}; lowered: {changes} sequences",
        )
    reason = _why_out_of_reach(plan, minimums)
    if not reason:
        return
    if plan.splits:
        yield (
            "batch.on_stuck",
            f"an exact batch of whole groups can be out of reach ({reason}): groups will be split",
        )
    elif minimums is None or not minimums.lowered or not _always_fits(plan):
        yield "batch.on_stuck", f"a full queue can wait for a group of another size ({reason})"


def _why_out_of_reach(plan: _Plan, minimums: BatchMinimums | None) -> str:
    if plan.shrinks:
        return f"groups of {plan.listed()} may have down to {plan.min_valid} rollouts"
    if minimums is not None and not minimums.reachable:
        return f"no whole groups of {plan.listed()} sum to {plan.size}"
    if not _always_fits(plan):
        return f"groups of {plan.listed()} do not always sum to {plan.size}"
    if minimums is not None and minimums.lowered:
        needed = [
            f'"{env}" needs {-(-count // plan.sizes[env]) * plan.sizes[env]}'
            for env, count in minimums.wanted.items()
        ]
        return f"for the minimums {', '.join(needed)} of {plan.size}"
    return ""


def _always_fits(plan: _Plan) -> bool:
    """Whether any queue of a full batch holds an exact one: each size divides the next, and the last the batch."""
    chain = [*sorted(set(plan.sizes.values())), plan.size]
    return not plan.shrinks and all(larger % smaller == 0 for smaller, larger in pairwise(chain))


def _achievable(plan: _Plan) -> BatchMinimums:
    shares = {env.name: env.minimum for env in plan.envs if env.minimum and env.ratio != 0}
    return achievable_minimums(shares, plan.sizes, plan.size)


def batch_minimums(batch: BatchConfig, train: TrainConfig) -> BatchMinimums:
    """The minimums of every batch of sequences; lowered to what whole groups can give where none is split."""
    shares = {env.label: env.min_batch_allocation for env in train.env if env.min_batch_allocation}
    sizes = {env.label: env.group_size or train.group_size for env in train.env if env.ratio != 0}
    found = achievable_minimums(shares, sizes, batch.size)
    if batch.splits or batch.unit != "sequences":
        return BatchMinimums(batch.size, found.wanted, dict(found.wanted), reachable=found.reachable)
    return found


def _read(data: Mapping[str, Any]) -> _Plan | None:
    """The numbers of a batch, None where its size is not a number."""
    batch, train, dispatch = (_table(data, name) for name in ("batch", "train", "dispatch"))
    size = _whole(batch.get("size", 256))
    if size is None:
        return None
    sections = train.get("env")
    envs: list[_Env] = []
    for position, env in enumerate(sections if isinstance(sections, list) else []):
        if not isinstance(env, Mapping):
            continue
        own = env.get("group_size")
        path = f"train.env[{position}].group_size" if own is not None else "train.group_size"
        group_size = _whole(own if own is not None else train.get("group_size", 8))
        if group_size is not None:
            name = str(env.get("name") or env.get("id"))
            if any(name == other.name for other in envs):
                name = f"{name} at {position}"  # reported as a problem of the names
            envs.append(
                _Env(
                    name=name,
                    path=path,
                    group_size=group_size,
                    minimum=_number(env.get("min_batch_allocation"), most=1) or 0.0,
                    ratio=_number(env.get("ratio")),
                    domain=raw_domain_of(env, data),
                )
            )
    return _Plan(
        size=size,
        by_tokens=batch.get("unit", "sequences") != "sequences",
        splits=batch.get("on_stuck", "split") == "split",
        quotas=batch.get("quotas") is True,
        waits_for_quotas=batch.get("on_starved") == "wait",
        min_valid=_whole(dispatch.get("min_valid")),
        envs=envs,
        domains=raw_targets(data),
    )


def _table(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = data.get(name)
    return section if isinstance(section, Mapping) else {}


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else None


def _number(value: object, most: float = math.inf) -> float | None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if number and 0 <= value <= most and math.isfinite(value) else None  # type: ignore[arg-type, operator]  # narrowed above
