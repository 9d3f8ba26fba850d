"""From configuration to the pool of inference servers: addresses, what they begin with, what training asks of them."""

from collections.abc import Callable, Sequence
from pathlib import Path

from envs.model import unpacked
from orchestrator.config import Config
from orchestrator.config.sections import FROM_TRAINER
from orchestrator.errors import ConfigError
from orchestrator.inference import (
    AdaptiveConcurrency,
    Beginning,
    FixedConcurrency,
    HealthPolicy,
    InferencePool,
    SamplingCheck,
    build_weight_update,
)
from orchestrator.inference.checkpoint import find_problem
from orchestrator.local.children import LocalChildren
from orchestrator.local.policy import find_policy_flaw
from orchestrator.service.env_blueprint import merged, train_sampling
from orchestrator.service.secrets import read_variable


def inference_urls(config: Config, children: LocalChildren) -> list[str]:
    """Where the inference servers are; with [local] one is started."""
    if config.local is None:
        return config.inference.base_urls
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


def flaw_finder(config: Config) -> Callable[[str], str]:
    """What is wrong with the weights at a path, as far as this machine can see and is asked to look."""
    if config.local is not None:
        return find_policy_flaw
    return (lambda path: find_problem(Path(path))) if config.inference.check_weights else lambda path: ""


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
