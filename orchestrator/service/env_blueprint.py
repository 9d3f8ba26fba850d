"""From the sections of environments to `TrainEnvs` and `EvalEnvs`: ids, domains, sampling, keys, limits of servers."""

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from envs.adapters.concatenated import join
from envs.adapters.domains import Domain, Routed, route
from envs.builtin import BUILTIN
from envs.curve import KeyFileError, read_client_keys
from envs.errors import EnvironmentLoadError
from envs.importing import nearest
from envs.loader import LOADERS, parse_id
from orchestrator.config import Config
from orchestrator.config.env_sections import EnvSection, EvalEnvSection, TrainEnvSection
from orchestrator.discovery import Source, is_source, parse_source
from orchestrator.discovery.source import SERVERS
from orchestrator.env_servers.env import (
    EnvSpec,
    EvalEnv,
    EvalEnvs,
    EvalSettings,
    RestartPolicy,
    TrainEnv,
    TrainEnvs,
    TrainSettings,
)
from orchestrator.env_servers.on_ray.cluster import RayCluster
from orchestrator.env_servers.templates import Templates
from orchestrator.errors import ConfigError
from orchestrator.inference import (
    NEUTRAL,
)
from orchestrator.service.secrets import own_secrets

_PING_INTERVAL_S = 1.0
_LEASE_S = 15.0
_SHORTEST_LEASE_S = 3 * _PING_INTERVAL_S
"""A late ping or two must not end it."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where servers run, shared by the environments of a run; nothing is started before one of them needs it."""

    cluster: RayCluster
    templates: Templates


def verify_env(config: Config, section: EnvSection, *, train: bool) -> None:
    """Everything about an env that can be known here: its id, its keys, its interpreter."""
    _env_spec(config, section, name=section.label, train=train, sampling={}, places=None)
    if section.launcher == "ray" and find_spec("ray") is None:
        raise ConfigError(
            f'env "{section.label}": launcher = "ray" needs Ray, which is not installed for {sys.executable}; '
            "run: pip install 'rollout-orchestrator[ray]'"
        )
    if section.addresses or section.launcher == "ray":
        return  # what is installed there is not known here
    if section.python is not None and shutil.which(section.python) is None:
        raise ConfigError(
            f'env "{section.label}": python = "{section.python}" is not an interpreter; give the path of one that is there'
        )
    for text in section.ids:
        identity = parse_id(text)
        if identity.loader == "builtin" and identity.name not in BUILTIN:
            hint = nearest(identity.name, BUILTIN)
            raise ConfigError(
                f'env "{section.label}": there is no built-in environment "{identity.name}"; {hint}'
            )


def _env_spec(
    config: Config,
    section: EnvSection,
    *,
    name: str,
    train: bool,
    sampling: dict[str, object],
    places: Places | None,
) -> EnvSpec:
    places = places or build_places(config)
    routed, split = _routed(config, section, name)
    keys = None
    if section.server_key_file is not None:
        if section.secret_key_file is None:
            raise ConfigError(f'env "{name}": server_key_file needs secret_key_file, the key of this side')
        try:
            keys = read_client_keys(server_key=section.server_key_file, client_key=section.secret_key_file)
        except KeyFileError as error:
            raise ConfigError(f'env "{name}": {error}') from None
    return EnvSpec(
        name=name,
        id=routed.id,
        split=split or ("train" if train else "eval"),
        train=train,
        args=routed.args,
        model=config.model.name,
        sampling=merged(sampling, section.sampling),
        system_prompt=section.system_prompt if section.system_prompt is not None else routed.system_prompt,
        api_key_env=config.inference.api_key_env,
        python=section.python,
        module_dirs=() if config.directory is None else (config.directory,),
        report=None,
        workers=section.workers,
        addresses=tuple(address for address in section.addresses if not is_source(address)),
        sources=sources_of(config, section.addresses, SERVERS),
        ray=places.cluster if section.launcher == "ray" else None,
        templates=places.templates,
        resources=section.resources,
        capacity=section.capacity,
        seed=config.seed,
        ready_timeout_s=section.ready_timeout_s,
        silence_timeout_s=section.silence_timeout_s,
        reconnect_timeout_s=section.reconnect_timeout_s,
        ping_interval_s=_PING_INTERVAL_S,
        # A server has given up on us no later than we on it: what it runs is asked again elsewhere by then.
        lease_s=min(_LEASE_S, max(_SHORTEST_LEASE_S, section.silence_timeout_s)),
        restart=RestartPolicy(
            max_restarts=section.max_restarts,
            window_s=section.restart_window_s,
            first_delay_s=0.1,
            max_delay_s=30.0,
        ),
        keys=keys,
        insecure=section.insecure,
        withheld=own_secrets(config),
        log_dir=config.run_dir / "logs",
        log_level=config.log.level,
        log_format="json",
    )


def sources_of(config: Config, entries: Sequence[str], scheme: str) -> tuple[Source, ...]:
    """The sources among the entries; their files are looked for where modules are, in the working directory first."""
    beside = [] if config.directory is None else [config.directory]
    return tuple(parse_source(entry, scheme, [Path.cwd(), *beside]) for entry in entries if is_source(entry))


def _routed(config: Config, section: EnvSection, name: str) -> tuple[Routed, str | None]:
    """What a server loads in place of the section's id or ids, and the split that a single id names."""
    domains = {
        domain: Domain(table.rollout, table.dataset, table.system_prompt)
        for domain, table in config.domains.items()
    }
    try:
        parts = [
            route(text, section.args, domains=domains, loaders=LOADERS)
            or Routed(text, dict(section.args), None)
            for text in section.ids
        ]
        if isinstance(section.id, str):
            return parts[0], parse_id(section.id).split
        joined, args = join(section.ids, [(part.id, part.args) for part in parts])
    except EnvironmentLoadError as error:
        raise ConfigError(f'env "{name}": {error}') from None
    prompts = {part.system_prompt for part in parts}
    if len(prompts) > 1 and section.system_prompt is None:
        raise ConfigError(f'env "{name}": its ids have different system prompts; set its own system_prompt')
    return Routed(joined, args, parts[0].system_prompt), None


def merged(shared: Mapping[str, object], own: Mapping[str, object]) -> dict[str, object]:
    """The shared settings with an env's own on top; a table is merged into the one of the same name."""
    result = dict(shared)
    for key, value in own.items():
        below = result.get(key)
        result[key] = (
            merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
        )
    return result


def train_sampling(config: Config) -> dict[str, object]:
    """What all training envs are sampled with; engines would fill in what is missing as the model's folder says."""
    return {**(NEUTRAL if config.train.neutral_sampling else {}), **config.train.sampling}


def build_places(config: Config) -> Places:
    """The way to the Ray cluster, and what servers of this machine are forked from."""
    cluster = RayCluster(
        address=config.ray.address,
        runtime_env=config.ray.runtime_env,
        withheld=own_secrets(config),
        log_dir=config.run_dir / "logs",
    )
    return Places(cluster, Templates())


def build_envs(config: Config) -> tuple[TrainEnvs, EvalEnvs]:
    """All environments of a run, not started."""
    places = build_places(config)
    return build_train_envs(config, places), build_eval_envs(config, places)


def build_train_envs(config: Config, places: Places | None = None) -> TrainEnvs:
    """The training environments, not started; on a cluster of their own where they share none."""
    places = places or build_places(config)
    return TrainEnvs([build_train_env(config, section, places) for section in config.train.env])


def build_train_env(config: Config, section: TrainEnvSection, places: Places | None = None) -> TrainEnv:
    """One of them."""
    spec = _env_spec(
        config,
        section,
        name=section.label,
        train=True,
        sampling=train_sampling(config),
        places=places,
    )
    group_size = section.group_size or config.train.group_size
    settings = TrainSettings(
        ratio=section.ratio,
        group_size=group_size,
        min_batch_allocation=section.min_batch_allocation,
        max_inflight=section.max_inflight,
        rollouts_per_minute=section.rollouts_per_minute,
    )
    # A server must have room for a whole group, or a group-scored env could never run.
    return TrainEnv(replace(spec, capacity=max(spec.capacity, group_size)), settings)


def build_eval_envs(config: Config, places: Places | None = None) -> EvalEnvs:
    """The evaluation environments, not started; their names are apart from the training ones'."""
    places = places or build_places(config)
    return EvalEnvs([build_eval_env(config, section, places) for section in config.eval.env])


def build_eval_env(config: Config, section: EvalEnvSection, places: Places | None = None) -> EvalEnv:
    """One of them."""
    spec = _env_spec(
        config,
        section,
        name=f"eval-{section.label}",
        train=False,
        sampling=dict(config.eval.sampling),
        places=places,
    )
    repeats = section.rollouts_per_example or config.eval.rollouts_per_example
    settings = EvalSettings(
        num_examples=section.num_examples or config.eval.num_examples,
        rollouts_per_example=repeats,
        interval=section.interval or config.eval.interval,
    )
    return EvalEnv(replace(spec, capacity=max(spec.capacity, repeats)), settings)
