"""Configuration: a TOML file, environment variables and command-line overrides, validated as a whole.

The command line wins over environment variables (`ORCHESTRATOR__BATCH__SIZE=64`), which win over the file.
`load_config` either returns a `Config` that can be run or raises one `ConfigError` that lists every problem
with its TOML path.
"""

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, PrivateAttr, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from envs.importing import look_beside
from orchestrator.config.checks import find_problems, find_warnings
from orchestrator.config.sections import (
    BatchConfig,
    DispatchConfig,
    DomainConfig,
    EvalConfig,
    HttpConfig,
    InferenceConfig,
    JournalConfig,
    LocalConfig,
    LogConfig,
    MixConfig,
    ModelConfig,
    StalenessConfig,
    TrainConfig,
    TrainerConfig,
    Truthless,
)
from orchestrator.config.shapes import Problem, find_misshapen, shown
from orchestrator.errors import ConfigError

ENV_PREFIX = "ORCHESTRATOR__"

__all__ = ["Config", "find_warnings", "load_config", "table_model"]


class Config(Truthless, BaseSettings):
    """A whole configuration file."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    run_dir: Path = Path("runs/default")
    """Directory for all that the run writes; the same directory again continues the run."""
    seed: int = 0
    """Seed of every random choice of the orchestrator."""
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """Batches after which the run is done; unset: until the trainer says so."""
    model: ModelConfig = ModelConfig()
    inference: InferenceConfig = InferenceConfig()
    local: LocalConfig | None = None
    mix: MixConfig = MixConfig()
    batch: BatchConfig = BatchConfig()
    train: TrainConfig
    eval: EvalConfig = EvalConfig()
    domains: dict[str, DomainConfig] = {}
    dispatch: DispatchConfig = DispatchConfig()
    staleness: StalenessConfig = StalenessConfig()
    trainer: TrainerConfig = TrainerConfig()
    journal: JournalConfig = JournalConfig()
    http: HttpConfig = HttpConfig()
    log: LogConfig = LogConfig()

    _directory: Path | None = PrivateAttr(default=None)

    @property
    def directory(self) -> Path | None:
        """Where the file is, if there is one; modules that it names are looked for there too."""
        return self._directory

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `load_config` has merged: it needs the merged data for checks that cross sections."""
        return (init_settings,)


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read, merge and validate; raises ConfigError with every problem found."""
    data = _read_toml(path)
    problems: list[Problem] = []
    if not any(find_misshapen(data)):
        _merge(data, _environment(problems))
        _apply_overrides(data, overrides, problems)
    if misshapen := list(find_misshapen(data)):
        raise _refusal(path, [*misshapen, *problems])  # nothing else can look at such values
    # A setting's name is never passed on as one of the class' own arguments, which start with an underscore.
    for name in [name for name in data if name not in Config.model_fields]:
        del data[name]
        problems.append((name, f"unknown key{_nearest(name, Config)}"))
    config = None
    try:
        config = Config(**data)
    except ValidationError as error:
        problems = [*(_describe(details) for details in error.errors()), *problems]
    # Values from variables are text until they are validated; so the validated ones are looked at where there are any.
    problems += find_problems(data if config is None else config.model_dump(exclude_none=True))
    if problems or config is None:
        raise _refusal(path, problems)
    config._directory = path.resolve().parent
    look_beside(config._directory)
    return config


def _refusal(path: Path, problems: Sequence[Problem]) -> ConfigError:
    lines = "\n".join(f"  {where}: {what}" for where, what in problems)
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return ConfigError(f"{path}: {count}\n{lines}")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not valid TOML: tables and lists are nested too deep") from None
    except ValueError as error:  # a syntax error, or a number with more digits than Python reads
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _environment(problems: list[Problem]) -> dict[str, Any]:
    """What ORCHESTRATOR__* variables set; pydantic-settings would silently ignore unknown ones."""
    for name in os.environ:
        if name.upper().startswith(ENV_PREFIX):
            section = name[len(ENV_PREFIX) :].split("__")[0].lower()
            if section not in Config.model_fields:
                problems.append((name, f'no such setting "{section}"{_nearest(section, Config)}'))
    try:
        return dict(EnvSettingsSource(Config)())
    except RecursionError:
        problems.append((ENV_PREFIX + "…", "tables and lists are nested too deep"))
    except (
        ValueError,
        TypeError,
        AttributeError,
    ) as error:  # whatever values of a wrong shape lead to inside it
        problems.append((ENV_PREFIX + "…", str(error)))
    return {}


def _merge(target: dict[str, Any], source: Mapping[str, Any]) -> None:
    for key, value in source.items():
        if isinstance(value, Mapping) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = value


def _apply_overrides(data: dict[str, Any], overrides: Sequence[str], problems: list[Problem]) -> None:
    """`--batch.size 64` or `--batch.size=64`; list items by index or by env name (`--train.env.math.ratio 0.5`)."""
    words = list(overrides)
    while words:
        word = words.pop(0)
        key, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            problems.append((word, "expected an override such as --batch.size 64"))
            continue
        if not equals:
            if not words:
                problems.append((word, "has no value"))
                return
            text = words.pop(0)
        try:
            _set(data, key.split("."), _value(text))
        except LookupError as error:
            problems.append((key, str(error.args[0])))


def _value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _set(target: Any, keys: list[str], value: Any) -> None:
    *path, last = keys
    for key in path:
        if isinstance(target, list):
            target = _item(target, key)
        else:
            target = _inside(target).setdefault(key.replace("-", "_"), {})
    _inside(target)[last.replace("-", "_")] = value


def _inside(target: Any) -> dict[str, Any]:
    if not isinstance(target, dict):
        raise LookupError("cannot be set: it is not inside a table")
    return target


def _item(items: list[Any], key: str) -> Any:
    for position, item in enumerate(items):
        if key == str(position) or (isinstance(item, dict) and key == (item.get("name") or item.get("id"))):
            return item
    raise LookupError(f'there is no item "{key}"')


def _describe(details: ErrorDetails) -> Problem:
    location = details["loc"]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(
        "."
    )
    if details["type"] == "extra_forbidden":
        return path, f"unknown key{_nearest(str(location[-1]), _section(location[:-1]))}"
    if details["type"] == "missing":
        return path, "is required"
    message = "input should be a table" if details["type"] == "model_type" else details["msg"]
    return path, f"{message[0].lower()}{message[1:]} (got {shown(details['input'])})"


def _section(location: tuple[int | str, ...]) -> type[BaseModel] | None:
    """The class of the table at a location."""
    current: Any = Config
    for part in location:
        if isinstance(part, int):
            continue
        field = current.model_fields.get(part)
        current = table_model(field.annotation) if field is not None else None
        if current is None:
            return None
    return current  # type: ignore[no-any-return]  # narrowed by construction: only model classes are followed


def table_model(annotation: Any) -> type[BaseModel] | None:
    """The class of the table, or of the tables, that a field with this annotation holds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = table_model(argument)
        if found is not None:
            return found
    return None


def _nearest(word: str, section: type[BaseModel] | None) -> str:
    names = list(section.model_fields) if section is not None else []
    match = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return (
        f'; did you mean "{match[0]}"?'
        if match
        else ("" if not names else f"; known here: {', '.join(sorted(names))}")
    )
