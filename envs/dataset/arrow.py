"""Rows of Parquet files and of folders that Hugging Face's `save_to_disk` wrote, read with pyarrow alone.

The rows stay in Arrow's own form (a folder's are mapped into memory), and become dicts one at a time. The
library of the datasets itself is not needed: such a folder is Arrow files and a JSON file that names them.
"""

import importlib
import json
from pathlib import Path
from typing import Any

from envs.dataset.rows import Check, Problems, Row, Rows
from envs.errors import EnvironmentLoadError

INSTALL = "pip install 'rollout-orchestrator[dataset]'"
_CHECKED_AT_ONCE = 1024


class ArrowRows:
    """Rows of an Arrow table."""

    repeatable = True

    def __init__(self, table: Any, *, check: Check, problems: Problems) -> None:
        self._table = table
        number = 0
        for batch in table.to_batches(max_chunksize=_CHECKED_AT_ONCE):
            for row in batch.to_pylist():
                problem = check(row)
                if problem:
                    problems.add(self.place(number), problem)
                number += 1

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, number: int) -> Row:
        (row,) = self._table.slice(number, 1).to_pylist()
        found: Row = row
        return found

    def place(self, number: int) -> str:
        return f"row {number}"


def open_parquet(path: Path, *, check: Check, problems: Problems) -> Rows:
    """The rows of a Parquet file."""
    pyarrow = _pyarrow("pyarrow", path)
    try:
        table = _pyarrow("pyarrow.parquet", path).read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise EnvironmentLoadError(f"{path} cannot be read as Parquet: {_one_line(error)}") from None
    return ArrowRows(table, check=check, problems=problems)


def saved_splits(path: Path) -> dict[str, Path] | None:
    """The folders of the splits that `DatasetDict.save_to_disk` wrote; None for the folder of a single dataset."""
    listing = path / "dataset_dict.json"
    if not listing.exists():
        return None
    try:
        return {split: path / split for split in json.loads(listing.read_text(encoding="utf-8"))["splits"]}
    except (ValueError, KeyError, TypeError) as error:
        raise EnvironmentLoadError(f"{listing} is not of `save_to_disk`: {_one_line(error)}") from None


def is_saved(path: Path) -> bool:
    """Whether a folder is one that `save_to_disk` wrote."""
    return (path / "dataset_dict.json").exists() or (path / "state.json").exists()


def open_saved(path: Path, *, check: Check, shown: str) -> Rows:
    """The rows of a dataset that `Dataset.save_to_disk` wrote."""
    pyarrow = _pyarrow("pyarrow", path)
    problems = Problems()
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        files = [path / each["filename"] for each in state["_data_files"]]
        tables = [pyarrow.ipc.open_stream(pyarrow.memory_map(str(file))).read_all() for file in files]
        table = pyarrow.concat_tables(tables)
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise EnvironmentLoadError(
            f"{shown}: {path} cannot be read as a folder of `save_to_disk`: {_one_line(error)}"
        ) from None
    rows = ArrowRows(table, check=check, problems=problems)
    problems.raise_if_any(shown)
    if not len(rows):
        raise EnvironmentLoadError(f"{shown}: {path} has no rows")
    return rows


def _pyarrow(module: str, path: Path) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise EnvironmentLoadError(
            f"{path}: pyarrow is not installed for this interpreter; {INSTALL}, or set `python` to one that has it"
        ) from None


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
