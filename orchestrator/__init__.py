"""Rollout orchestrator: feeds a trainer with batches of exactly the asked size.

Importing this package starts nothing and imports nothing heavy; `orchestrator.trainer` needs only pyzmq,
msgspec and numpy, so that a trainer can use it without the rest. What scripts and notebooks call (`running`, `rollouts`)
is imported when it is asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.archive import RolloutReader
    from orchestrator.config import Config, load_config
    from orchestrator.errors import ConfigError, OrchestratorError
    from orchestrator.service.embedded import EmbeddedRun, running
    from orchestrator.service.rollouts import RolloutRow, rollouts

__version__ = "0.1.0"

__all__ = [
    "Config",
    "ConfigError",
    "EmbeddedRun",
    "OrchestratorError",
    "RolloutReader",
    "RolloutRow",
    "__version__",
    "load_config",
    "rollouts",
    "running",
]

_PLACES = {
    "Config": "orchestrator.config",
    "ConfigError": "orchestrator.errors",
    "EmbeddedRun": "orchestrator.service.embedded",
    "OrchestratorError": "orchestrator.errors",
    "RolloutReader": "orchestrator.archive",
    "RolloutRow": "orchestrator.service.rollouts",
    "load_config": "orchestrator.config",
    "rollouts": "orchestrator.service.rollouts",
    "running": "orchestrator.service.embedded",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for."""
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(place), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
