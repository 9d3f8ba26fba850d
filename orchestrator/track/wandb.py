"""The tracker of Weights & Biases: one run there for each run here, under the same id.

Numbers are logged over a metric `step` of our own, so that an evaluation may arrive after later steps, and a resumed run
goes on in the same curves. The library neither takes over the terminal nor the signals.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb  # type: ignore[import-not-found]  # an extra

from orchestrator.track.tracker import Tracker

QUIET = {"console": "off", "silent": True, "disable_git": True, "x_disable_meta": True}
"""The terminal stays the display's. Metadata would have the command line, whose overrides may hold what is secret."""


class WandbTracker(Tracker):
    """`options` are those of wandb.init: project, entity, name, group, tags, mode."""

    def __init__(self, directory: str, **options: Any) -> None:
        self._directory = Path(directory)
        self._options = options
        self._run: Any = None

    def start(self, config: Mapping[str, Any], run_id: str, resumed: bool) -> None:
        """Go on with the run of this id where there is one."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            id=run_id,
            resume="allow",
            config=dict(config),
            dir=str(self._directory),
            settings=wandb.Settings(**_known(QUIET)),
            **self._options,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A table of its own for each step."""
        columns = list(rows[0]) if rows else []
        table = wandb.Table(columns=columns, data=[[row.get(column) for column in columns] for row in rows])
        self._run.log({"samples": table, "step": step})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def _known(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those that this release of the library has."""
    return {name: value for name, value in settings.items() if name in wandb.Settings.model_fields}
