"""What decides which tasks come: the seed, and of every env its class, split, number of tasks and curriculum.

A position of an env's stream stands for a task only as long as these stay the same, so the journal notes them and a
later process holds its own against them. `differences` are what a run must not go on with, `notices` what people should
know: another curriculum only chooses otherwise from now on. Both are pure and speak in sentences.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from orchestrator.errors import JournalError

_ENV = "env:"
"""How the key of an env's row in `meta` begins."""


@dataclass(frozen=True, slots=True)
class EnvIdentity:
    """Which tasks an env has. `num_tasks` is None if they have no end; `args` is a digest, see `digest_of`.

    `samples` has the digests of a few tasks, by index, `curriculum` how tasks are chosen; journals of earlier schemas have
    neither.
    """

    id: str
    split: str
    num_tasks: int | None
    args: str
    samples: Mapping[str, int] = field(default_factory=dict)
    curriculum: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """Which tasks a run has, in which order; `seed` is None where none was noted yet."""

    seed: int | None = None
    envs: Mapping[str, EnvIdentity] = field(default_factory=dict)


def digest_of(args: Mapping[str, Any]) -> str:
    """A short name for the arguments of an env, the same in every process."""
    text = json.dumps(args, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def differences(before: RunIdentity, now: RunIdentity) -> list[str]:
    """What changes the tasks that recorded positions stand for; what was not noted before is no difference."""
    found = []
    if before.seed is not None and before.seed != now.seed:
        found.append(f"the seed was {before.seed} and is {now.seed}: tasks come in another order")
    for name, new in now.envs.items():
        old = before.envs.get(name)
        if old is None:
            continue
        if old.id != new.id:
            found.append(f'env "{name}": the id was "{old.id}" and is "{new.id}"')
        if old.split != new.split:
            found.append(f'env "{name}": the split was "{old.split}" and is "{new.split}"')
        if old.num_tasks != new.num_tasks:
            found.append(f'env "{name}": it had {_count(old.num_tasks)} and has {_count(new.num_tasks)}')
    return found


def notices(before: RunIdentity, now: RunIdentity) -> list[str]:
    """What is worth knowing and does not keep a run from going on."""
    if not before.envs:
        return []
    found = [
        f'env "{name}" is new and starts at its first task' for name in now.envs if name not in before.envs
    ]
    found += [
        f'env "{name}" was removed; its place is kept, should it come back'
        for name in before.envs
        if name not in now.envs
    ]
    found += [
        f'env "{name}": its args have changed; its tasks may be others'
        for name, new in now.envs.items()
        if name in before.envs and before.envs[name].args != new.args
    ]
    found += [
        f'env "{name}": its curriculum was {_told(before.envs[name])} and is {_told(new)}; tasks that are open stay, '
        "the next ones are chosen anew"
        for name, new in now.envs.items()
        if name in before.envs and _told(before.envs[name]) != _told(new)
    ]
    return found


def changed_tasks(before: RunIdentity, now: RunIdentity) -> list[tuple[str, int]]:
    """Envs whose data has changed, each with the first task that is another one than before."""
    found = []
    for name, new in now.envs.items():
        old = before.envs[name].samples if name in before.envs else {}
        changed = [
            int(index) for index in old.keys() & new.samples.keys() if old[index] != new.samples[index]
        ]
        if changed:
            found.append((name, min(changed)))
    return found


def identity_to_meta(identity: RunIdentity) -> dict[str, str]:
    """As rows of the journal's table `meta`."""
    rows = {} if identity.seed is None else {"seed": str(identity.seed)}
    rows.update(
        (f"{_ENV}{name}", json.dumps(asdict(env), sort_keys=True)) for name, env in identity.envs.items()
    )
    return rows


def identity_from_meta(meta: Mapping[str, str]) -> RunIdentity:
    """What `identity_to_meta` made; raises JournalError when it is damaged."""
    try:
        seed = int(meta["seed"]) if "seed" in meta else None
        envs = {
            key.removeprefix(_ENV): EnvIdentity(**json.loads(value))
            for key, value in meta.items()
            if key.startswith(_ENV)
        }
    except (ValueError, TypeError) as error:
        raise JournalError(
            f"what the journal notes about its envs cannot be read: {error}; start over with --fresh"
        ) from error
    return RunIdentity(seed, envs)


def _count(num_tasks: int | None) -> str:
    return "tasks without end" if num_tasks is None else f"{num_tasks} tasks"


def _told(env: EnvIdentity) -> str:
    """A curriculum in words; under the order without one nothing else matters."""
    chosen = dict(env.curriculum)
    strategy = chosen.pop("strategy", "uniform")
    return strategy if strategy == "uniform" else f"{strategy} {json.dumps(chosen, sort_keys=True)}"
