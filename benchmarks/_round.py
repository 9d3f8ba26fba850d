"""One benchmark, once, in a process of its own: `python -P _round.py NAME EFFORT FILE` writes what came out to a file as JSON.

Which tree is measured is decided by PYTHONPATH alone, so this uses nothing of the package but what it measures; a tree
of an earlier time may know only `figures(quick)`.
"""

import importlib
import json
import logging
import sys
import traceback
from pathlib import Path
from typing import Any

import structlog

FIELDS = ("what", "ours", "unit", "peer", "peer_name", "goal", "met", "note")


def outcome(name: str, effort: int) -> dict[str, Any]:
    """Figures, or why there are none."""
    # What the measured parts log would stand between the lines for people; a benchmark may still set it otherwise.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    frame: Any = importlib.import_module("benchmarks.frame")
    try:
        measure = importlib.import_module(f"benchmarks.{name}").figures
        figures = measure(frame.Effort(effort) if hasattr(frame, "Effort") else effort > 0)
    except getattr(frame, "CannotRunError", ()) as error:
        return {"left_out": str(error)}
    except Exception as error:  # noqa: BLE001  whatever it is, it becomes this benchmark's row
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}
    return {"figures": [row(figure) for figure in figures]}


def row(figure: Any) -> dict[str, Any]:
    """The fields that this figure has."""
    found = {field: getattr(figure, field) for field in FIELDS if hasattr(figure, field)}
    return found if isinstance(figure.spread, str) else {**found, "samples": figure.spread}


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(outcome(sys.argv[1], int(sys.argv[2]))), encoding="utf-8")
