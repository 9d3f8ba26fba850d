"""What the service keeps to itself: variables that the configuration names, the trainer's token and keys."""

import os

from envs.curve import KeyFileError, ServerKeys, read_key, read_pair
from orchestrator.config import Config
from orchestrator.config.env_sections import EnvSection
from orchestrator.errors import ConfigError


def read_variable(setting: str, name: str | None) -> str | None:
    """What the environment variable that a setting names holds; ConfigError when there is none."""
    if name is None:
        return None
    value = os.environ.get(name)
    if not value:
        raise ConfigError(f"{setting}: the environment variable {name} is not set")
    return value


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
