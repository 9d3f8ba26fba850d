"""Rows of a file, by number: JSON lines here, Parquet and Arrow in `envs.dataset.arrow`.

A file of JSON lines is read once, to find where its lines begin and what is wrong with them, and is not kept:
a row is read and decoded when it is asked for. So a server holds sixteen bytes per row, however long the rows are.
"""

import os
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from envs.dataset.template import find
from envs.errors import EnvironmentLoadError
from envs.importing import nearest

Row = Mapping[str, Any]
Check = Callable[[Row], str]
"""What is wrong with a row; empty when nothing is."""

JSON_LINES = (".jsonl", ".ndjson")
PROBLEMS_SHOWN = 5
_BOM = b"\xef\xbb\xbf"


class Rows(Protocol):
    """Rows by number, from 0."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Row: ...

    def place(self, number: int) -> str:
        """Where a row stands, for messages: "line 7"."""


class Problems:
    """What is wrong with rows: the first few in words, the others counted."""

    def __init__(self) -> None:
        self.count = 0
        self._shown: list[str] = []

    def add(self, place: str, problem: str) -> None:
        self.count += 1
        if len(self._shown) < PROBLEMS_SHOWN:
            self._shown.append(f"{place}: {problem}")

    def raise_if_any(self, shown: str) -> None:
        """EnvironmentLoadError of one line, with as many of them as fit."""
        if self.count:
            more = f"; and {self.count - len(self._shown)} more" if self.count > len(self._shown) else ""
            rows = "1 row" if self.count == 1 else f"{self.count} rows"
            raise EnvironmentLoadError(f"{shown}: {rows} cannot be used: {'; '.join(self._shown)}{more}")


def find_file(text: str) -> Path:
    """The path that a configuration names: absolute, or from where its modules are found.

    That is the working directory, then what is on the path of modules of an env server: the configuration's directory
    (`envs.importing.module_path`).
    """
    path = Path(text).expanduser()
    places = [Path(place) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    return next((place / path for place in (Path(), *places) if (place / path).exists()), path)


def read_rows(path: str | Path) -> Rows:
    """The rows of one file, for environments of your own: `tasks` may return them as they are."""
    return open_rows(find_file(str(path)), check=lambda row: "")


def open_rows(path: Path, *, check: Check, shown: str = "") -> Rows:
    """The rows of a file, every one of them checked; all of the first few problems are in one EnvironmentLoadError."""
    shown = shown or str(path)
    if not path.exists():
        raise EnvironmentLoadError(
            f"{shown}: there is no {path} in {Path.cwd()}, nor beside the configuration{_neighbours(path)}"
        )
    if path.is_dir():
        raise EnvironmentLoadError(
            f"{shown}: {path} is a folder, and neither dataset_dict.json nor state.json of `save_to_disk` is in it"
        )
    problems = Problems()
    rows: Rows
    if path.suffix in JSON_LINES:
        rows = JsonLines(path, check=check, problems=problems)
    elif path.suffix == ".parquet":
        from envs.dataset.arrow import open_parquet

        rows = open_parquet(path, check=check, problems=problems)
    else:
        raise EnvironmentLoadError(
            f"{shown}: files of JSON lines ({', '.join(JSON_LINES)}) and .parquet can be read, not {path.suffix or path.name}"
        )
    problems.raise_if_any(shown)
    if not len(rows):
        raise EnvironmentLoadError(f"{shown}: {path} has no rows")
    return rows


class JsonLines:
    """A file with one JSON object per line; empty lines are passed over."""

    repeatable = True

    def __init__(self, path: Path, *, check: Check, problems: Problems) -> None:
        self._path = path
        self._starts = array("Q")
        self._lines = array("Q")
        self._decoder = msgspec.json.Decoder(dict[str, Any])
        start = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                text = line.removeprefix(_BOM) if number == 1 else line
                if text.strip():
                    self._starts.append(start + len(line) - len(text))
                    self._lines.append(number)
                    problem = self._problem(text, check)
                    if problem:
                        problems.add(f"line {number}", problem)
                start += len(line)
            self._end = start
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> Row:
        start = self._starts[number]
        end = self._starts[number + 1] if number + 1 < len(self._starts) else self._end
        # One system call without a shared position, so that threads may read side by side.
        try:
            return self._decoder.decode(os.pread(self._file, end - start, start))
        except msgspec.DecodeError as error:
            raise RuntimeError(
                f"{self._path} changed while it was used: {self.place(number)}: {error}"
            ) from None

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def place(self, number: int) -> str:
        return f"line {self._lines[number]}"

    def _problem(self, line: bytes, check: Check) -> str:
        try:
            return check(self._decoder.decode(line))
        except msgspec.ValidationError:
            return "not a JSON object"
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return f"not JSON ({error})"


def check_columns(row: Row, columns: list[str]) -> str:
    """Names the columns that a row does not have, with the nearest that it has."""
    missing = []
    for column in columns:
        if row.get(column) is not None:
            continue
        try:
            if find(row, column) is None:
                missing.append(f'column "{column}" is empty')
        except KeyError:
            missing.append(f'no column "{column}" ({nearest(column, map(str, row))})')
    return ", ".join(missing)


def _neighbours(path: Path) -> str:
    """A hint for a name that is not there."""
    if not path.parent.is_dir():
        return ""
    there = [each.name for each in path.parent.iterdir() if each.suffix in (*JSON_LINES, ".parquet")]
    return f"; {nearest(path.name, there)}" if there else ""
