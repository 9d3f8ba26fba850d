"""Which task: the name of one problem of an environment, for training and for evaluation. Plain data."""

from typing import Any

import msgspec


class TrainTask(msgspec.Struct, frozen=True, gc=False):
    """Which example: `position` counts the tasks handed out by an env since the start of the run.

    `index` is where the position falls in the env's split; `epoch` is how often the split was gone through.
    """

    env: str
    split: str
    index: int
    epoch: int
    position: int

    @property
    def key(self) -> str:
        """Name of the task in the run: unique across envs, splits and epochs."""
        return f"{self.env}/{self.split}/{self.position}"


class EvalTask(msgspec.Struct, frozen=True):
    """One evaluation task and how often it is attempted; `context` goes back to whoever asked."""

    task: TrainTask
    size: int
    context: Any
