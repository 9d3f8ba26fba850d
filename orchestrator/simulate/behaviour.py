"""How environments, engines and trainer behave in a simulation: stated in a file, recorded in a run, or assumed.

Every value has an origin, which is said with the result: nothing is assumed in silence. Layers lie on top of each other: what
is assumed at the bottom, then a recording, then the behaviour file, then flags. `parse_behaviour` takes the file's tables,
docs/simulate.md shows them. Pure.
"""

import difflib
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.simulate.distributions import (
    Distribution,
    drawn,
    fixed,
    log_normal,
    parse_distribution,
    parse_number,
)

Member = tuple[float, list[int]]
"""Reward of a rollout, and the tokens of each of its sequences."""

Members = Sequence[tuple[float, int]]
"""Reward and tokens of each rollout of a recorded group."""

TINY_S = 1e-6
"""A rollout takes time."""

ASSUMED = {
    "latency_s": log_normal(1.0, 1.0),
    "alike": 0.0,
    "failure": 0.0,
    "failure_s": None,
    "retryable": 1.0,
    "tokens": log_normal(500, 0.5),
    "sequences": fixed(1),
    "reward": drawn([0.0, 1.0], [1, 1]),
    "equal_rewards": 0.0,
    "tasks": None,
    "group_scored": False,
}
"""Of an env about which nothing is known."""

_LEAST = {"latency_s": TINY_S, "failure_s": TINY_S, "tokens": 1, "sequences": 1, "reward": -math.inf}
_SHARES = ("alike", "failure", "retryable", "equal_rewards")


@dataclass(slots=True)
class EnvBehaviour:
    """How an env's rollouts go.

    `latency_s` is what an attempt takes that brings a rollout, beside its sampling where engines have a speed; a share `alike` of a
    group's rollouts takes as long as each other. `failure` is the share of attempts that fail, after
    `failure_s`, and `retryable` the share of those that are asked again. `tokens` are those of a sequence, `sequences` those of a
    rollout. In a share `equal_rewards` of the groups all rewards are equal. `groups` are recorded ones, from which whole groups
    are drawn. `beyond` is the share of attempts that took longer than was ever seen, and that time: they end within twice as
    long. `engine_share` is the share of a recorded latency that went into sampling; None: tokens decide.
    """

    name: str
    values: dict[str, Any] = field(default_factory=lambda: dict(ASSUMED))
    origins: dict[str, str] = field(default_factory=lambda: dict.fromkeys(ASSUMED, "assumed"))
    groups: Sequence[Members] = ()
    beyond: tuple[float, float] = (0.0, 0.0)
    engine_share: float | None = None
    levelled: float = 0.0
    """Share of the recorded groups that are given equal rewards, because those that had them are not among them."""

    def level(self, share: float) -> None:
        """A share of all groups had equal rewards, whatever those show that are recorded."""
        shown = self.values["equal_rewards"] if self.groups else 0.0
        self.levelled = max(0.0, (share - shown) / (1 - shown)) if shown < 1 else 0.0
        self.put({"equal_rewards": max(share, shown)}, "recorded")

    def put(self, values: Mapping[str, Any], origin: str) -> None:
        """Lay something on top of what is there."""
        self.values.update(values)
        self.origins.update(dict.fromkeys(values, origin))
        if origin != "recorded":
            if "latency_s" in values:
                self.engine_share = None
                self.beyond = (0.0, 0.0)
            if values.keys() & {"reward", "tokens", "equal_rewards"}:
                self.groups = ()

    @property
    def tasks(self) -> int | None:
        return self.values["tasks"]  # type: ignore[no-any-return]  # parsed as one

    @property
    def group_scored(self) -> bool:
        return bool(self.values["group_scored"])

    def attempt(self, rng: random.Random, common: float) -> tuple[float, str]:
        """How long an attempt takes, and how it ends; see `facts.steps.ENDS`. `common`: its group's place among all times."""
        values = self.values
        if values["failure"] and rng.random() < values["failure"]:
            after = values["failure_s"] or values["latency_s"]
            return after.draw(rng), "retryable" if rng.random() < values["retryable"] else "failed"
        share, longest = self.beyond
        if share and rng.random() < share:
            return longest * (1 + rng.random()), "completed"
        alike = values["alike"] and rng.random() < values["alike"]
        return values["latency_s"].at(common if alike else rng.random()), "completed"

    def group(self, rng: random.Random, size: int) -> list[Member]:
        """The rollouts of a group."""
        values = self.values
        sequences: Distribution = values["sequences"]
        if self.groups:
            chosen = self.groups[int(rng.random() * len(self.groups))]
            members = [chosen[number % len(chosen)] for number in range(size)]
            if self.levelled and rng.random() < self.levelled:
                members = [(members[0][0], tokens) for _, tokens in members]
            return [(reward, _shared(tokens, sequences, rng)) for reward, tokens in members]
        tokens: Distribution = values["tokens"]
        reward: Distribution = values["reward"]
        equal = rng.random() < values["equal_rewards"] if values["equal_rewards"] else False
        common = reward.draw(rng)
        return [
            (
                common if equal else reward.draw(rng),
                [max(1, round(tokens.draw(rng))) for _ in range(_whole(sequences.draw(rng), rng))],
            )
            for _ in range(size)
        ]


def _whole(number: float, rng: random.Random) -> int:
    """A number of sequences; what is between two whole ones is one of them, so that the mean is right."""
    low = math.floor(number)
    return max(1, low + (rng.random() < number - low))


def _shared(tokens: int, sequences: Distribution, rng: random.Random) -> list[int]:
    """A rollout's tokens, over its sequences."""
    count = _whole(sequences.draw(rng), rng)
    return [max(1, tokens // count)] * count


@dataclass(slots=True)
class Surroundings:
    """All that a run meets. `tokens_per_s` is a table of what an engine samples at so many rollouts at once; none: sampling is
    part of the latencies. `pauses`: whether engines stand still while they load a version."""

    envs: dict[str, EnvBehaviour]
    step_s: Distribution = field(default_factory=lambda: fixed(1.0))
    publish_every: int = 1
    update_s: Distribution = field(default_factory=lambda: fixed(0.0))
    pauses: bool = False
    tokens_per_s: Sequence[tuple[float, float]] = ()
    recorded_concurrency: float = 0.0
    """Rollouts at once on an engine while recorded latencies were measured."""
    origins: dict[str, str] = field(
        default_factory=lambda: {"trainer.step_s": "assumed", "weights.update_s": "assumed"}
    )


def assumed(names: Sequence[str]) -> Surroundings:
    """What is taken where nothing is known."""
    return Surroundings({name: EnvBehaviour(name) for name in names})


def parse_behaviour(data: Mapping[str, Any], onto: Surroundings, known: Sequence[str] = ()) -> None:
    """Lay what a file states on top of what is there; ConfigError names what is wrong with it.

    The file may be for several configurations: `known` are the envs of all of them.
    """
    _known("the behaviour file", data, ("default", "env", "engines", "trainer", "weights"))
    common = _env_values("default", _table("default", data.get("default", {})))
    own = _table("env", data.get("env", {}))
    names = list(dict.fromkeys([*onto.envs, *known]))
    each = {}
    for name, table in own.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f'; did you mean "{near[0]}"?' if near else f"; there are: {', '.join(names)}"
            raise ConfigError(f'env.{name}: no env of the configuration is named "{name}"{hint}')
        each[name] = _env_values(f"env.{name}", _table(f"env.{name}", table))
    for name, env in onto.envs.items():
        env.put(common, "stated")
        env.put(each.get(name, {}), "stated")
    _parse_trainer(data, onto)
    engines = _table("engines", data.get("engines", {}))
    _known("engines", engines, ("tokens_per_s",))
    if "tokens_per_s" in engines:
        onto.tokens_per_s = _parse_speeds(engines["tokens_per_s"])


def _parse_trainer(data: Mapping[str, Any], onto: Surroundings) -> None:
    trainer, weights = (_table(name, data.get(name, {})) for name in ("trainer", "weights"))
    _known("trainer", trainer, ("step_s", "publish_every"))
    _known("weights", weights, ("update_s", "pauses"))
    if "step_s" in trainer:
        onto.step_s = parse_distribution("trainer.step_s", trainer["step_s"], least=0.0)
        onto.origins["trainer.step_s"] = "stated"
    if "publish_every" in trainer:
        onto.publish_every = _count("trainer.publish_every", trainer["publish_every"])
    if "update_s" in weights:
        onto.update_s = parse_distribution("weights.update_s", weights["update_s"], least=0.0)
        onto.origins["weights.update_s"] = "stated"
    if "pauses" in weights:
        onto.pauses = _truth("weights.pauses", weights["pauses"])


def _env_values(path: str, table: Mapping[str, Any]) -> dict[str, Any]:
    _known(path, table, tuple(ASSUMED))
    found: dict[str, Any] = {}
    for key, told in table.items():
        where = f"{path}.{key}"
        if key in _SHARES:
            found[key] = parse_number(where, told, least=0.0, most=1.0)
        elif key == "tasks":
            found[key] = _count(where, told)
        elif key == "group_scored":
            found[key] = _truth(where, told)
        else:
            found[key] = parse_distribution(where, told, least=_LEAST[key])
    return found


def _parse_speeds(told: Any) -> list[tuple[float, float]]:
    path = "engines.tokens_per_s"
    if not isinstance(told, list) or not told:
        raise ConfigError(f"{path}: pairs of rollouts at once and tokens per second are needed; got {told!r}")
    found = []
    for pair in told:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ConfigError(
                f"{path}: a pair of rollouts at once and tokens per second is needed; got {pair!r}"
            )
        found.append((parse_number(path, pair[0], least=1), parse_number(path, pair[1], least=TINY_S)))
    if [at for at, _ in found] != sorted({at for at, _ in found}):
        raise ConfigError(f"{path}: the numbers of rollouts at once must rise")
    return found


def _count(path: str, told: Any) -> int:
    number = parse_number(path, told, least=1)
    if number != int(number):
        raise ConfigError(f"{path}: a whole number is needed; got {told!r}")
    return int(number)


def _truth(path: str, told: Any) -> bool:
    if not isinstance(told, bool):
        raise ConfigError(f"{path}: true or false is needed; got {told!r}")
    return told


def _table(path: str, told: Any) -> Mapping[str, Any]:
    if not isinstance(told, Mapping):
        raise ConfigError(f"{path}: a table is needed; got {told!r}")
    return told


def _known(path: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f'did you mean "{near[0]}"?' if near else f"known here: {', '.join(known)}"
            raise ConfigError(f'{path}: unknown key "{key}"; {hint}')
