"""Rollouts as a file for other programs: JSON lines, or Parquet with pyarrow; one row for each rollout.

The rows are the same in both, but that Parquet has the nested values (messages, metrics, timings, seats) as JSON text, so that
a table has one shape whatever its environments recorded. The file appears when it is whole.
"""

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.archive.records import ArchivedGroup
from orchestrator.errors import ConfigError

ROWS_AT_ONCE = 1000
"""Of a Parquet file, as it is written."""

_NESTED = ("messages", "metrics", "timings", "seats")


def export(groups: Iterable[ArchivedGroup], path: Path) -> int:
    """Write the rollouts of these groups; returns how many. The ending of the name says how: .jsonl or .parquet."""
    writers = {".jsonl": _write_lines, ".parquet": _write_parquet}
    if path.suffix not in writers:
        raise ConfigError(f"{path}: the name must end in {' or '.join(writers)}")
    if path.suffix == ".parquet":
        _pyarrow("pyarrow.parquet", path)  # before anything is read
    if path.exists():
        raise ConfigError(f"{path}: is there already; name another file, or take it away first")
    part = path.with_name(path.name + ".part")
    try:
        written = writers[path.suffix](rows_of(groups), part)
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
    return written


def rows_of(groups: Iterable[ArchivedGroup]) -> Iterator[dict[str, Any]]:
    """A row for each rollout, with what is known of its group."""
    for group in groups:
        of_group = {
            "group": group.id,
            "env": group.env,
            "split": group.split,
            "task": group.task,
            "epoch": group.epoch,
            "step": group.step,
            "version": group.version,
            "version_end": group.version_end,
            "outcome": group.outcome,
            "started_at": group.started_at,
            "finished_at": group.finished_at,
        }
        for rollout in group.rollouts:
            yield {**of_group, **asdict(rollout)}


def _write_lines(rows: Iterable[dict[str, Any]], path: Path) -> int:
    written = 0
    with path.open("wb") as file:
        for row in rows:
            # Bytes that an environment put into its messages become base64.
            file.write(msgspec.json.encode(row) + b"\n")
            written += 1
    return written


def _write_parquet(rows: Iterable[dict[str, Any]], path: Path) -> int:
    arrow, parquet = _pyarrow("pyarrow", path), _pyarrow("pyarrow.parquet", path)
    text, whole, real = arrow.string(), arrow.int64(), arrow.float64()
    schema = arrow.schema(
        [
            *((name, text) for name in ("group", "env", "split")),
            *((name, whole) for name in ("task", "epoch", "step", "version", "version_end")),
            *(("outcome", text), ("started_at", real), ("finished_at", real)),
            *(("number", whole), ("reward", real), ("tokens", whole), ("stop_reason", text)),
            ("truncated", arrow.bool_()),
            *((name, text) for name in _NESTED),
        ]
    )
    written = 0
    with parquet.ParquetWriter(path, schema) as file:
        for chunk in _chunks(rows):
            for row in chunk:
                row.update({name: msgspec.json.encode(row[name]).decode() for name in _NESTED})
            file.write_table(arrow.Table.from_pylist(chunk, schema=schema))
            written += len(chunk)
    return written


def _chunks(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    chunk: list[dict[str, Any]] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == ROWS_AT_ONCE:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _pyarrow(module: str, path: Path) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise ConfigError(
            f"{path}: Parquet needs pyarrow: pip install 'rollout-orchestrator[dataset]'; or write .jsonl"
        ) from None
