"""The tables of trackers: [track], with one inside for each tracker that has settings."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from orchestrator.config.section import Positive, Section


class WandbConfig(Section):
    """The tracker "wandb". The API key comes from WANDB_API_KEY or from wandb's own files, never from here. The id there
    is that of the run, so that a resumed run continues its curves."""

    project: str = "rollout-orchestrator"
    """Project that the run belongs to."""
    entity: str | None = None
    """Team or user; unset: wandb's default."""
    name: str | None = None
    """Name that is shown; unset: the name of the run directory."""
    group: str | None = None
    """Group of runs that belong together."""
    tags: list[str] = []
    """Words to find the run by."""
    mode: Literal["online", "offline"] | None = None
    """offline writes below the run directory, for `wandb sync`; unset: what WANDB_MODE says, else online."""


class TensorboardConfig(Section):
    """The tracker "tensorboard"."""

    directory: Path | None = None
    """Log directory, in which every run has a folder of its own; <run_dir>/tensorboard when unset."""


class TrackConfig(Section):
    """Where the numbers of steps and evaluations go, beside metrics.jsonl; docs/tracking.md has their names. A tracker that
    fails, hangs or is offline costs what it would have logged, and never holds up the run."""

    use: list[str] = []
    """Trackers, any number of them: wandb, tensorboard, or "module:Class" of your own."""
    wandb: WandbConfig = WandbConfig()
    tensorboard: TensorboardConfig = TensorboardConfig()
    samples: Annotated[int, Field(ge=0)] = 8
    """Rollouts in the table of samples that wandb and tensorboard show, with prompt and reply; 0: no texts leave the run."""
    samples_interval: Positive = 10
    """Steps from one table of samples to the next."""
    options: dict[str, dict[str, Any]] = {}
    """Arguments of trackers of your own, by what `use` calls them."""
