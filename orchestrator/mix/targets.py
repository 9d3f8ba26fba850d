"""From what the configuration says about each env to the targets of the mix.

Shares come from the ratios if every env has one, else from the numbers of tasks. Where targets are given by domain, each
domain's share is divided among its envs in that way. Then each env whose minimum share of a batch is above its share is
raised to it, and the others keep their proportions in what is left.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from orchestrator.mix.strategy import MixError, normalised


@dataclass(frozen=True, slots=True)
class EnvShare:
    """What decides an env's target. `num_tasks` is None for an env that generates tasks without end.

    `group_size` matters for minimums: an env with groups of 4 gives 8 where 7 sequences are its minimum.
    `domain` matters where targets are given by domain.
    """

    name: str
    ratio: float | None = None
    num_tasks: int | None = None
    min_batch_allocation: float | Fraction = 0.0
    group_size: int = 1
    domain: str = ""


def mix_targets(
    envs: Sequence[EnvShare], *, batch_size: int | None = None, domains: Mapping[str, float] | None = None
) -> list[float]:
    """The targets, in the order of the envs, summing to 1; MixError where the configuration gives none.

    With `domains`, a target for each, an env's ratio (or number of tasks) counts within its domain alone.
    With a batch size, a minimum counts as the whole number of sequences that it demands of every batch, and as the
    whole groups that these are where all of them fit: what is delivered beyond a target would only wait and grow old.
    """
    names = [env.name for env in envs]
    shares = _shares_by_domain(envs, domains) if domains else normalised(names, _weights(envs))
    minimums = [_minimum(env, batch_size) for env in envs]
    for env, share, minimum in zip(envs, shares, minimums, strict=True):
        if minimum > 0 and share == 0:
            raise MixError(
                f'env "{env.name}": min_batch_allocation is {env.min_batch_allocation} but its ratio is 0, '
                "so that it is never picked; give it a ratio or drop the minimum"
            )
    if sum(minimums) >= 1:  # the batch buffer scales them down in the same way
        left_out = [
            env.name for env, minimum in zip(envs, minimums, strict=True) if not minimum and env.ratio != 0
        ]
        if left_out:
            raise MixError(
                f"the minimums fill the whole batch and leave nothing for {', '.join(left_out)}; "
                "lower min_batch_allocation or set the ratio of those envs to 0"
            )
        return list(normalised(names, minimums))
    whole = [_whole_groups(env, minimum, batch_size) for env, minimum in zip(envs, minimums, strict=True)]
    return _raised(shares, whole if sum(whole) < 1 else minimums)


def _shares_by_domain(envs: Sequence[EnvShare], domains: Mapping[str, float]) -> list[float]:
    """Each domain's share, divided among its envs; an env that is alone in its domain has all of it."""
    members: dict[str, list[EnvShare]] = {}
    for env in envs:
        members.setdefault(env.domain, []).append(env)
    for domain, inside in members.items():
        if domain not in domains:
            raise MixError(f'env "{inside[0].name}": its domain "{domain}" has no target in [mix.domains]')
    found: dict[str, float] = {}
    whole = normalised(list(members), [domains[domain] for domain in members])
    for (domain, inside), share in zip(members.items(), whole, strict=True):
        try:
            parts = normalised([env.name for env in inside], _weights(inside))
        except MixError as error:
            raise MixError(f'domain "{domain}": {error}') from None
        found |= {env.name: share * part for env, part in zip(inside, parts, strict=True)}
    return [found[env.name] for env in envs]


def _whole_groups(env: EnvShare, minimum: float, batch_size: int | None) -> float:
    if batch_size is None:
        return minimum
    groups = math.ceil(round(minimum * batch_size) / env.group_size)
    return groups * env.group_size / batch_size


def _raised(shares: Sequence[float], minimums: Sequence[float]) -> list[float]:
    """Shares of at least the minimums; raising some lowers the others, which may need raising in turn."""
    held: set[int] = set()
    while True:
        free = 1.0 - sum(minimums[index] for index in held)
        rest = sum(share for index, share in enumerate(shares) if index not in held)
        targets = [
            minimums[index] if index in held else share * free / rest for index, share in enumerate(shares)
        ]
        short = {index for index, target in enumerate(targets) if target < minimums[index]} - held
        if not short:
            return targets
        held |= short


def _weights(envs: Sequence[EnvShare]) -> list[float]:
    with_ratio = [env for env in envs if env.ratio is not None]
    if with_ratio and len(with_ratio) < len(envs):
        without = ", ".join(f'"{env.name}"' for env in envs if env.ratio is None)
        raise MixError(
            f"all train envs set a ratio or none does, but {without} has none; "
            "give every env a ratio, or remove them all to weight by number of tasks"
        )
    weights = []
    for env in envs:
        if env.ratio is not None:
            weights.append(env.ratio)
        elif env.num_tasks is None and len(envs) == 1:
            weights.append(1.0)
        elif env.num_tasks is None:
            raise MixError(
                f'env "{env.name}": it generates tasks without end, so its weight cannot come from their number; '
                "give every train env a ratio"
            )
        elif env.num_tasks < 1:
            raise MixError(f'env "{env.name}": it has no tasks in this split')
        else:
            weights.append(float(env.num_tasks))
    return weights


def _minimum(env: EnvShare, batch_size: int | None) -> float:
    minimum = env.min_batch_allocation
    if not 0 <= minimum <= 1:
        raise MixError(f'env "{env.name}": min_batch_allocation {minimum} is not between 0 and 1')
    if batch_size is None:
        return float(minimum)
    # Through its decimal notation, so that 0.29 of 100 is 29 and not 30.
    return math.ceil(Fraction(str(minimum)) * batch_size) / batch_size
