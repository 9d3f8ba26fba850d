"""Configuration: a TOML file, environment variables and command-line overrides, validated as a whole.

`load_config` either returns a `Config` that can be run or raises one `ConfigError` that lists every problem with its
TOML path, and with the variable or flag that it came from.
"""

import copy
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, PrivateAttr, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from envs.importing import look_beside
from orchestrator.config.checks import find_problems, find_warnings
from orchestrator.config.env_sections import DomainConfig, EvalConfig, RayConfig, TrainConfig
from orchestrator.config.section import Truthless
from orchestrator.config.sections import (
    ArchiveConfig,
    BatchConfig,
    CurriculumConfig,
    DispatchConfig,
    HttpConfig,
    InferenceConfig,
    JournalConfig,
    LocalConfig,
    LogConfig,
    MixConfig,
    ModelConfig,
    StalenessConfig,
    TrainerConfig,
)
from orchestrator.config.shapes import Problem, find_misshapen, shown
from orchestrator.config.sources import ENV_PREFIX, Sources, read_toml
from orchestrator.config.track_sections import TrackConfig
from orchestrator.errors import ConfigError

__all__ = ["Config", "find_warnings", "load_config", "resolve_config", "table_model"]


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
    curriculum: CurriculumConfig = CurriculumConfig()
    batch: BatchConfig = BatchConfig()
    train: TrainConfig
    eval: EvalConfig = EvalConfig()
    domains: dict[str, DomainConfig] = {}
    ray: RayConfig = RayConfig()
    dispatch: DispatchConfig = DispatchConfig()
    staleness: StalenessConfig = StalenessConfig()
    trainer: TrainerConfig = TrainerConfig()
    journal: JournalConfig = JournalConfig()
    archive: ArchiveConfig = ArchiveConfig()
    http: HttpConfig = HttpConfig()
    log: LogConfig = LogConfig()
    track: TrackConfig = TrackConfig()

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
    return _resolve(read_toml(path), path, overrides, {})


def resolve_config(
    source: str | Path | Mapping[str, Any] | Config,
    overrides: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> Config:
    """The same for programs: a file's path, a dict of the same shape, or a Config; `settings` are by dotted name."""
    settings = settings or {}
    if isinstance(source, Config):
        if not overrides and not settings:
            return source
        data = source.model_dump(exclude_unset=True)
        path = (source.directory or Path.cwd()) / "the configuration"
    elif isinstance(source, Mapping):
        data, path = copy.deepcopy(dict(source)), Path("the configuration")
    else:
        path = Path(source)
        data = read_toml(path)
    return _resolve(data, path, overrides, settings)


def _resolve(
    data: dict[str, Any], path: Path, overrides: Sequence[str], settings: Mapping[str, Any]
) -> Config:
    sources = Sources(data)
    problems = sources.problems
    if not any(find_misshapen(data)):
        sources.add_environment(Config)
        sources.add_overrides(overrides)
        sources.add_settings(settings)
    if misshapen := list(find_misshapen(data)):
        raise _refusal(path, [*misshapen, *problems], sources)  # nothing else can look at such values
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
        raise _refusal(path, problems, sources)
    config._directory = path.resolve().parent
    look_beside(config._directory)
    return config


def _refusal(path: Path, problems: Sequence[Problem], sources: Sources) -> ConfigError:
    lines = []
    for where, what in problems:
        origin = sources.origin(where)
        lines.append(f"  {where}: {what}" + (f" (set by {origin})" if origin else ""))
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return ConfigError("\n".join([f"{path}: {count}", *lines]))


def _describe(details: ErrorDetails) -> Problem:
    location = details["loc"]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(
        "."
    )
    if details["type"] == "extra_forbidden":
        return path, f"unknown key{_nearest(str(location[-1]), _section(location[:-1]))}"
    if details["type"] == "missing":
        return path, "is required"
    if path in ("train.env", "eval.env") and isinstance(details["input"], dict):
        return path, f"is one table where a list of them is meant; write [[{path}]], with two brackets"
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
