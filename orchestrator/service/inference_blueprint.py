"""From configuration to the pool of inference servers: addresses, what they begin with, what training asks of them."""

from collections.abc import Callable, Sequence
from pathlib import Path

from envs.model import unpacked
from orchestrator.config import Config
from orchestrator.config.sections import FROM_TRAINER
from orchestrator.discovery import Membership, is_source, look_up
from orchestrator.discovery.source import ENGINES
from orchestrator.errors import ConfigError
from orchestrator.inference import (
    AdaptiveConcurrency,
    Beginning,
    FixedConcurrency,
    HealthPolicy,
    InferencePool,
    SamplingCheck,
    WeightUpdate,
    build_weight_update,
)
from orchestrator.local.children import LocalChildren
from orchestrator.local.policy import find_policy_flaw
from orchestrator.service.env_blueprint import merged, sources_of, train_sampling
from orchestrator.service.secrets import read_variable
from orchestrator.trainer_link.versions import newest_stable


def inference_urls(config: Config, children: LocalChildren) -> list[str]:
    """Where the inference servers are that are listed; with [local] one is started."""
    if config.local is None:
        return [url for url in config.inference.base_urls if not is_source(url)]
    latency_s = config.local.latency_s
    return [children.start_server(model=config.model.name, seed=config.seed, latency_s=latency_s)]


def build_pool(
    config: Config,
    base_urls: Sequence[str],
    *,
    version: int,
    weights_path: str | None,
    train: bool,
    max_inflight: int | None = None,
) -> InferencePool:
    """The inference servers, not contacted. `train`: what they return is trained on, and must be fit for it.

    `max_inflight`: what a person has changed it to, if anybody has.
    """
    dispatch, inference = config.dispatch, config.inference
    most = max_inflight or dispatch.max_inflight
    concurrency: FixedConcurrency | AdaptiveConcurrency = FixedConcurrency(most)
    if dispatch.concurrency == "adaptive":
        # A lower bound that was raised since the change is not overruled by it.
        concurrency = AdaptiveConcurrency(
            min_inflight=dispatch.min_inflight, max_inflight=max(most, dispatch.min_inflight)
        )
    read_variable("inference.api_key_env", inference.api_key_env)
    health = HealthPolicy(
        interval_s=inference.health_interval_s, progress_timeout_s=inference.progress_timeout_s
    )
    return InferencePool(
        base_urls,
        membership=Membership(
            sources_of(config, inference.base_urls, ENGINES),
            of="inference",
            listed=[url.rstrip("/") for url in inference.base_urls],
            look=look_up,
        ),
        model=config.model.name,
        update=_recipe(config),
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
    if looked_at and (problem := _recipe(config).find_problem(folder)):
        remedy = "if only the servers see the folder, set inference.check_weights = false"
        raise ConfigError(f"inference.initial_weights: {problem}; {remedy}")
    return str(folder) if looked_at else named


def flaw_finder(config: Config) -> Callable[[int, str | None], str]:
    """Why a run cannot be set back to a version, as far as this machine can see and is asked to look."""
    recipe, inference = _recipe(config), config.inference

    def find(version: int, path: str | None) -> str:
        later = newest_stable(config.trainer.versions_dir) if config.trainer.versions_dir else None
        if later is not None and later[0] > version:
            return (
                f"{later[1]} would count again as soon as the run goes on; move what is later than version {version} out of "
                f"{config.trainer.versions_dir}"
            )
        if path is None:
            named = version == 0 and inference.initial_weights is not None
            if config.local is not None or named or not recipe.needs_path or recipe.adapters:
                return ""
            remedy = "name inference.initial_weights" if version == 0 else "choose a later step"
            return (
                "it is what the inference servers were started with, and nobody can load that into them again"
                if version == 0
                else "it was published without a path"
            ) + f"; {remedy}"
        if config.local is not None:
            return find_policy_flaw(path)
        return "" if recipe.sent or not inference.check_weights else recipe.find_problem(Path(path))

    return find


def _recipe(config: Config) -> WeightUpdate:
    return build_weight_update("vllm" if config.local is not None else config.inference.weight_update)


def _beginning(config: Config, train: bool) -> Beginning:
    if not train:
        return Beginning.ANY
    return Beginning.TRAINER if config.inference.initial_weights == FROM_TRAINER else Beginning.OWN


def build_sampling_check(config: Config, *, timeout_s: float) -> SamplingCheck:
    """What training asks of every inference server."""
    shared = train_sampling(config)
    return SamplingCheck(
        model=config.model.name,
        samplings={section.label: unpacked(merged(shared, section.sampling)) for section in config.train.env},
        accept_raw=config.inference.accept_raw_logprobs,
        timeout_s=timeout_s,
    )
