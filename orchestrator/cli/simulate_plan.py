"""What is to be simulated: which configurations, by which names, and in which surroundings each.

A configuration is told apart from the others by as little of its path as that takes. What a behaviour file and the flags say
is for every configuration that has the env; a name that none of them has is a mistake.
"""

import argparse
import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.cli.simulate_mix import pairs
from orchestrator.config import Config, load_config
from orchestrator.errors import ConfigError
from orchestrator.service.blueprint import build_curriculum_settings
from orchestrator.service.imagined import env_names, read_behaviour
from orchestrator.simulate.behaviour import Surroundings, assumed, parse_behaviour
from orchestrator.simulate.distributions import log_normal
from orchestrator.simulate.recorded import Recording, lay_recording, split_latencies
from orchestrator.simulate.sweep import parse_sweeps


@dataclass(frozen=True, slots=True)
class Planned:
    """One thing to simulate: a configuration file by its short name, what is swept, and the settings or why there are none."""

    file: str
    name: str
    """Of the point; empty where there is only one."""
    values: dict[str, str]
    config: Config | None
    refused: str = ""


def plan(args: argparse.Namespace) -> list[Planned]:
    """Everything that was asked for; a file that cannot be read is an error, a point of a sweep that is refused is kept."""
    overrides = [f"--seed={args.seed}"] if args.seed is not None else []
    paths = asked_files(args)
    points = parse_sweeps(args.sweep) if args.sweep else [{}]
    found = []
    for path, file in zip(paths, short_names(paths), strict=True):
        for point in points:
            name = " ".join(f"{key}={value}" for key, value in point.items())
            values = point
            if len(paths) > 1:
                name, values = f"{file} {name}".strip(), {"config": file, **point}
            config, refused = None, ""
            try:
                config = load_config(
                    path, [*overrides, *(f"--{key}={value}" for key, value in point.items())]
                )
            except ConfigError as error:
                if not point:
                    raise
                refused = str(error)
            found.append(Planned(file, name, values, config, refused))
    return found


def asked_files(args: argparse.Namespace) -> list[Path]:
    """CONFIG, if it was given, and those of --compare, each once."""
    paths = [*([args.config] if args.config is not None else []), *args.compare]
    return list({path.absolute(): path for path in reversed(paths)}.values())[::-1]


def short_names(paths: Sequence[Path]) -> list[str]:
    """As much of the end of each path as tells it apart from the others."""
    parts = [path.absolute().parts for path in paths]

    def short(mine: tuple[str, ...]) -> str:
        for count in range(1, len(mine)):
            if sum(other[-count:] == mine[-count:] for other in parts) == 1:
                return "/".join(mine[-count:])
        return str(Path(*mine))

    return [short(mine) for mine in parts]


def known_envs(planned: Sequence[Planned]) -> list[str]:
    """Every env of any of the configurations."""
    return list(dict.fromkeys(name for one in planned if one.config for name in env_names(one.config)))


def surroundings(
    config: Config, args: argparse.Namespace, recording: Recording | None, known: Sequence[str]
) -> tuple[Surroundings, list[str]]:
    """What is assumed, recorded, stated in the file and by flags, one on top of the other; and what to say about it.

    `known` are the envs of all configurations, of which this one may have a few.
    """
    around = assumed(env_names(config))
    notes = []
    if recording is not None:
        notes += lay_recording(copy.copy(recording), around)
    if args.behaviour is not None:
        _lay_file(args.behaviour, around, known)
    if recording is not None and around.tokens_per_s:
        split_latencies(recording, around, max(1, len(config.inference.base_urls)))
    _lay_flags(config, args, around, known)
    notes += _size_notes(config, around)
    notes += _notes(config, around)
    return around, notes


def _lay_file(path: Path, around: Surroundings, known: Sequence[str]) -> None:
    try:
        parse_behaviour(read_behaviour(path), around, known)
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if str(path) in text else f"{path}: {text}") from None


def _lay_flags(config: Config, args: argparse.Namespace, around: Surroundings, known: Sequence[str]) -> None:
    sizes = {env.label: env.group_size or config.train.group_size for env in config.train.env}
    stated: dict[str, list[dict[str, Any]]] = {name: [] for name in known}
    for name, mean in pairs(args, "latency", known).items():
        if not 0 < mean < math.inf:
            raise ConfigError(f'env "{name}": a latency of {mean} s is not a positive number')
        stated[name].append({"latency_s": log_normal(mean, args.spread)})
    for name, loss in pairs(args, "loss", known).items():
        if not 0 <= loss <= 1:
            raise ConfigError(f'env "{name}": a loss of {loss} is not between 0 and 1')
        # A group is lost with one of its rollouts.
        each = 1 - (1 - loss) ** (1 / sizes.get(name, 1))
        stated[name].append({"failure": each, "retryable": 0.0})
    for name, count in pairs(args, "tasks", known).items():
        if not 1 <= count < math.inf:
            raise ConfigError(f"--tasks {name}={count:g}: at least 1 is needed")
        stated[name].append({"tasks": int(count)})
    for name, env in around.envs.items():
        for values in stated[name]:
            env.put(values, "stated")


def _size_notes(config: Config, around: Surroundings) -> Iterator[str]:
    """Recorded groups are drawn whole; those of another size are made of them."""
    for section in config.train.env:
        env = around.envs[section.label]
        size = section.group_size or config.train.group_size
        if env.groups and len(env.groups[0]) != size:
            had = len(env.groups[0])
            made = "some rollouts of each" if size < had else "rollouts of each, some of them more than once"
            yield (
                f'env "{section.label}": groups of {had} were recorded and groups of {size} are simulated, made of {made}:'
                " the share with equal rewards is a guess"
            )


def _notes(config: Config, around: Surroundings) -> Iterator[str]:
    """What is set and does not do here what it does in a run."""
    if config.dispatch.concurrency == "adaptive":
        yield "dispatch.concurrency: simulated as fixed, at dispatch.max_inflight"
    if around.pauses and not around.tokens_per_s:
        yield (
            "weights.pauses: without effect, because engines have no speed that could pause; state engines.tokens_per_s"
        )
    chosen = {
        env.label: build_curriculum_settings(config, env).strategy
        for env in config.train.env
        if build_curriculum_settings(config, env).strategy != "uniform"
    }
    for strategy in dict.fromkeys(chosen.values()):
        names = ", ".join(name for name, its in chosen.items() if its == strategy)
        yield (
            f'curriculum "{strategy}" ({names}): it chooses tasks, but the rewards of a simulation do not depend on the task:'
            " what it saves is not in these numbers"
        )
