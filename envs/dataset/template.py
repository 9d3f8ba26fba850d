"""Text with columns in it: "{question}", or "{reward_model.ground_truth}" for a value inside a value.

Braces that are meant are doubled. A value that is not text is written as JSON, but a list is written as one
lettered line per item ("A. …"), as multiple choice needs it. Pure.
"""

import string
from collections.abc import Mapping
from typing import Any

import msgspec

LETTERS = string.ascii_uppercase
_MISSING = object()


class TemplateError(ValueError):
    """A template that cannot be read; the message says why."""


def find(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column, or of a path of names with dots; KeyError with the column where there is none."""
    if column in row:
        return row[column]
    found: Any = row
    for part in column.split("."):
        found = found.get(part, _MISSING) if isinstance(found, Mapping) else _MISSING
        if found is _MISSING:
            raise KeyError(column)
    return found


class Template:
    """One text with columns; `columns` are those that it names."""

    def __init__(self, text: str) -> None:
        self._parts: list[tuple[str, str | None]] = []
        try:
            for literal, name, spec, conversion in string.Formatter().parse(text):
                if spec or conversion:
                    raise TemplateError(f'"{{{name}…}}" has a format; only a column may stand there')
                if name == "":
                    raise TemplateError('"{}" names no column; braces that are meant are doubled')
                self._parts.append((literal, name))
        except ValueError as error:
            if isinstance(error, TemplateError):
                raise
            raise TemplateError(f"{error}; braces that are meant are doubled") from None
        self.columns = list(dict.fromkeys(name for _, name in self._parts if name is not None))

    def render(self, row: Mapping[str, Any]) -> str:
        """The text for one row; KeyError with the column that it has not."""
        return "".join(
            literal if name is None else literal + _text(find(row, name)) for literal, name in self._parts
        )


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(
            f"{LETTERS[place] if place < len(LETTERS) else place + 1}. {_text(item)}"
            for place, item in enumerate(value)
        )
    return msgspec.json.encode(value).decode()
