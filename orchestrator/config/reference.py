"""The reference documentation of the configuration, made from the fields' own docstrings.

`python -m orchestrator.config.reference PATH` writes it; a test holds the written file to what this module says.
"""

import argparse
import json
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from orchestrator.config import Config, table_model

INTRODUCTION = """\
# Configuration

Made by `make docs` from the docstrings in `orchestrator/config`; change them there.

A configuration is a TOML file. Environment variables win over the file, and the command line wins over both:

```sh
ORCHESTRATOR__BATCH__SIZE=64 orchestrator run CONFIG
orchestrator run CONFIG --batch.size 64 --train.env.math.ratio 0.5
```

On the command line a value is written as in TOML (`--inference.base_urls '["http://10.0.0.7:8000/v1"]'`), text also without
quotes; an environment is named by its name or by its position. An unknown key is an error, wherever it is set.
`orchestrator check CONFIG` prints the result and what would be started.
"""

_NAMES = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path"}


def render_reference() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *_tables(Config, "")])


def _tables(model: type[BaseModel], path: str) -> Iterator[str]:
    """The table of a model's plain fields, then the tables inside it."""
    inside = {name: table_model(field.annotation) for name, field in model.model_fields.items()}
    yield from _table(model, path, [name for name, nested in inside.items() if nested is None])
    for name, nested in inside.items():
        if nested is not None:
            # A table of tables: what they are called is the user's choice.
            named = ".NAME" if typing.get_origin(model.model_fields[name].annotation) is dict else ""
            yield from _tables(nested, f"{path}.{name}{named}".removeprefix("."))


def _table(model: type[BaseModel], path: str, names: list[str]) -> Iterator[str]:
    brackets = f"[[{path}]]" if path.endswith(".env") else f"[{path}]"
    yield f"## {f'`{brackets}`' if path else 'Top level'}\n"
    if path:
        yield f"{_cell(model.__doc__ or '')}\n"
    yield "| key | type | default | meaning |\n|---|---|---|---|"
    for name in names:
        field = model.model_fields[name]
        kind = describe_type(field.annotation, field.metadata)
        yield f"| `{name}` | {_cell(kind)} | {_default(field)} | {_cell(field.description or '')} |"
    yield ""


def describe_type(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """A type and its bounds in words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return describe_type(arguments[0], arguments[1:])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe_type(part, metadata) for part in arguments if part is not type(None))
    if origin is Literal:
        return " or ".join(f"`{json.dumps(choice)}`" for choice in arguments)
    if origin is list:
        return f"list of {describe_type(arguments[0])}"
    if origin is dict:
        return "table"
    return f"{_NAMES[annotation]} {' and '.join(_bounds(metadata))}".strip()


def _bounds(metadata: Iterable[Any]) -> Iterator[str]:
    for mark in metadata:
        # A bound inside a union arrives still wrapped in its Field.
        if isinstance(mark, FieldInfo):
            yield from _bounds(mark.metadata)
        elif isinstance(mark, Ge):
            yield f"≥ {mark.ge}"
        elif isinstance(mark, Gt):
            yield f"> {mark.gt}"
        elif isinstance(mark, Le):
            yield f"≤ {mark.le}"
        elif isinstance(mark, Lt):
            yield f"< {mark.lt}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is None:
        return "unset"
    return f"`{json.dumps(str(value) if isinstance(value, Path) else value)}`"


def _cell(text: str) -> str:
    """Text that Markdown shows as it is, inside a table too."""
    return " ".join(text.split()).replace("<", "\\<").replace("|", "\\|")


def main() -> None:
    """Write the page to the path on the command line."""
    parser = argparse.ArgumentParser(description="Write the configuration reference.")
    parser.add_argument("path", type=Path)
    parser.parse_args().path.write_text(render_reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
