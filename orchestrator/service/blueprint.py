"""From configuration to the parts' own arguments: the rules of a run, its identity, what it will start.

Components take small frozen structures and never see the configuration; these functions make them. What is about
environments is in `env_blueprint`, what is about engines in `inference_blueprint`; no other place knows both sides.
"""

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from envs.loader import parse_id
from orchestrator.buffer.minimums import BatchMinimums
from orchestrator.config import Config
from orchestrator.config.checks import find_problems
from orchestrator.config.domains import domain_of
from orchestrator.config.env_sections import EnvSection, TrainEnvSection
from orchestrator.config.fitting import batch_minimums
from orchestrator.curriculum import CurriculumSettings, build_curriculum, verify_curriculum
from orchestrator.discovery import is_source
from orchestrator.dispatch.ports import Rules
from orchestrator.env_servers.env import (
    EvalEnvs,
    TrainEnvs,
)
from orchestrator.errors import ConfigError
from orchestrator.groups.scoring import build_advantage
from orchestrator.inference import (
    build_weight_update,
)
from orchestrator.journal import EnvIdentity, RunIdentity, digest_of
from orchestrator.mix import CircuitBreaker, EnvShare, build_mix, mix_targets, verify_strategy
from orchestrator.mix.foreign import describe_fault
from orchestrator.run.settings import (
    BatchSettings,
    Changeable,
    EvalEnvSettings,
    Limits,
    RunSettings,
    TrainEnvSettings,
)
from orchestrator.service.env_blueprint import verify_env
from orchestrator.service.secrets import read_variable, trainer_keys, trainer_token
from orchestrator.service.track_blueprint import build_setup
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
        *(partial(_verify_curriculum, config, section) for section in config.train.env),
        lambda: build_advantage(config.dispatch.advantage),
        lambda: build_weight_update(config.inference.weight_update),
        *(partial(verify_env, config, section, train=True) for section in config.train.env),
        *(partial(verify_env, config, section, train=False) for section in config.eval.env),
        lambda: read_variable("inference.api_key_env", config.inference.api_key_env),
        lambda: read_variable("http.token_env", config.http.token_env),
        lambda: trainer_token(config),
        lambda: trainer_keys(config),
        *(partial(build_setup, config, name) for name in config.track.use),
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


def _verify_curriculum(config: Config, section: TrainEnvSection) -> None:
    settings = build_curriculum_settings(config, section)
    verify_curriculum(lambda tasks: build_curriculum(settings, tasks, env=section.label))


def build_curriculum_settings(config: Config, section: TrainEnvSection) -> CurriculumSettings:
    """How the tasks of an env are chosen: as its own table says, else as all do."""
    table = section.curriculum or config.curriculum
    low, high = table.reward_range
    return CurriculumSettings(table.strategy, table.options, table.explore, (low, high))


def build_minimums(config: Config) -> BatchMinimums:
    """What every batch has at least of each env: as configured, or lowered to what whole groups can give."""
    return batch_minimums(config.batch, config.train)


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
                curriculum=_plain(asdict(build_curriculum_settings(config, section))),
            )
            for (name, env), section in zip(train.items(), config.train.env, strict=True)
        },
    )


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """As JSON knows it: a table of options may hold dates."""
    found: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return found


def _without_split(text: str) -> str:
    split = parse_id(text).split
    return text if split is None else text.removesuffix(f"@{split}")


def build_settings(
    config: Config, train: TrainEnvs, evals: EvalEnvs, *, endpoints: Sequence[str]
) -> RunSettings:
    """What the run is told; the environments must be connected. `endpoints`: inference servers as configured."""
    batch, dispatch = config.batch, config.dispatch
    targets, minimums = build_targets(config, train), build_minimums(config).shares()
    return RunSettings(
        seed=config.seed,
        max_steps=config.max_steps,
        batch=BatchSettings(
            size=batch.size,
            unit=batch.unit,
            mix=batch.mix,
            quotas=batch.quotas,
            on_starved=batch.on_starved,
            on_stuck=batch.on_stuck,
            stuck_after_s=batch.stuck_after_s,
            max_buffered=batch.max_buffered,
        ),
        max_versions=config.staleness.max_versions,
        ahead=config.trainer.ahead,
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
                curriculum=build_curriculum_settings(config, section),
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
        changeable=Changeable(
            ratios=configured_ratios(config),
            targets=partial(_retargeted, config, train),
            max_inflight=dispatch.max_inflight,
            endpoints=endpoints,
            sourced=any(map(is_source, config.inference.base_urls)),
        ),
    )


def configured_ratios(config: Config) -> dict[str, float | None]:
    """The ratio of each env."""
    return {section.label: section.ratio for section in config.train.env}


def _retargeted(config: Config, train: TrainEnvs, ratios: Mapping[str, float]) -> dict[str, float]:
    """The targets with other ratios; ConfigError where a configuration with these would be refused."""
    before = config.model_dump()
    after = config.model_dump()
    for section, table in zip(config.train.env, after["train"]["env"], strict=True):
        table["ratio"] = ratios.get(section.label, section.ratio)
    known = find_problems(before)
    found = [f"{path}: {problem}" for path, problem in find_problems(after) if (path, problem) not in known]
    if found:
        raise ConfigError("; ".join(found))
    return build_targets(config, train, ratios)


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


def build_targets(
    config: Config, envs: TrainEnvs, ratios: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Each env's share of the mix, some with other ratios than configured; the environments must be connected."""
    for env in envs.values():
        if env.num_tasks == 0:
            raise ConfigError(
                f'env "{env.name}": split "{env.spec.split}" has no tasks; name another, or remove the env'
            )
    shares = [
        EnvShare(
            name=env.name,
            ratio=(ratios or {}).get(env.name, env.settings.ratio),
            num_tasks=env.num_tasks,
            min_batch_allocation=env.settings.min_batch_allocation,
            group_size=env.settings.group_size,
            domain=domain_of(section.label, section.ids, config.domains),
        )
        for env, section in zip(envs.values(), config.train.env, strict=True)
    ]
    size = config.batch.size if config.batch.unit == "sequences" else None
    return dict(zip(envs, mix_targets(shares, batch_size=size, domains=config.mix.domains), strict=True))


def trainer_address(config: Config) -> str:
    """Where the trainer finds its batches."""
    if config.trainer.transport == "zmq":
        return config.trainer.bind
    directory = config.trainer.directory or config.run_dir / "trainer"
    return f"file://{directory.resolve()}"


def describe_start(config: Config) -> list[str]:
    """What a run would start, one line each."""
    lines = []
    if config.local is not None:
        lines.append("policy server on 127.0.0.1 (local)")
        if config.local.trainer:
            lines.append(f"reference trainer, learning rate {config.local.learning_rate:g}")
    lines += [
        f"inference servers that {url} names"
        if is_source(url)
        else f"inference server at {url} (expected to run)"
        for url in config.inference.base_urls
    ]
    sections: list[tuple[str, EnvSection]] = [
        *(("train", section) for section in config.train.env),
        *(("eval", section) for section in config.eval.env),
    ]
    for table, section in sections:
        started = "server(s) on Ray" if section.launcher == "ray" else "server process(es)"
        where = (
            f"at {', '.join(f'all that {entry} names' if is_source(entry) else entry for entry in section.addresses)}"
            if section.addresses
            else f"{section.workers} {started}"
        )
        lines.append(f'{table} env "{section.label}" ({", ".join(section.ids)}): {where}')
    link = re.sub(r"^(tcp://.*):0$", r"\1, a free port", trainer_address(config))
    lines.append(f"trainer link at {link}, {config.trainer.world_size} rank(s)")
    if config.http.enabled:
        port = f":{config.http.port}" if config.http.port else ", a free port"
        lines.append(f"HTTP at http://{config.http.host}{port}")
    lines += [f"tracker {name}" for name in config.track.use]
    lines.append(f"run directory {Path(config.run_dir)}")
    return lines
