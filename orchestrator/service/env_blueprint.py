"""From the sections of environments to `TrainEnvs` and `EvalEnvs`: ids, domains, sampling, keys, limits of servers."""

import shutil
from collections.abc import Mapping
from dataclasses import replace

from envs.adapters.concatenated import join
from envs.adapters.domains import Domain, Routed, route
from envs.builtin import BUILTIN
from envs.curve import KeyFileError, read_client_keys
from envs.errors import EnvironmentLoadError
from envs.importing import nearest
from envs.loader import LOADERS, parse_id
from orchestrator.config import Config
from orchestrator.config.env_sections import EnvSection, EvalEnvSection, TrainEnvSection
from orchestrator.env_servers.env import (
    EnvSpec,
    EvalEnv,
    EvalEnvs,
    EvalSettings,
    TrainEnv,
    TrainEnvs,
    TrainSettings,
)
from orchestrator.env_servers.supervision import RestartPolicy
from orchestrator.errors import ConfigError
from orchestrator.inference import (
    NEUTRAL,
)
from orchestrator.service.secrets import own_secrets


def verify_env(config: Config, section: EnvSection, *, train: bool) -> None:
    """Everything about an env that can be known here: its id, its keys, its interpreter."""
    _env_spec(config, section, name=section.label, train=train, sampling={})
    if section.addresses:
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
    config: Config, section: EnvSection, *, name: str, train: bool, sampling: dict[str, object]
) -> EnvSpec:
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
        addresses=tuple(section.addresses),
        capacity=section.capacity,
        seed=config.seed,
        ready_timeout_s=section.ready_timeout_s,
        silence_timeout_s=section.silence_timeout_s,
        reconnect_timeout_s=section.reconnect_timeout_s,
        ping_interval_s=1.0,
        lease_s=15.0,
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


def build_train_envs(config: Config) -> TrainEnvs:
    """The training environments, not started."""
    return TrainEnvs([build_train_env(config, section) for section in config.train.env])


def build_train_env(config: Config, section: TrainEnvSection) -> TrainEnv:
    """One of them."""
    spec = _env_spec(config, section, name=section.label, train=True, sampling=train_sampling(config))
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


def build_eval_envs(config: Config) -> EvalEnvs:
    """The evaluation environments, not started; their names are apart from the training ones'."""
    return EvalEnvs([build_eval_env(config, section) for section in config.eval.env])


def build_eval_env(config: Config, section: EvalEnvSection) -> EvalEnv:
    """One of them."""
    spec = _env_spec(
        config, section, name=f"eval-{section.label}", train=False, sampling=dict(config.eval.sampling)
    )
    repeats = section.rollouts_per_example or config.eval.rollouts_per_example
    settings = EvalSettings(
        num_examples=section.num_examples or config.eval.num_examples,
        rollouts_per_example=repeats,
        interval=section.interval or config.eval.interval,
    )
    return EvalEnv(replace(spec, capacity=max(spec.capacity, repeats)), settings)
