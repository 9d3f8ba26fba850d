"""What no setting can hold, wherever it stands: found before anything else looks at the values.

TOML, JSON in variables and the command line can all write numbers of any length, tables of any depth and text
that cannot be encoded. Past this point values are printed, compared and sent without a second thought, so what
would make one of these fail is refused here, with its path.
"""

from collections.abc import Iterator, Mapping
from typing import Any

Problem = tuple[str, str]
"""TOML path and what is wrong there."""

DEEPEST = 32
"""Tables and lists within each other; far below what recursion in parsers and printers can bear."""
LONGEST_SHOWN = 80
"""Characters of a value that a message repeats."""


def find_misshapen(value: Any, path: str = "", depth: int = 0) -> Iterator[Problem]:
    """Every value that is too deep, too large or not text."""
    if depth > DEEPEST:
        yield path, f"tables and lists are nested more than {DEEPEST} deep"
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if not _encodable(key):
                yield path, f"the key {key!r} holds characters that cannot be encoded"
                continue
            yield from find_misshapen(inner, f"{path}.{key}" if path else key, depth + 1)
    elif isinstance(value, list):
        for position, inner in enumerate(value):
            yield from find_misshapen(inner, f"{path}[{position}]", depth + 1)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield path, "is an integer beyond 64 bits"
    elif isinstance(value, str) and not _encodable(value):
        yield path, f"holds characters that cannot be encoded (got {shown(value)})"


def shown(value: object) -> str:
    """A value as a message repeats it, cut short where it is long."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


def _encodable(text: str) -> bool:
    """Neither a lone surrogate nor a NUL, which no file, process or URL takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text
