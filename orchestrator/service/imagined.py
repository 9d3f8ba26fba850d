"""From configuration to a run in virtual time: the settings that the service would give a real one, and places for its rollouts.

Nothing is started and no key is read. What servers would declare (tasks, whether whole groups are scored) is taken from the
surroundings.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.config import Config
from orchestrator.config.domains import domain_of
from orchestrator.env_servers.env import EvalEnv, EvalEnvs, TrainEnv, TrainEnvs
from orchestrator.errors import ConfigError
from orchestrator.run.settings import RunSettings
from orchestrator.service.blueprint import build_settings
from orchestrator.service.env_blueprint import build_eval_env, build_train_env
from orchestrator.simulate.answers import Answer, Answers, answer_of_rehearsal
from orchestrator.simulate.behaviour import Surroundings
from orchestrator.simulate.engines import Speeds
from orchestrator.simulate.rehearsal import Places, Rehearsal


def read_behaviour(path: Path) -> dict[str, Any]:
    """The tables of a behaviour file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def env_names(config: Config) -> list[str]:
    """Of all environments, as a behaviour file names them."""
    return [*(one.label for one in config.train.env), *(f"eval-{one.label}" for one in config.eval.env)]


def envs_by_tasks(config: Config) -> list[str]:
    """Training envs whose share of the mix is their number of tasks."""
    domains = [domain_of(env.label, env.ids, config.domains) for env in config.train.env]
    alone = [bool(config.mix.domains) and domains.count(domain) == 1 for domain in domains]
    return [
        env.label
        for env, single in zip(config.train.env, alone, strict=True)
        if env.ratio is None and not single
    ]


def needs_tasks(env: str) -> ConfigError:
    """A number that only a started env, or somebody who knows it, can tell."""
    return ConfigError(
        f'env "{env}": it has no ratio, and simulate does not start envs to count their tasks; '
        f"add --tasks {env}=1000"
    )


class _TrainEnv(TrainEnv):
    """One that is never spawned, and declares what it was told."""

    told: int | None = None

    @property
    def num_tasks(self) -> int | None:
        return self.told


class _EvalEnv(EvalEnv):
    told: int | None = None

    @property
    def num_tasks(self) -> int | None:
        return self.told


@dataclass(frozen=True, slots=True)
class Imagined:
    """A run that can be rehearsed as often as one likes."""

    settings: RunSettings
    places: Places
    around: Surroundings

    def rehearse(self, *, seeds: int, steps: int, seconds: float) -> Answers:
        """Each seed once; StalledError says what the run waits for where it forms no batch."""
        first = self.settings.seed
        return Answers(
            [self.once(seed, steps=steps, seconds=seconds) for seed in range(first, first + seeds)]
        )

    def once(self, seed: int, *, steps: int, seconds: float) -> Answer:
        """One run, from its start to so many batches or seconds."""
        around, places = self.around, self.places
        world = Rehearsal(replace(self.settings, seed=seed), around, places, seed=seed)
        world.rehearse(steps=min(steps, self.settings.max_steps or steps), seconds=seconds)
        best = Speeds(around.tokens_per_s).best * places.engines if around.tokens_per_s else 0.0
        return answer_of_rehearsal(world, best_tokens_per_s=best, slots=places.max_inflight)


def imagine(config: Config, around: Surroundings) -> Imagined:
    """The run of a configuration in these surroundings."""
    for name in envs_by_tasks(config):
        if around.envs[name].tasks is None:
            raise needs_tasks(name)
    train, evals = [], []
    for section in config.train.env:
        real = build_train_env(config, _keyless(section))
        env = _TrainEnv(real.spec, real.settings)
        env.told = around.envs[env.name].tasks
        train.append(env)
    for eval_section in config.eval.env:
        whole = build_eval_env(config, _keyless(eval_section))
        one = _EvalEnv(whole.spec, whole.settings)
        one.told = around.envs[one.name].tasks
        if one.told is None and one.settings.num_examples is None:
            raise ConfigError(
                f'env "{one.name}": how many tasks it has is not known; add --tasks {one.name}=100'
            )
        evals.append(one)
    engines = max(1, len(config.inference.base_urls))
    settings = build_settings(config, TrainEnvs(train), EvalEnvs(evals), endpoints=config.inference.base_urls)
    places = Places(
        max_inflight=config.dispatch.max_inflight,
        engines=engines,
        servers=_servers([*train, *evals]),
        stall_timeout_s=config.dispatch.stall_timeout_s,
    )
    return Imagined(settings, places, around)


def _keyless(section: Any) -> Any:
    """The same section without the keys of its servers, which need not be on this machine."""
    return section.model_copy(update={"server_key_file": None, "secret_key_file": None})


def _servers(envs: "list[TrainEnv | EvalEnv]") -> Mapping[str, tuple[int, int]]:
    return {env.name: (len(env.spec.addresses) or env.spec.workers, env.spec.capacity) for env in envs}
