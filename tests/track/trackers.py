"""Trackers of tests: one that writes down what it is told, and some that misbehave."""

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.track import Tracker


class Recording(Tracker):
    """Appends every call to a file, as JSON."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def _note(self, *call: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([*call, threading.current_thread().name]) + "\n")

    def start(self, config: Mapping[str, Any], run_id: str, resumed: bool) -> None:
        self._note("start", dict(config), run_id, resumed)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._note("log", step, dict(metrics))

    def log_eval(self, step: int, env: str, metrics: Mapping[str, float]) -> None:
        self._note("log_eval", step, env, dict(metrics))

    def close(self) -> None:
        self._note("close")


class Hanging(Tracker):
    """Never comes back from its first call."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        threading.Event().wait()


class Raising(Tracker):
    """Takes nothing."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise ConnectionError("the tracking server is away")


def calls(path: Path) -> list[list[Any]]:
    """What a `Recording` was told, without the thread's name."""
    return [json.loads(line)[:-1] for line in path.read_text(encoding="utf-8").splitlines()]


NOT_A_TRACKER = "something else"


class Mute(Tracker):
    """Forgot the one method that a tracker must have."""
