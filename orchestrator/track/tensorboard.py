"""The tracker of TensorBoard: event files below one directory, a folder of its own for each run.

A later process of the same run writes a further file into the same folder, and has TensorBoard forget what an earlier
one logged from its first step on.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-not-found]  # an extra
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata  # type: ignore[import-not-found]  # an extra
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # type: ignore[import-not-found]  # an extra
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto  # type: ignore[import-not-found]  # an extra
from tensorboard.compat.proto.types_pb2 import DT_STRING  # type: ignore[import-not-found]  # an extra
from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-not-found]  # an extra

from orchestrator.track.tracker import Tracker


class TensorboardTracker(Tracker):
    """Writes event files into `directory`/RUN_ID."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._writer: EventFileWriter | None = None
        self._purges = False

    def start(self, config: Mapping[str, Any], run_id: str, resumed: bool) -> None:
        """The configuration is a text of the run."""
        self._writer = EventFileWriter(str(self._directory / run_id))
        self._purges = resumed
        if not resumed:
            self._write_text("config", f"```json\n{json.dumps(config, indent=2)}\n```", 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One event with all numbers."""
        if self._purges:
            self._purges = False
            self._add(Event(session_log=SessionLog(status=SessionLog.START)), step)
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(Event(summary=Summary(value=values)), step)

    def log_eval(self, step: int, env: str, metrics: Mapping[str, float]) -> None:
        """Under eval/ENV; an evaluation of an earlier step purges nothing."""
        values = [
            Summary.Value(tag=f"eval/{env}/{name}", simple_value=value) for name, value in metrics.items()
        ]
        self._add(Event(summary=Summary(value=values)), step)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A table in Markdown."""
        columns = list(rows[0]) if rows else []
        lines = [f"|{'|'.join(columns)}|", f"|{'|'.join('---' for _ in columns)}|"]
        lines += ["|" + "|".join(_cell(row.get(column, "")) for column in columns) + "|" for row in rows]
        self._write_text("samples", "\n".join(lines), step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write_text(self, tag: str, text: str, step: int) -> None:
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype=DT_STRING, tensor_shape=shape, string_val=[text.encode()])
        value = Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
        self._add(Event(summary=Summary(value=[value])), step)

    def _add(self, event: Event, step: int) -> None:
        assert self._writer is not None
        event.wall_time, event.step = time.time(), step
        self._writer.add_event(event)
        self._writer.flush()  # what a killed process had in memory would never be told again


def _cell(value: Any) -> str:
    """Text that stays in its cell."""
    return str(value).replace("|", "\\|").replace("\n", "<br>")
