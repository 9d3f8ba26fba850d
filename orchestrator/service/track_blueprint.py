"""From configuration to trackers, and what of the configuration they may see."""

import re
from collections.abc import Mapping
from typing import Any

from envs.errors import shown_url
from orchestrator.config import Config
from orchestrator.service.samples import read_samples
from orchestrator.track import SampleRule, TrackerSetup, build_maker

SECRET = re.compile(r"(?:^|_)(?:api_?key|token|password|passwd|secret)$", re.IGNORECASE)
"""Names under which arguments of environments and trackers may hold a secret; settings of ours only ever name variables."""


def build_setups(config: Config) -> list[TrackerSetup]:
    """The trackers that are to be made; ConfigError for one that could not be."""
    return [build_setup(config, name) for name in config.track.use]


def build_setup(config: Config, name: str) -> TrackerSetup:
    """One of them."""
    return TrackerSetup(name, build_maker(name, tracker_options(config, name)))


def tracker_options(config: Config, name: str) -> Mapping[str, Any]:
    """What a tracker is made with."""
    track = config.track
    if name == "tensorboard":
        return {"directory": str((track.tensorboard.directory or config.run_dir / "tensorboard").resolve())}
    if name == "wandb":
        given = track.wandb.model_dump(exclude_none=True)
        return {"name": config.run_dir.resolve().name, **given, "directory": str(config.run_dir.resolve())}
    return track.options.get(name, {})


def build_samples(config: Config) -> SampleRule | None:
    """Which rollouts trackers show, if any."""
    most = config.track.samples
    if not most:
        return None
    return SampleRule(
        read=lambda step: read_samples(config.run_dir, step, most), interval=config.track.samples_interval
    )


def shown_config(config: Config) -> dict[str, Any]:
    """The configuration as trackers see it: without secrets, addresses without credentials."""
    shown: dict[str, Any] = _without_secrets(config.model_dump(mode="json"))
    return shown


def _without_secrets(value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {key: _without_secrets(inside, str(key)) for key, inside in value.items()}
    if isinstance(value, list):
        return [_without_secrets(inside, name) for inside in value]
    if isinstance(value, str) and SECRET.search(name):
        return "(hidden)"
    if isinstance(value, str) and re.match(r"\w+://\S*@", value):
        return shown_url(value)
    return value
