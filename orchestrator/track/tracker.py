"""What a tracker is, and where the named ones are.

All methods of a tracker, its constructor included, are called in one thread that is the tracker's own, in order, and
may take their time or raise. Known by name are those of `wandb` and `tensorboard`, whose libraries are imported in that
thread; everything else is "module:Class" of somebody's own.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from envs.importing import ImportReferenceError, import_attribute
from orchestrator.errors import ConfigError

NAMED = {
    "tensorboard": "orchestrator.track.tensorboard:TensorboardTracker",
    "wandb": "orchestrator.track.wandb:WandbTracker",
}
"""By the name of their library, which is also the name of the extra that installs it."""


class Tracker:
    """Is told what happens in a run. A tracker of your own overrides `log`, and the others as far as it needs them."""

    def start(self, config: Mapping[str, Any], run_id: str, resumed: bool) -> None:
        """Called once, before anything is logged. `config` holds no secrets; `run_id` stays the same when the run is
        `resumed` by a later process, which logs the steps after the last one that was trained on.
        """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step was trained on. Steps come in order. A class without this method is refused before a run starts."""
        raise NotImplementedError

    def log_eval(self, step: int, env: str, metrics: Mapping[str, float]) -> None:
        """An evaluation ended, perhaps some steps after the one that it evaluates."""
        self.log(step, {f"eval/{env}/{name}": value for name, value in metrics.items()})

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A few rollouts of the step, as far as they are kept: env, task, version, reward, group_mean, tokens, prompt, reply."""

    def close(self) -> None:
        """Nothing more comes. The run waits a few seconds for this at most."""


def build_maker(name: str, options: Mapping[str, Any]) -> Callable[[], Tracker]:
    """What makes the tracker, for its own thread to call; ConfigError when it could not."""
    if name in NAMED:
        spec = find_spec(name)
        # No origin: a folder of that name, such as wandb makes for its files.
        if spec is None or spec.origin is None:
            raise ConfigError(
                f'track.use: "{name}" needs a library that is not installed: pip install "rollout-orchestrator[{name}]"'
            )
        return lambda: import_attribute(NAMED[name], what="track.use:")(**options)
    if ":" not in name:
        raise ConfigError(f'track.use: "{name}" is not one of {", ".join(NAMED)} nor "module:Class"')
    try:
        found = import_attribute(name, what="track.use:", suggest=_is_tracker)
    except ImportReferenceError as error:
        raise ConfigError(str(error)) from None
    if not _is_tracker(found):
        raise ConfigError(f'track.use: "{name}" is not a class that derives from orchestrator.track.Tracker')
    if found.log is Tracker.log:
        raise ConfigError(
            f'track.use: "{name}" has no method log(step, metrics), so that it would track nothing'
        )
    try:
        inspect.signature(found).bind(**options)
    except TypeError as error:
        raise ConfigError(f'track.options."{name}": the class cannot be made with these: {error}') from None
    return lambda: found(**options)


def _is_tracker(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, Tracker) and found is not Tracker
