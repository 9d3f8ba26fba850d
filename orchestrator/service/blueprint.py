"""From configuration to the parts' own arguments: the only place that knows both.

Components take small frozen structures and never see the configuration; these functions make them.
"""

import os
import random
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from envs.adapters.concatenated import join
from envs.adapters.domains import Domain, Routed, route
from envs.builtin import BUILTIN
from envs.curve import KeyFileError, ServerKeys, read_client_keys, read_key, read_pair
from envs.errors import EnvironmentLoadError
from envs.importing import nearest
from envs.loader import LOADERS, parse_id
from envs.model import unpacked
from orchestrator.buffer.minimums import BatchMinimums
from orchestrator.config import Config
from orchestrator.config.domains import domain_of
from orchestrator.config.fitting import batch_minimums
from orchestrator.config.sections import FROM_TRAINER, EnvSection, EvalEnvSection, TrainEnvSection
from orchestrator.dispatch.ports import Rules
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
from orchestrator.groups.scoring import build_advantage
from orchestrator.inference import (
    NEUTRAL,
    AdaptiveConcurrency,
    Beginning,
    FixedConcurrency,
    HealthPolicy,
    InferencePool,
    SamplingCheck,
    build_weight_update,
)
from orchestrator.inference.checkpoint import find_problem
from orchestrator.journal import EnvIdentity, RunIdentity, digest_of
from orchestrator.local.children import LocalChildren
from orchestrator.mix import CircuitBreaker, EnvShare, build_mix, mix_targets, verify_strategy
from orchestrator.mix.foreign import describe_fault
from orchestrator.run.settings import BatchSettings, EvalEnvSettings, Limits, RunSettings, TrainEnvSettings
from orchestrator.tasks.evaluations import EvalPlan


def verify(config: Config) -> None:
    """Look for what would fail at the start; ConfigError with all of it, before anything is spawned."""
    problems = find_faults(config)
    if problems:
        raise faulty(problems)


def faulty(problems: Sequence[str]) -> ConfigError:
    """The error that tells all of them."""
    return ConfigError("\n  ".join(["the configuration cannot be started", *problems]))


def find_faults(config: Config) -> list[str]:
    """What would fail at the start, as far as it can be known without starting a process."""
    parts: list[Callable[[], object]] = [
        lambda: verify_strategy(lambda: _trial_mix(config)),
        lambda: build_advantage(config.dispatch.advantage),
        lambda: build_weight_update(config.inference.weight_update),
        *(partial(verify_env, config, section, train=True) for section in config.train.env),
        *(partial(verify_env, config, section, train=False) for section in config.eval.env),
        lambda: read_variable("inference.api_key_env", config.inference.api_key_env),
        lambda: read_variable("http.token_env", config.http.token_env),
        lambda: trainer_token(config),
        lambda: trainer_keys(config),
    ]
    problems = []
    for build in parts:
        try:
            build()
        except ConfigError as error:
            problems.append(str(error))
        except Exception as error:  # noqa: BLE001  whatever somebody's module does when it is imported
            problems.append(describe_fault(error, None))
    return problems


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


def _trial_mix(config: Config) -> CircuitBreaker:
    """The mix as far as it is known before environments tell how many tasks they have."""
    envs = config.train.env
    return build_mix(
        config.mix.strategy,
        [section.label for section in envs],
        [1.0 if section.ratio is None else section.ratio for section in envs],
        rng=random.Random(0),
        group_sizes={section.label: section.group_size or config.train.group_size for section in envs},
        **config.mix.arguments(),
    )


def build_minimums(config: Config) -> BatchMinimums:
    """What every batch has at least of each env: as configured, or lowered to what whole groups can give."""
    return batch_minimums(config.batch, config.train)


def read_variable(setting: str, name: str | None) -> str | None:
    """What the environment variable that a setting names holds; ConfigError when there is none."""
    if name is None:
        return None
    value = os.environ.get(name)
    if not value:
        raise ConfigError(f"{setting}: the environment variable {name} is not set")
    return value


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


def own_secrets(config: Config) -> frozenset[str]:
    """Environment variables that only the service itself reads; env servers do not get them.

    All else, such as the API key of a judge, is an environment's own affair and stays.
    """
    sources = [config.trainer.secret_key_file, *config.trainer.trainer_key_files]
    sections: list[EnvSection] = [*config.train.env, *config.eval.env]
    for section in sections:
        sources += [section.server_key_file, section.secret_key_file]
    named = {source.removeprefix("env:") for source in sources if source and source.startswith("env:")}
    named.update(name for name in (config.http.token_env, config.trainer.token_env) if name)
    return frozenset(named - {config.inference.api_key_env})


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


def _train_sampling(config: Config) -> dict[str, object]:
    """What all training envs are sampled with; engines would fill in what is missing as the model's folder says."""
    return {**(NEUTRAL if config.train.neutral_sampling else {}), **config.train.sampling}


def build_train_envs(config: Config) -> TrainEnvs:
    """The training environments, not started."""
    return TrainEnvs([build_train_env(config, section) for section in config.train.env])


def build_train_env(config: Config, section: TrainEnvSection) -> TrainEnv:
    """One of them."""
    spec = _env_spec(config, section, name=section.label, train=True, sampling=_train_sampling(config))
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


def build_identity(config: Config, train: TrainEnvs) -> RunIdentity:
    """What decides which tasks come; the environments must be connected."""
    return RunIdentity(
        config.seed,
        {
            name: EnvIdentity(
                id=", ".join(_without_split(text) for text in section.ids),
                split=env.spec.split,
                num_tasks=env.num_tasks,
                args=digest_of(env.spec.args),
                samples={str(index): digest for index, digest in env.samples.items()},
            )
            for (name, env), section in zip(train.items(), config.train.env, strict=True)
        },
    )


def _without_split(text: str) -> str:
    split = parse_id(text).split
    return text if split is None else text.removesuffix(f"@{split}")


def build_settings(config: Config, train: TrainEnvs, evals: EvalEnvs) -> RunSettings:
    """What the run is told; the environments must be connected."""
    batch, dispatch = config.batch, config.dispatch
    targets, minimums = build_targets(config, train), build_minimums(config).shares()
    return RunSettings(
        seed=config.seed,
        max_steps=config.max_steps,
        batch=BatchSettings(
            size=batch.size,
            unit=batch.unit,
            quotas=batch.quotas,
            on_starved=batch.on_starved,
            on_stuck=batch.on_stuck,
            stuck_after_s=batch.stuck_after_s,
            max_buffered=batch.max_buffered,
        ),
        max_versions=config.staleness.max_versions,
        mode=config.staleness.mode,
        train=[
            TrainEnvSettings(
                name=name,
                split=env.spec.split,
                domain=domain_of(section.label, section.ids, config.domains),
                num_tasks=env.num_tasks,
                target=targets[name],
                group_size=env.settings.group_size,
                limits=_limits(config, section),
                minimum=minimums.get(name, 0.0),
                on_unmet_minimum=section.on_unmet_minimum,
                max_inflight=section.max_inflight,
                rollouts_per_minute=section.rollouts_per_minute,
            )
            for (name, env), section in zip(train.items(), config.train.env, strict=True)
        ],
        evals=eval_settings(config, evals),
        rules=build_rules(config),
        advantage=build_advantage(dispatch.advantage),
        keep_equal_rewards=dispatch.keep_equal_rewards,
        max_barren_batches=dispatch.max_barren_batches,
        strategy=config.mix.strategy,
        strategy_options=config.mix.arguments(),
    )


def eval_settings(config: Config, evals: EvalEnvs) -> list[EvalEnvSettings]:
    """What is evaluated; the environments must be connected."""
    return [
        EvalEnvSettings(
            plan=EvalPlan(
                env=env.name,
                split=env.spec.split,
                num_examples=env.examples,
                rollouts_per_example=env.settings.rollouts_per_example,
                interval=env.settings.interval,
            ),
            limits=_limits(config, section),
        )
        for env, section in zip(evals.values(), config.eval.env, strict=True)
    ]


def build_rules(config: Config) -> Rules:
    """The limits that all envs share."""
    dispatch = config.dispatch
    return Rules(
        backoff_s=dispatch.backoff_s,
        max_backoff_s=dispatch.max_backoff_s,
        min_valid=dispatch.min_valid,
        extra_rollouts=dispatch.extra_rollouts,
        ramp_s=dispatch.ramp_s,
    )


def _limits(config: Config, section: EnvSection) -> Limits:
    dispatch = config.dispatch
    return Limits(
        rollout_timeout_s=section.rollout_timeout_s or dispatch.rollout_timeout_s,
        group_timeout_s=section.group_timeout_s or dispatch.group_timeout_s,
        max_attempts=section.max_attempts or dispatch.max_attempts,
    )


def build_targets(config: Config, envs: TrainEnvs) -> dict[str, float]:
    """Each env's share of the mix; the environments must be connected."""
    shares = [
        EnvShare(
            name=env.name,
            ratio=env.settings.ratio,
            num_tasks=env.num_tasks,
            min_batch_allocation=env.settings.min_batch_allocation,
            group_size=env.settings.group_size,
            domain=domain_of(section.label, section.ids, config.domains),
        )
        for env, section in zip(envs.values(), config.train.env, strict=True)
    ]
    size = config.batch.size if config.batch.unit == "sequences" else None
    return dict(zip(envs, mix_targets(shares, batch_size=size, domains=config.mix.domains), strict=True))


def inference_urls(config: Config, children: LocalChildren) -> list[str]:
    """Where the inference servers are; with [local] one is started."""
    if config.local is None:
        return config.inference.base_urls
    latency_s = config.local.latency_s
    return [children.start_server(model=config.model.name, seed=config.seed, latency_s=latency_s)]


def build_pool(
    config: Config, base_urls: Sequence[str], *, version: int, weights_path: str | None, train: bool
) -> InferencePool:
    """The inference servers, not contacted. `train`: what they return is trained on, and must be fit for it."""
    dispatch, inference = config.dispatch, config.inference
    concurrency: FixedConcurrency | AdaptiveConcurrency = FixedConcurrency(dispatch.max_inflight)
    if dispatch.concurrency == "adaptive":
        concurrency = AdaptiveConcurrency(
            min_inflight=dispatch.min_inflight, max_inflight=dispatch.max_inflight
        )
    read_variable("inference.api_key_env", inference.api_key_env)
    health = HealthPolicy(
        interval_s=inference.health_interval_s, progress_timeout_s=inference.progress_timeout_s
    )
    return InferencePool(
        base_urls,
        model=config.model.name,
        update=build_weight_update("vllm" if config.local is not None else inference.weight_update),
        sampling=build_sampling_check(config, timeout_s=health.probe_timeout_s) if train else None,
        concurrency=concurrency,
        api_key_env=inference.api_key_env,
        version=version,
        weights_path=weights_path,
        beginning=_beginning(config, train),
        check_weights=inference.check_weights and config.local is None,
        health=health,
        update_timeout_s=inference.update_timeout_s,
        straggler_grace_s=inference.straggler_grace_s,
    )


def initial_path(config: Config) -> str | None:
    """The folder that a fresh run begins with, if one is named; ConfigError if it cannot be loaded."""
    named = config.inference.initial_weights
    if named in (None, FROM_TRAINER):
        return None
    folder = Path(named).expanduser().absolute()
    looked_at = config.inference.check_weights and config.local is None
    if looked_at and (problem := find_problem(folder)):
        remedy = "if only the servers see the folder, set inference.check_weights = false"
        raise ConfigError(f"inference.initial_weights: {problem}; {remedy}")
    return str(folder) if looked_at else named


def _beginning(config: Config, train: bool) -> Beginning:
    if not train:
        return Beginning.ANY
    return Beginning.TRAINER if config.inference.initial_weights == FROM_TRAINER else Beginning.OWN


def build_sampling_check(config: Config, *, timeout_s: float) -> SamplingCheck:
    """What training asks of every inference server."""
    shared = _train_sampling(config)
    return SamplingCheck(
        model=config.model.name,
        samplings={section.label: unpacked(merged(shared, section.sampling)) for section in config.train.env},
        accept_raw=config.inference.accept_raw_logprobs,
        timeout_s=timeout_s,
    )


def trainer_address(config: Config) -> str:
    """Where the trainer finds its batches."""
    if config.trainer.transport == "zmq":
        return config.trainer.bind
    directory = config.trainer.directory or config.run_dir / "trainer"
    return f"file://{directory.resolve()}"


def trainer_token(config: Config) -> str | None:
    """What trainers must present, if anything."""
    return read_variable("trainer.token_env", config.trainer.token_env)


def trainer_keys(config: Config) -> ServerKeys | None:
    """CURVE keys of the trainer link, if it has any."""
    trainer = config.trainer
    if trainer.secret_key_file is None:
        return None
    try:
        return ServerKeys(
            own=read_pair(trainer.secret_key_file),
            clients=tuple(read_key(source) for source in trainer.trainer_key_files),
        )
    except KeyFileError as error:
        raise ConfigError(f"trainer: {error}") from None


def describe_start(config: Config) -> list[str]:
    """What a run would start, one line each."""
    lines = []
    if config.local is not None:
        lines.append("policy server on 127.0.0.1 (local)")
        if config.local.trainer:
            lines.append(f"reference trainer, learning rate {config.local.learning_rate:g}")
    lines += [f"inference server at {url} (expected to run)" for url in config.inference.base_urls]
    sections: list[tuple[str, EnvSection]] = [
        *(("train", section) for section in config.train.env),
        *(("eval", section) for section in config.eval.env),
    ]
    for table, section in sections:
        where = (
            f"at {', '.join(section.addresses)}"
            if section.addresses
            else f"{section.workers} server process(es)"
        )
        lines.append(f'{table} env "{section.label}" ({", ".join(section.ids)}): {where}')
    link = re.sub(r"^(tcp://.*):0$", r"\1, a free port", trainer_address(config))
    lines.append(f"trainer link at {link}, {config.trainer.world_size} rank(s)")
    if config.http.enabled:
        port = f":{config.http.port}" if config.http.port else ", a free port"
        lines.append(f"HTTP at http://{config.http.host}{port}")
    lines.append(f"run directory {Path(config.run_dir)}")
    return lines
