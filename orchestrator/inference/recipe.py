"""What a way of updating weights is made of: one engine, one version, and the calls that bring the one to the other."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import InferenceError
from orchestrator.inference.checkpoint import find_problem
from orchestrator.inference.engine import EngineApi


class WeightUpdateError(InferenceError):
    """A version cannot be loaded: its path is not in order, or no inference server would have it."""


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """One engine is to serve `version`, whose weights are at `path` (None if the publisher named none).

    `adapter` is a name that no adapter has had before, for recipes that load one.
    """

    engine: EngineApi
    version: int
    path: str | None
    model: str
    timeout_s: float
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """A recipe.

    `apply` brings one engine to new weights. `admit` is called before an engine gets its first work and
    whenever it comes back: it checks that updates will be possible and undoes what a killed service may have
    left. `read_label` reads back the version that `apply` wrote, by which a quick restart is noticed. `find_problem` says
    what is wrong with a folder before an engine is told of it. With `adapters` a version is an adapter beside the
    weights that the engine was started with, which stay as they are: rollouts ask for it by its name, which is its label too. With `sent`
    the trainer brings versions to the engines itself (`sending`), and an engine without the version's label waits for it.
    """

    name: str
    apply: Callable[[UpdateRequest], Awaitable[None]]
    needs_path: bool = False
    admit: Callable[[EngineApi], Awaitable[None]] | None = None
    read_label: Callable[[EngineApi], Awaitable[str | None]] | None = None
    find_problem: Callable[[Path], str] = find_problem
    adapters: bool = False
    sent: bool = False
